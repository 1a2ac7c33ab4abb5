//! Where an index lies: in the layer's own file, or in a sidecar beside it.
//!
//! In the file, the header's link leads to the root, if the autoclear bit stands and no one is writing the image; neither
//! is believed further than to look there. A sidecar has its root at its start.

use std::io::{self, Read as _};
use std::path::Path;

use vmstrata_qcow2::index::{IndexLink, MAGIC, PAGE_LEN, Page, Root, link_place};
use vmstrata_qcow2::{Autoclear, Header};
use vmstrata_store::{Access, Gate, Place, Store};
use vmstrata_types::HostOffset;

use crate::chain::Qcow2Head;
use crate::error::{IoContext as _, Result};
use crate::names::sidecar_of;
use crate::opener::{Opened, Opener, Role};
use crate::session::SESSION_MASK;

/// A header's extensions are looked for this far; images that vmstrata makes have theirs in the first sector.
const LINK_PROBE: usize = 4096;

/// The link in a header, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkFound {
    pub(super) at: HostOffset,
    pub(super) link: Option<IndexLink>,
}

/// Looks for the link, or the room for one, in the header of the file in `store`.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn find_link(store: &dyn Store, header: &Header) -> Result<Option<LinkFound>> {
    let mut bytes = vec![0; header.extensions_end().min(LINK_PROBE)];
    store.read_padded(&mut bytes, HostOffset::ZERO).while_trying("read the header")?;
    let Some(at) = link_place(&bytes, header) else { return Ok(None) };
    let start = usize::try_from(at.get()).expect("within the header");
    // The last extension may end with what was read.
    let Some(data) = bytes.get(start..start + IndexLink::LEN) else { return Ok(None) };
    Ok(Some(LinkFound { at, link: IndexLink::parse(data) }))
}

/// Whether the header says that its link is kept up to date.
pub(super) fn link_stands(header: &Header) -> bool {
    header.autoclear.contains(Autoclear::INDEX) && header.autoclear.bits() & SESSION_MASK == 0
}

/// Whether a header has a link that does not stand: another program has opened the image for writing, and cleared the bit.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn is_link_stale(store: &dyn Store, header: &Header) -> Result<bool> {
    if header.autoclear.contains(Autoclear::INDEX) || header.autoclear.bits() & SESSION_MASK != 0 {
        return Ok(false);
    }
    Ok(find_link(store, header)?.is_some_and(|found| found.link.is_some()))
}

/// The root that the header's link leads to.
///
/// # Errors
/// No index, a file that cannot be read, or a root that is not the one that was linked.
pub(super) fn root_in_file(store: &dyn Store, head: &Qcow2Head) -> Result<Option<Root>> {
    let Some(link) = find_link(store, &head.header)?.and_then(|found| found.link) else { return Ok(None) };
    let mut page: Box<Page> = Box::new([0; PAGE_LEN]);
    store.read_exact(&mut page[..], link.root).while_trying("read the index").map_err(|e| e.at(link.root))?;
    let (root, crc) = Root::parse(&page, link.root)?;
    let linked = crc == link.root_crc && root.generation == link.generation;
    Ok(linked.then_some(root))
}

/// Whether what has a sidecar's name is one; `None` if nothing has it.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn is_sidecar(path: &Path) -> io::Result<Option<bool>> {
    let file = match Place::of(path).and_then(|place| place.open(Access::ReadOnly)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // No file.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(Some(false)),
        Err(error) => return Err(error),
    };
    let mut begin = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut begin)?;
    Ok(Some(begin == MAGIC))
}

/// Removes the sidecar of a layer that goes, if it has one: it is of use to nobody then.
pub(crate) fn forget_sidecar(layer: &Path) {
    let Some(path) = sidecar_of(layer) else { return };
    if matches!(is_sidecar(&path), Ok(Some(true))) {
        let _ = Place::of(&path).and_then(|place| place.remove());
    }
}

/// Opens the sidecar of the layer at `path` and reads its root; `None` when there is none.
///
/// # Errors
/// A sidecar that cannot be read, or that does not start with a root.
pub(super) fn root_in_sidecar(
    path: &Path,
    gate: &Gate,
    opener: &dyn Opener,
) -> Result<Option<(Root, Opened)>> {
    let Some(path) = opener.sidecar(path, gate).filter(|path| path.exists()) else { return Ok(None) };
    let read = || {
        let opened = opener.open(&path, Role::Inspected, gate)?;
        let mut page: Box<Page> = Box::new([0; PAGE_LEN]);
        opened.store.read_exact(&mut page[..], HostOffset::ZERO).while_trying("read the index")?;
        let (root, _) = Root::parse(&page, HostOffset::ZERO)?;
        Ok((root, opened))
    };
    read().map(Some).map_err(|error: crate::Error| error.in_file(&path))
}
