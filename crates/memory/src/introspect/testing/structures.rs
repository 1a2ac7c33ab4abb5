//! Structures of a made-up kernel: names, sizes, members and where those lie.

use super::Types;

type Struct<'a> = (&'a str, u32, &'a [(&'a str, u32, u32)]);

/// Types that members have.
#[derive(Clone, Copy)]
pub(super) struct Basic {
    pub(super) word: u32,
    pub(super) half: u32,
    pub(super) short: u32,
    pub(super) byte: u32,
    pub(super) name: u32,
    pub(super) words: u32,
}

/// Declares all of them.
pub(super) fn declare(types: &mut Types, basic: Basic) {
    memory_structures(types, basic);
    file_structures(types, basic);
    device_structures(types, basic);
}

/// Pages, and who hands them out.
fn memory_structures(types: &mut Types, basic: Basic) {
    let Basic { word, half, words, .. } = basic;
    let structs: [Struct<'_>; 5] = [
        (
            "page",
            64,
            &[
                ("flags", word, 0),
                ("compound_head", word, 8),
                ("mapping", word, 24),
                ("index", word, 32),
                ("private", word, 40),
                ("_mapcount", half, 48),
                ("_refcount", half, 52),
            ],
        ),
        ("folio", 128, &[("_flags_1", word, 64), ("_large_mapcount", half, 80), ("_nr_pages", half, 120)]),
        ("pglist_data", 8192, &[("nr_zones", half, 0), ("node_zones", words, 64), ("vm_stat", words, 4096)]),
        ("zone", 1024, &[("free_area", words, 0)]),
        ("free_area", 24, &[("nr_free", word, 16)]),
    ];
    for (of, size, members) in structs {
        types.structure(of, size, members);
    }
}

/// Where bytes of files lie.
fn device_structures(types: &mut Types, Basic { word, half, name, words, .. }: Basic) {
    let structs: [Struct<'_>; 5] = [
        ("bdev_inode", 128, &[("bdev", words, 0), ("vfs_inode", words, 64)]),
        ("super_block", 64, &[("s_bdev", word, 0), ("s_type", word, 8)]),
        ("file_system_type", 64, &[("name", word, 0)]),
        ("block_device", 64, &[("bd_start_sect", word, 0), ("bd_disk", word, 8)]),
        ("gendisk", 64, &[("major", half, 0), ("first_minor", half, 4), ("disk_name", name, 12)]),
    ];
    for (of, size, members) in structs {
        types.structure(of, size, members);
    }
}

/// Files, and what they have in memory.
fn file_structures(types: &mut Types, basic: Basic) {
    let Basic { word, half, short, byte, words, .. } = basic;
    let structs: [Struct<'_>; 4] = [
        ("address_space", 64, &[("host", word, 0), ("flags", word, 8)]),
        (
            "inode",
            64,
            &[
                ("i_mode", short, 0),
                ("i_flags", half, 8),
                ("i_sb", word, 16),
                ("i_mapping", word, 24),
                ("i_ino", word, 32),
                ("i_blkbits", byte, 40),
            ],
        ),
        (
            "buffer_head",
            64,
            &[
                ("b_state", word, 0),
                ("b_this_page", word, 8),
                ("b_page", word, 16),
                ("b_blocknr", word, 24),
                ("b_size", word, 32),
                ("b_bdev", word, 40),
                ("b_count", half, 48),
            ],
        ),
        (
            "iomap_folio_state",
            16,
            &[("read_bytes_pending", half, 4), ("write_bytes_pending", half, 8), ("state", words, 16)],
        ),
    ];
    for (of, size, members) in structs {
        types.structure(of, size, members);
    }
}
