//! Bytes of a layer that are not on this host yet.

use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_store::OpenStore;
use vmstrata_types::{HostOffset, LayerIndex};

use crate::error::{IoContext as _, Result};

/// A piece of a layer that has to be fetched before it is read.
#[derive(Debug)]
pub(crate) struct Absent {
    pub(crate) file: Arc<OpenStore>,
    pub(crate) path: PathBuf,
    pub(crate) layer: LayerIndex,
    pub(crate) at: HostOffset,
    pub(crate) len: u64,
}

impl Absent {
    /// Has it come here, and calls `then` with what became of that. Waits for nothing.
    pub(crate) fn fetch(self, then: impl FnOnce(Result<()>) + Send + 'static) {
        let Self { file, path, layer, at, len } = self;
        let named = move |fetched: std::io::Result<()>| {
            let fetched = fetched.while_trying("fetch");
            then(fetched.map_err(|error| error.at(at).in_layer(layer).in_file(&path)));
        };
        file.fetch().expect("its bytes may be absent").fetch(at, len, Box::new(named));
    }
}
