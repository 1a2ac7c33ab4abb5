//! An index beside an image: damaged, and made up by someone who knows how.
//!
//! ```text
//!   first byte even: edits of 4 bytes (xor, place), nothing else        damage
//!   first byte odd:  the same, then every checksum made right again     made up
//! ```

use std::path::Path;
use std::sync::LazyLock;

use tempfile::TempDir;
use vmstrata_disk::index::{IndexOptions, IndexVerdict, build, verify};
use vmstrata_disk::{CreateOptions, Disk, Format, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_qcow2::index::{ChainId, MAX_DELTAS, PAGE_LEN, PagePointer};
use vmstrata_store::Segment;
use vmstrata_types::{ClusterBits, GuestOffset};

use crate::image::look;

const SIZE: u64 = 1 << 20;

/// A base and a layer with indices beside them, a disk on top, and the layer's index.
struct Chain {
    dir: TempDir,
    index: Vec<u8>,
}

static CHAIN: LazyLock<Chain> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let dir = dir.expect("a directory for the chain");
    for (number, below) in [(0u64, None), (1, Some("0")), (2, Some("1"))] {
        let path = dir.path().join(number.to_string());
        let cluster_bits = ClusterBits::MIN;
        let backing = below.map(|below| (below.into(), Format::Qcow2));
        // Version 2 has no room for a link, so the index is a file of its own.
        let options =
            CreateOptions { size: Some(SIZE), version: 2, cluster_bits, backing, ..CreateOptions::default() };
        create(&path, &options).expect("an image");
        let resources = Resources::new(ResourceOptions::default());
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).expect("our own image");
        let at = GuestOffset::new(number << 18);
        disk.write(at, &[Segment::from_mut(&mut [0x5a; 5000])]).expect("room");
        disk.close().expect("a disk that can be closed");
    }
    build(&dir.path().join("2"), &IndexOptions::default()).expect("indices");
    let index = std::fs::read(dir.path().join("1.vmsx")).expect("an index");
    Chain { dir, index }
});

/// Reads a chain beside the index that `data` makes; see the module documentation.
///
/// # Panics
/// When an index that was only damaged says something else than the tables.
pub fn index(data: &[u8]) {
    let Some((&kind, rest)) = data.split_first() else { return };
    let made_up = kind & 1 == 1;
    let mut bytes = CHAIN.index.clone();
    for edit in rest.as_chunks::<4>().0 {
        let place = u32::from_le_bytes([edit[1], edit[2], edit[3], 0]) as usize % bytes.len();
        bytes[place] ^= edit[0];
    }
    if made_up {
        seal(&mut bytes);
    }
    let dir = CHAIN.dir.path();
    std::fs::write(dir.join("1.vmsx"), bytes).expect("room for an index");
    for file in verify(&dir.join("2"), &IndexOptions::default()).expect("the chain itself is sound") {
        assert!(made_up || !matches!(file.verdict, IndexVerdict::Wrong { .. }), "{file:?}");
    }
    let resources = Resources::new(ResourceOptions { workers: 1, ..ResourceOptions::default() });
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = Disk::open(&dir.join("2"), &options, &resources).expect("no index makes a disk useless");
    let found = look(&disk);
    assert!(made_up || found.iter().all(Option::is_some), "what can be read from tables is read");
}

/// Makes every checksum right, of whatever the pages say now: pages lie before those that point to them, the root's
/// first page last.
fn seal(bytes: &mut [u8]) {
    let root = &mut bytes[..PAGE_LEN];
    let chain = ChainId(root[16..32].try_into().expect("sixteen bytes"));
    // Any page but the root may be an inner page.
    for at in (PAGE_LEN..bytes.len() / PAGE_LEN * PAGE_LEN).step_by(PagePointer::LEN) {
        seal_pointer(bytes, &chain, at);
    }
    // The root's pointers: to map tree, layer table and fine tree, and, with the number of their runs, to delta records.
    let deltas = (152..PAGE_LEN - PagePointer::LEN).step_by(PagePointer::LEN + 4).take(MAX_DELTAS);
    for at in [96, 112, 128].into_iter().chain(deltas) {
        seal_pointer(bytes, &chain, at);
    }
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes[..PAGE_LEN]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
}

/// Seals what may be a pointer to a page of this very index.
fn seal_pointer(bytes: &mut [u8], chain: &ChainId, at: usize) {
    let pointer = &bytes[at..at + PagePointer::LEN];
    let number = u64::from_le_bytes(pointer[..8].try_into().expect("eight bytes"));
    let (layer, page) = (number >> 48, (number & 0xffff_ffff_ffff) as usize);
    if layer != 1 || page == 0 || page >= bytes.len() / PAGE_LEN {
        return;
    }
    let crc = crc32c::crc32c(&chain.0);
    let crc = crc32c::crc32c_append(crc, &pointer[..12]);
    let crc = crc32c::crc32c_append(crc, &bytes[page * PAGE_LEN..][..PAGE_LEN]);
    bytes[at + 12..at + 16].copy_from_slice(&crc.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use vmstrata_qcow2::index::Root;
    use vmstrata_types::HostOffset;

    use super::*;

    /// Otherwise what is made up would be no more than damaged.
    #[test]
    fn making_checksums_right_leaves_a_sound_index_as_it_is() {
        let mut bytes = CHAIN.index.clone();
        seal(&mut bytes);
        assert!(bytes == CHAIN.index);
        let page = bytes[..PAGE_LEN].try_into().expect("a page");
        assert!(Root::parse(page, HostOffset::ZERO).is_ok());
    }
}
