//! Broken snapshot tables and bitmap directories.

use vmstrata_qcow2::header::field;

use super::Stock::{Opens, Refuses};
use super::{Case, Stock};
use crate::common::image::*;

const fn snapshot(
    name: &'static str,
    change: fn(&mut File),
    (field, within): (&'static str, u64),
    message: &'static str,
    stock: Stock,
) -> Case {
    Case { name, base: version_3, change, field, offset: SNAPSHOTS + within, message, stock }
}

const fn extension(
    name: &'static str,
    change: fn(&mut File),
    (field, within): (&'static str, u64),
    message: &'static str,
    stock: Stock,
) -> Case {
    Case { name, base: version_3, change, field, offset: BITMAPS + 8 + within, message, stock }
}

const fn bitmap(
    name: &'static str,
    change: fn(&mut File),
    (field, within): (&'static str, u64),
    message: &'static str,
    stock: Stock,
) -> Case {
    Case { name, base: version_3, change, field, offset: DIRECTORY + within, message, stock }
}

const SNAPSHOT: (&str, u64) = ("snapshot table entry", 0);
const SNAPSHOT_TABLE: (&str, u64) = ("snapshot l1_table_offset", 0);
const SNAPSHOT_SIZE: (&str, u64) = ("snapshot l1_size", 8);
const SNAPSHOT_EXTRA: (&str, u64) = ("snapshot extra data size", 36);
const COUNT: (&str, u64) = ("nb_bitmaps", 0);
const DIRECTORY_SIZE: (&str, u64) = ("bitmap_directory_size", 8);
const DIRECTORY_OFFSET: (&str, u64) = ("bitmap_directory_offset", 16);
const ENTRY: (&str, u64) = ("bitmap directory entry", 0);
const TABLE: (&str, u64) = ("bitmap_table_offset", 0);
const TABLE_SIZE: (&str, u64) = ("bitmap_table_size", 8);
const FLAGS: (&str, u64) = ("bitmap flags", 12);
const TYPE: (&str, u64) = ("bitmap type", 16);
const GRANULARITY: (&str, u64) = ("bitmap granularity_bits", 17);
const NAME_SIZE: (&str, u64) = ("bitmap name_size", 18);

#[rustfmt::skip]
pub(crate) const CASES: &[Case] = &[
    snapshot("snapshot L1 table off a cluster", |f| f.u64(SNAPSHOTS, SNAPSHOT_L1 + 8), SNAPSHOT_TABLE, "offset 0x5008 is not a multiple of 4096", Opens),
    snapshot("snapshot L1 table over the header", |f| f.u64(SNAPSHOTS, 0), SNAPSHOT_TABLE, "lies over the header", Opens),
    snapshot("snapshot L1 table after the file", |f| f.u64(SNAPSHOTS, FILE_LEN), SNAPSHOT_TABLE, "reaches to byte 0x8010, the file ends at 0x8000", Opens),
    snapshot("snapshot L1 table at the end of memory", |f| f.u64(SNAPSHOTS, u64::MAX - 4095), SNAPSHOT_TABLE, "reaches to byte 0xfffffffffffff010, the file ends at 0x8000", Opens),
    snapshot("snapshot L1 table of 2^32 entries", |f| f.u32(SNAPSHOTS + 8, u32::MAX), SNAPSHOT_SIZE, "4294967295 is not in 0..=4194304", Opens),
    snapshot("snapshot with too much extra data", |f| f.u32(SNAPSHOTS + 36, 1025), SNAPSHOT_EXTRA, "1025 is not in 0..=1024", Refuses),
    snapshot("snapshot with 4 GiB of extra data", |f| f.u32(SNAPSHOTS + 36, u32::MAX), SNAPSHOT_EXTRA, "4294967295 is not in 0..=1024", Refuses),
    snapshot("snapshot name over the file's end", |f| { f.u16(SNAPSHOTS + 14, u16::MAX) }, SNAPSHOT, "cut short: 65592 bytes needed, 16384 there", Opens),
    snapshot("snapshot ID over the file's end", |f| { f.u16(SNAPSHOTS + 12, u16::MAX) }, SNAPSHOT, "cut short: 65597 bytes needed, 16384 there", Opens),
    snapshot("second snapshot's entry cut short", |f| { f.u32(field::SNAPSHOT_COUNT, 2); f.u16(SNAPSHOTS + 14, 16_300) }, (SNAPSHOT.0, 16_360), "cut short: 40 bytes needed, 24 there", Opens),

    extension("bitmaps extension too short", |f| f.u32(BITMAPS + 4, 16), ("bitmaps extension", 0), "16 is not in 24..=24", Refuses),
    extension("no bitmaps in the extension", |f| f.u32(BITMAPS + 8, 0), COUNT, "0 is not in 1..=65535", Refuses),
    extension("65,536 bitmaps", |f| f.u32(BITMAPS + 8, 65_536), COUNT, "65536 is not in 1..=65535", Refuses),
    extension("reserved bytes of the bitmaps extension", |f| f.u32(BITMAPS + 12, 9), ("bitmaps reserved", 4), "reserved bits 0x9 are set", Refuses),
    extension("bitmap directory smaller than an entry", |f| f.u64(BITMAPS + 16, 23), DIRECTORY_SIZE, "23 is not in 24..=67107840", Refuses),
    extension("bitmap directory of 2^64 bytes", |f| f.u64(BITMAPS + 16, u64::MAX), DIRECTORY_SIZE, "18446744073709551615 is not in 24..=67107840", Refuses),
    extension("bitmap directory off a cluster", |f| f.u64(BITMAPS + 24, DIRECTORY + 512), DIRECTORY_OFFSET, "offset 0x6200 is not a multiple of 4096", Refuses),
    extension("bitmap directory over the header", |f| f.u64(BITMAPS + 24, 0), DIRECTORY_OFFSET, "lies over the header", Refuses),
    extension("bitmap directory after the file", |f| f.u64(BITMAPS + 24, FILE_LEN), DIRECTORY_OFFSET, "reaches to byte 0x8020, the file ends at 0x8000", Refuses),

    bitmap("bitmap without a name", |f| f.u16(DIRECTORY + 18, 0), NAME_SIZE, "0 is not in 1..=1023", Refuses),
    bitmap("bitmap name of 1024 bytes", |f| f.u16(DIRECTORY + 18, 1024), NAME_SIZE, "1024 is not in 1..=1023", Refuses),
    bitmap("bitmap with 4 GiB of extra data", |f| f.u32(DIRECTORY + 20, u32::MAX), ENTRY, "cut short: 4294967328 bytes needed, 8192 there", Refuses),
    bitmap("reserved bitmap flags", |f| f.u32(DIRECTORY + 12, 0x18), FLAGS, "reserved bits 0x18 are set", Refuses),
    bitmap("bitmap of no type", |f| f.put(DIRECTORY + 16, &[0]), TYPE, "0 is not in 1..=1", Refuses),
    bitmap("bitmap finer than a sector", |f| f.put(DIRECTORY + 17, &[8]), GRANULARITY, "8 is not in 9..=31", Refuses),
    bitmap("bitmap with bits of 2^255 bytes", |f| f.put(DIRECTORY + 17, &[255]), GRANULARITY, "255 is not in 9..=31", Refuses),
    bitmap("bitmap without a table", |f| f.u32(DIRECTORY + 8, 0), TABLE_SIZE, "0 is not in 1..=131072", Refuses),
    bitmap("bitmap table of 2^32 entries", |f| f.u32(DIRECTORY + 8, u32::MAX), TABLE_SIZE, "4294967295 is not in 1..=131072", Refuses),
    bitmap("bitmap table off a cluster", |f| f.u64(DIRECTORY, BITMAP_TABLE + 8), TABLE, "offset 0x7008 is not a multiple of 4096", Refuses),
    bitmap("bitmap table over the header", |f| f.u64(DIRECTORY, 0), TABLE, "lies over the header", Refuses),
    bitmap("bitmap table after the file", |f| f.u64(DIRECTORY, 1 << 63), TABLE, "reaches to byte 0x8000000000000008, the file ends at 0x8000", Refuses),
    bitmap("bytes left over in the bitmap directory", |f| f.u64(BITMAPS + 16, 40), ("bitmap_directory_size", 0), "40 is not in 32..=32", Refuses),
];
