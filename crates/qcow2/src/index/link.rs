//! The header extension that leads to the root.
//!
//! Images made by vmstrata have room for it, zeroed, within their first 512 bytes. It is filled in place, so that no
//! other byte of the header moves; the autoclear bit that guards it, [`crate::Autoclear::INDEX`], lies in the same sector.

use vmstrata_types::HostOffset;

use crate::bytes::{be32, be64, pad8};
use crate::extension::magic;
use crate::header::Header;

/// What the header extension says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLink {
    /// Where the root lies.
    pub root: HostOffset,
    /// The root's generation.
    pub generation: u64,
    /// The root's checksum: an older root in the same place is not believed.
    pub root_crc: u32,
}

impl IndexLink {
    /// Bytes of the extension's data.
    pub const LEN: usize = 24;

    /// The extension's data; zeros say that there is no index.
    pub fn encode(link: Option<Self>) -> [u8; Self::LEN] {
        let mut data = [0; Self::LEN];
        if let Some(link) = link {
            data[..8].copy_from_slice(&link.root.get().to_be_bytes());
            data[8..16].copy_from_slice(&link.generation.to_be_bytes());
            data[16..20].copy_from_slice(&link.root_crc.to_be_bytes());
        }
        data
    }

    /// Reads the extension's data; `None` without an index, and for what no version of this crate writes.
    pub fn parse(data: &[u8]) -> Option<Self> {
        if data.len() != Self::LEN || be32(data, 20) != 0 {
            return None;
        }
        let root = HostOffset::new(be64(data, 0));
        let link = Self { root, generation: be64(data, 8), root_crc: be32(data, 16) };
        (root != HostOffset::ZERO).then_some(link)
    }
}

/// Where the extension's data lie in the file that starts with `first_cluster`, if there is room for a link.
///
/// The header says where extensions are; a list that breaks the format has no room.
pub fn link_place(first_cluster: &[u8], header: &Header) -> Option<HostOffset> {
    let end = header.extensions_end().min(first_cluster.len());
    let mut at = header.header_length as usize;
    while at + 8 <= end {
        let (kind, len) = (be32(first_cluster, at), be32(first_cluster, at + 4) as usize);
        let data = at + 8;
        if kind == magic::END || len > end - data {
            return None;
        }
        if kind == magic::INDEX && len == IndexLink::LEN {
            return Some(HostOffset::new(data as u64));
        }
        at = data + pad8(len);
    }
    None
}
