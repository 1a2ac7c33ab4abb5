//! Writing the link in a layer's header, and the autoclear bit that guards it.

use vmstrata_qcow2::header::field;
use vmstrata_qcow2::index::IndexLink;
use vmstrata_qcow2::{Autoclear, Header};
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use crate::error::{ErrorKind, IoContext as _, Result};
use crate::session::SESSION_MASK;

/// A sector is written whole or not at all.
const SECTOR: usize = 512;

/// Writes or clears the link and its autoclear bit, and flushes.
///
/// They share the header's first sector in every image that vmstrata makes, and are then written together. A stock tool may
/// have moved the link behind it, or over its end: what lies behind is written first. With either half missing it is a link
/// that does not fit its root, hence none.
///
/// # Errors
/// Whatever the host reports, and a process that has begun to write the image.
pub(super) fn write_link(
    store: &dyn Store,
    header: &Header,
    link_at: HostOffset,
    link: Option<IndexLink>,
) -> Result<()> {
    let mut sector = [0; SECTOR];
    store.read_exact(&mut sector, HostOffset::ZERO).while_trying("read the header")?;
    put_bit(&mut sector, header, link.is_some())?;
    let data = IndexLink::encode(link);
    let start = usize::try_from(link_at.get()).expect("within the header");
    let (within, behind) = data.split_at(SECTOR.saturating_sub(start).min(data.len()));
    if !behind.is_empty() {
        let at = link_at + within.len() as u64;
        store.write_all(behind, at).while_trying("write the header")?;
    }
    if !within.is_empty() {
        sector[start..start + within.len()].copy_from_slice(within);
    }
    store.write_all(&sector, HostOffset::ZERO).while_trying("write the header")?;
    store.flush().while_trying("flush the header")
}

/// Sets or clears the bit in the header's first sector, if the others are what they were when `header` was read.
fn put_bit(sector: &mut [u8; SECTOR], header: &Header, is_set: bool) -> Result<()> {
    let at = usize::try_from(field::AUTOCLEAR).expect("in the first sector");
    let bits: &mut [u8; 8] = sector[at..].first_chunk_mut().expect("in the first sector");
    let mut autoclear = Autoclear::from_bits_retain(u64::from_be_bytes(*bits));
    let others = |autoclear: Autoclear| autoclear.bits() | Autoclear::INDEX.bits();
    if autoclear.bits() & SESSION_MASK != 0 || others(autoclear) != others(header.autoclear) {
        return Err(ErrorKind::Changed.into());
    }
    autoclear.set(Autoclear::INDEX, is_set);
    *bits = autoclear.bits().to_be_bytes();
    Ok(())
}
