//! `vmstrata index drop`: a chain as if there had never been an index.

use std::path::{Path, PathBuf};

use vmstrata_qcow2::index::IndexError;
use vmstrata_qcow2::{Autoclear, Incompatible};

use super::build::{IndexOptions, Link, Links};
use super::digest::digest;
use super::home::{find_link, root_in_file, root_in_sidecar, sidecar_of};
use super::place::{is_free, write_link};
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
    let root = root_in_file(store, head).ok().flatten();
    let content = digest(store, top.head.as_ref(), top.opened.identity.len).ok();
    write_link(store, &head.header, found.at, None)?;
    let mut freed = 0;
    if let Some(root) = root.filter(|root| root.area.end.get() == top.opened.identity.len)
        && !head.header.incompatible.intersects(Incompatible::DIRTY | Incompatible::CORRUPT)
        && root.len_before > content.map_or(u64::MAX, |content| content.highest)
        && is_free(store, &head.header, root.area.start, root.len_before - 1)?
    {
        freed = top.opened.identity.len - root.len_before;
        store.set_len(root.len_before).while_trying("cut off the index")?;
        store.flush().while_trying("flush")?;
    }
    times::put_back(store, top.opened.identity.mtime_ns)?;
    Ok(Some(freed))
}

fn remove_sidecar(chain: &Links, link: &Link) -> Result<bool> {
    let path = sidecar_of(&link.path);
    match root_in_sidecar(&link.path, &chain.gate, &*chain.opener) {
        Ok(None) => return Ok(false),
        // A damaged index is one too; what never was one stays.
        Ok(Some(_)) => {}
        Err(error) if matches!(error.kind(), ErrorKind::Index(kind) if *kind != IndexError::Missing) => {}
        Err(error) => return Err(error),
    }
    std::fs::remove_file(&path)
        .while_trying("remove the index")
        .map_err(|error: Error| error.in_file(&path))?;
    Ok(true)
}
