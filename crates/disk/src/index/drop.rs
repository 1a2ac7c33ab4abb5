//! `vmstrata index drop`: a chain as if there had never been an index.

use std::path::{Path, PathBuf};

use vmstrata_store::Place;

use vmstrata_qcow2::index::IndexError;
use vmstrata_qcow2::{Autoclear, Incompatible};

use super::build::{IndexOptions, Link, Links};
use super::digest::{Content, digest};
use super::free::Used;
use super::home::{find_link, root_in_file, root_in_sidecar};
use super::link::write_link;
use crate::chain::{Qcow2Head, Top};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::opener::Role;
use crate::times;

/// What was removed from a layer.
#[derive(Debug)]
pub struct IndexDropped {
    /// The layer's file.
    pub path: PathBuf,
    /// Whether the file itself had an index, and the bytes it is shorter now.
    pub in_file: Result<Option<u64>>,
    /// Whether it had a sidecar, which is gone.
    pub sidecar: Result<bool>,
}

/// Removes every index from the chain of the disk at `path`, the disk's own file included.
///
/// # Errors
/// A chain that cannot be read.
pub fn remove(path: &Path, options: &IndexOptions) -> Result<Vec<IndexDropped>> {
    let chain = Links::read(path, &IndexOptions { include_top: true, ..options.clone() })?;
    let mut dropped = Vec::new();
    // From the top: no index is left that leads into one that is gone.
    for (number, link) in chain.links.iter().enumerate().rev() {
        dropped.push(IndexDropped {
            path: link.path.clone(),
            in_file: remove_from_file(&chain, link).map_err(|error| error.in_file(&link.path)),
            sidecar: remove_sidecar(&chain, link),
        });
        options.tell(chain.links.len() - number, chain.links.len());
    }
    dropped.reverse();
    Ok(dropped)
}

fn remove_from_file(chain: &Links, link: &Link) -> Result<Option<u64>> {
    let looked = chain.open(link, Role::Inspected)?;
    let Some(head) = &looked.head else { return Ok(None) };
    let Some(found) = find_link(&*looked.opened.store, &head.header)? else { return Ok(None) };
    if found.link.is_none() && !head.header.autoclear.contains(Autoclear::INDEX) {
        return Ok(None);
    }
    // Only now is it worth asking for the right to write.
    let top = chain.open(link, Role::Indexed)?;
    let head = top.head.as_ref().ok_or(ErrorKind::Changed)?;
    let store = &*top.opened.store;
    // Before anything is changed: only the file's owner may.
    times::put_back(store, top.opened.identity.mtime_ns)?;
    let len = end_without(&top, head).unwrap_or_else(|error| {
        tracing::debug!(file = %link.path.display(), %error, "the file keeps its length");
        None
    });
    write_link(store, &head.header, found.at, None)?;
    if let Some(len) = len {
        store.set_len(len).while_trying("cut off the index")?;
        store.flush().while_trying("flush")?;
    }
    times::put_back(store, top.opened.identity.mtime_ns)?;
    Ok(Some(len.map_or(0, |len| top.opened.identity.len - len)))
}

/// Where the file is to be cut; `None` if its index is not what it ends with.
fn end_without(top: &Top, head: &Qcow2Head) -> Result<Option<u64>> {
    let (store, len) = (&*top.opened.store, top.opened.identity.len);
    let unsure = head.header.incompatible.intersects(Incompatible::DIRTY | Incompatible::CORRUPT);
    let Some(root) = root_in_file(store, head)?.filter(|root| root.area.end.get() == len && !unsure) else {
        return Ok(None);
    };
    let content: Content = digest(store, Some(head), len)?;
    let used = Used::of(store, head, &content)?;
    if !used.is_free_from(root.area.start) {
        return Ok(None);
    }
    used.len_without(store, &root).map(Some)
}

fn remove_sidecar(chain: &Links, link: &Link) -> Result<bool> {
    let Some(path) = chain.opener.sidecar(&link.path, &chain.gate) else { return Ok(false) };
    match root_in_sidecar(&link.path, &chain.gate, &*chain.opener) {
        Ok(None) => return Ok(false),
        // A damaged index is one too; what never was one stays.
        Ok(Some(_)) => {}
        Err(error) if matches!(error.kind(), ErrorKind::Index(kind) if *kind != IndexError::Missing) => {}
        Err(error) => return Err(error),
    }
    Place::of(&path)
        .and_then(|place| place.remove())
        .while_trying("remove the index")
        .map_err(|error: Error| error.in_file(&path))?;
    Ok(true)
}
