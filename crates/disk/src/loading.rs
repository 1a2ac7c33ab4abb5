//! Reading a chain with what its indexes know, for a disk that is opened.
//!
//! The headers are followed down to the first layer whose index holds; that knows what the layers below it say.

mod borders;
mod indexed;

use std::path::Path;
use std::sync::Arc;

use vmstrata_store::Gate;
use vmstrata_types::MAX_LAYERS;

use crate::chain::{OpenOptions, Top, open_top, walk_below};
use crate::error::{Error, ErrorKind, Result};
use crate::index::Index;
use crate::layer::{Layer, Tables};
use crate::opener::{Opener, Role};
use crate::resources::Resources;
use indexed::Search;

/// A chain as read from its headers.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) top: Top,
    /// The layers below the top, base first.
    pub(crate) below: Vec<Arc<Layer>>,
    /// Whether a process was killed while it made the layer below the top a frozen one.
    pub(crate) unfinished: bool,
    /// Whether a flush log may have flushed writes of one of them.
    pub(crate) behind_log: bool,
    /// Of the newest layer that has one, or of one below it.
    pub(crate) index: Option<Arc<Index>>,
    /// Whether a layer above that had an index that does not hold any more, or has none.
    pub(crate) lost_index: bool,
}

/// Reads the headers of the chain whose active layer is `path`, down to the first layer whose index knows what those
/// below it say.
///
/// # Errors
/// As [`crate::chain::walk`].
pub(crate) fn read_chain(path: &Path, options: &OpenOptions, resources: &Resources) -> Result<Chain> {
    loop {
        match read_once(path, options, resources) {
            // It is not what an index says, or it was changed since that was read: the next look is closer.
            Err(error) if error.is_change() && error.path().is_some_and(|file| resources.doubt(file)) => {}
            done => return done,
        }
    }
}

fn read_once(path: &Path, options: &OpenOptions, resources: &Resources) -> Result<Chain> {
    let role = if options.read_only { Role::Frozen } else { Role::Active(options.cache) };
    let opener = resources.files().opener();
    let top = open_named(path, role, options, &**opener)?;
    let mut search = Search::new(&top, options, resources.doubted(), opener)?;
    let mut index = if options.read_only { search.ask(&top) } else { None };
    let (mut unfinished, mut newest, mut above) = (None, None, Vec::new());
    let mut behind_log = top.is_behind_log();
    // Of a disk's own index, the disk itself is the last layer.
    let mut indexed = index.as_ref().map_or(0, |index| index.layers().len() - 1);
    if index.is_none() {
        above = walk_below(path, &top, options, Role::Frozen, &**opener, |layer| {
            unfinished.get_or_insert(layer.is_in_session());
            behind_log |= layer.is_behind_log();
            index = search.ask(&layer);
            let layer = freeze(layer, resources);
            if index.is_some() {
                newest = Some(layer);
                return Ok(None);
            }
            Ok(Some(layer))
        })?;
        // The newest that the index answers for is open.
        indexed = index.as_ref().map_or(0, |index| index.layers().len() - 1);
    }
    if indexed + usize::from(newest.is_some()) + above.len() >= MAX_LAYERS {
        return Err(Error::from(ErrorKind::TooLong).in_file(path));
    }
    let lost_index = search.has_met_changes() || index.is_some() && !above.is_empty();
    let known = index.iter().flat_map(|index| &index.layers()[..indexed]);
    let below: Vec<Arc<Layer>> =
        known.map(|layer| resources.share_layer(layer.layer())).chain(newest).chain(above).collect();
    borders::hold(path, &below, resources.files())?;
    Ok(Chain { top, below, unfinished: unfinished.unwrap_or(false), behind_log, index, lost_index })
}

/// How often a path may lead to another file than it did when that was opened.
const RENAMES_MAX: u32 = 16;

/// Opens the file on top of a chain, and makes sure that it is the one that `path` leads to: a snapshot may give the name
/// to another file while the lock is waited for.
fn open_named(path: &Path, role: Role, options: &OpenOptions, opener: &dyn Opener) -> Result<Top> {
    for _ in 0..RENAMES_MAX {
        let top = open_top(path, role, options, opener)?;
        let is_there = || opener.identity(path, &Gate::unrestricted());
        if role == Role::Frozen || is_there()?.file == top.opened.identity.file {
            return Ok(top);
        }
    }
    Err(Error::from(ErrorKind::Changed).in_file(path))
}

/// Makes an open file a shared frozen layer.
pub(crate) fn freeze(file: Top, resources: &Resources) -> Arc<Layer> {
    if file.is_in_session() {
        tracing::warn!(
            file = %file.path.display(),
            "the process that wrote this file did not close it: what it had not flushed is in its journal, if anywhere; to take that up, open the file itself for writing once, with the same journal directory"
        );
    }
    let tables = file.head.as_ref().map(|head| Tables::of(&head.header));
    let layer = Layer::new(file.path, file.opened.identity, file.size, tables).in_window(file.window);
    let layer = resources.share_layer(layer);
    resources.files().adopt(&layer, &file.opened);
    layer
}
