//! Bytes of a layer that are not on this host yet.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_store::{Fetched, OpenStore};
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
    fn fetch(self, then: impl FnOnce(Result<Fetched>) + Send + 'static) {
        let Self { file, path, layer, at, len } = self;
        let named = move |fetched: std::io::Result<Fetched>| {
            let fetched = fetched.while_trying("fetch");
            then(fetched.map_err(|error| error.at(at).in_layer(layer).in_file(&path)));
        };
        file.fetch().expect("its bytes may be absent").fetch(at, len, Box::new(named));
    }
}

/// Has all pieces come here, at the same time, and then calls `then`, with the first failure if there is any, else with
/// [`Fetched::NotKept`] if that is so of any. Waits for nothing.
///
/// # Panics
/// When there are none.
pub(crate) fn fetch_all(pieces: Vec<Absent>, then: impl FnOnce(Result<Fetched>) + Send + 'static) {
    assert!(!pieces.is_empty(), "nothing to wait for");
    let waiting = Arc::new(Mutex::new((pieces.len(), Ok(Fetched::Here), Some(then))));
    for piece in pieces {
        let waiting = Arc::clone(&waiting);
        piece.fetch(move |fetched| {
            let mut waiting = waiting.lock();
            let (left, all, then) = &mut *waiting;
            *left -= 1;
            if all.is_ok() && !matches!(fetched, Ok(Fetched::Here)) {
                *all = fetched;
            }
            if *left == 0 {
                let (all, then) = (std::mem::replace(all, Ok(Fetched::Here)), then.take());
                drop(waiting);
                then.expect("the last comes once")(all);
            }
        });
    }
}
