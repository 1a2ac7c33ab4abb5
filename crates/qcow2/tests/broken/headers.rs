//! Broken headers and header extensions.

use vmstrata_qcow2::header::field;

use super::Stock::{Opens, Refuses};
use super::{Case, Stock};
use crate::common::image::*;

const fn case(
    name: &'static str,
    change: fn(&mut File),
    (field, offset): (&'static str, u64),
    message: &'static str,
    stock: Stock,
) -> Case {
    Case { name, base: version_3, change, field, offset, message, stock }
}

const fn case_v2(
    name: &'static str,
    change: fn(&mut File),
    (field, offset): (&'static str, u64),
    message: &'static str,
    stock: Stock,
) -> Case {
    Case { name, base: version_2, change, field, offset, message, stock }
}

const HEADER: (&str, u64) = ("header", 0);
const MAGIC: (&str, u64) = ("magic", 0);
const VERSION: (&str, u64) = ("version", 4);
const NAME_OFFSET: (&str, u64) = ("backing_file_offset", 8);
const NAME_SIZE: (&str, u64) = ("backing_file_size", 16);
const BITS: (&str, u64) = ("cluster_bits", 20);
const CRYPT: (&str, u64) = ("crypt_method", 32);
const L1_SIZE: (&str, u64) = ("l1_size", 36);
const L1: (&str, u64) = ("l1_table_offset", 40);
const REFCOUNTS: (&str, u64) = ("refcount_table_offset", 48);
const REFCOUNTS_SIZE: (&str, u64) = ("refcount_table_clusters", 56);
const SNAPSHOT_COUNT: (&str, u64) = ("nb_snapshots", 60);
const SNAPSHOT_TABLE: (&str, u64) = ("snapshots_offset", 64);
const INCOMPATIBLE: (&str, u64) = ("incompatible_features", 72);
const ORDER: (&str, u64) = ("refcount_order", 96);
const LENGTH: (&str, u64) = ("header_length", 100);
const COMPRESSION: (&str, u64) = ("compression_type", 104);
const EXTENSION_LENGTH: &str = "header extension length";

#[rustfmt::skip]
pub(crate) const CASES: &[Case] = &[
    case("empty file", |f| f.cut(0), HEADER, "cut short: 8 bytes needed, 0 there", Refuses),
    case("only a magic", |f| f.cut(4), HEADER, "cut short: 8 bytes needed, 4 there", Refuses),
    case("cut within the first 72 bytes", |f| f.cut(71), HEADER, "cut short: 104 bytes needed, 71 there", Refuses),
    case("cut before the header length", |f| f.cut(100), HEADER, "cut short: 104 bytes needed, 100 there", Refuses),
    case("cut before the compression type", |f| f.cut(104), HEADER, "cut short: 112 bytes needed, 104 there", Opens),
    case("header longer than the file", |f| { f.u32(field::HEADER_LENGTH, 4096); f.cut(512) }, HEADER, "cut short: 4096 bytes needed, 512 there", Opens),
    case("another magic", |f| f.put(0, b"QFI\xfa"), MAGIC, "not a qcow2 image (magic 0x514649fa)", Refuses),
    case("no magic", |f| f.u32(0, 0), MAGIC, "not a qcow2 image (magic 0x00000000)", Refuses),
    case("VMDK magic", |f| f.put(0, b"KDMV"), MAGIC, "not a qcow2 image (magic 0x4b444d56)", Refuses),
    case("version 0", |f| f.u32(field::VERSION, 0), VERSION, "qcow2 version 0 is not supported, only 2 and 3 are", Refuses),
    case("version 1", |f| f.u32(field::VERSION, 1), VERSION, "qcow2 version 1 is not supported, only 2 and 3 are", Refuses),
    case("version 4", |f| f.u32(field::VERSION, 4), VERSION, "qcow2 version 4 is not supported, only 2 and 3 are", Refuses),
    case("little-endian version", |f| f.u32(field::VERSION, 3 << 24), VERSION, "qcow2 version 50331648 is not supported, only 2 and 3 are", Refuses),

    case("256 B clusters", |f| f.u32(field::CLUSTER_BITS, 8), BITS, "8 is not in 9..=21", Refuses),
    case("4 MiB clusters", |f| f.u32(field::CLUSTER_BITS, 22), BITS, "22 is not in 9..=21", Refuses),
    case("clusters of 2^64 bytes", |f| f.u32(field::CLUSTER_BITS, 64), BITS, "64 is not in 9..=21", Refuses),
    case("cluster_bits all ones", |f| f.u32(field::CLUSTER_BITS, u32::MAX), BITS, "4294967295 is not in 9..=21", Refuses),
    case("no cluster_bits", |f| f.u32(field::CLUSTER_BITS, 0), BITS, "0 is not in 9..=21", Refuses),

    case("header of 72 bytes in version 3", |f| f.u32(field::HEADER_LENGTH, 72), LENGTH, "72 is not in 104..=4096", Refuses),
    case("header one byte short", |f| f.u32(field::HEADER_LENGTH, 103), LENGTH, "103 is not in 104..=4096", Refuses),
    case("header longer than a cluster", |f| f.u32(field::HEADER_LENGTH, 4104), LENGTH, "4104 is not in 104..=4096", Refuses),
    case("header length all ones", |f| f.u32(field::HEADER_LENGTH, u32::MAX), LENGTH, "4294967295 is not in 104..=4096", Refuses),

    case("unknown incompatible bit 5", |f| f.u64(field::INCOMPATIBLE, 1 << 5), INCOMPATIBLE, "unknown incompatible feature bits 0x20", Refuses),
    case("unknown incompatible bit the image names", |f| f.u64(field::INCOMPATIBLE, 1 << 40), INCOMPATIBLE, "unknown incompatible feature bits 0x10000000000 (time travel)", Refuses),
    case("unknown incompatible bit beside known ones", |f| f.u64(field::INCOMPATIBLE, 1 << 63 | 3), INCOMPATIBLE, "unknown incompatible feature bits 0x8000000000000000", Refuses),
    case("all incompatible bits", |f| f.u64(field::INCOMPATIBLE, u64::MAX), INCOMPATIBLE, "unknown incompatible feature bits 0xffffffffffffffe0 (time travel)", Refuses),
    case("unknown bit and broken names", |f| { f.u64(field::INCOMPATIBLE, 1 << 40); f.u32(NAMES + 4, u32::MAX) }, INCOMPATIBLE, "unknown incompatible feature bits 0x10000000000", Refuses),
    case("external data file", |f| f.u64(field::INCOMPATIBLE, 4), INCOMPATIBLE, "unsupported feature: external data file", Opens),
    case("subclusters of 128 bytes", |f| f.u64(field::INCOMPATIBLE, 16), BITS, "12 is not in 14..=21", Refuses),

    case("AES encryption", |f| f.u32(field::CRYPT_METHOD, 1), CRYPT, "unsupported feature: AES encryption", Opens),
    case("LUKS encryption", |f| f.u32(field::CRYPT_METHOD, 2), CRYPT, "unsupported feature: LUKS encryption", Refuses),
    case("encryption of an unknown kind", |f| f.u32(field::CRYPT_METHOD, 3), CRYPT, "3 is not in 0..=2", Refuses),

    case("refcounts of 128 bits", |f| f.u32(field::REFCOUNT_ORDER, 7), ORDER, "7 is not in 0..=6", Refuses),
    case("refcounts of 2^(2^32-1) bits", |f| f.u32(field::REFCOUNT_ORDER, u32::MAX), ORDER, "4294967295 is not in 0..=6", Refuses),

    case("zstd without its bit", |f| f.put(104, &[1]), COMPRESSION, "compression type 1 with the incompatible bit clear", Refuses),
    case("compression bit without a type", |f| f.u64(field::INCOMPATIBLE, 8), COMPRESSION, "compression type 0 with the incompatible bit set", Refuses),
    case("compression bit in a header too short for a type", |f| { f.u64(field::INCOMPATIBLE, 8); f.u32(field::HEADER_LENGTH, 104); f.put(104, &[1]) }, COMPRESSION, "compression type 0 with the incompatible bit set", Refuses),
    case("a compression type not invented yet", |f| { f.u64(field::INCOMPATIBLE, 8); f.put(104, &[2]) }, COMPRESSION, "2 is not in 0..=1", Refuses),

    case("backing name over the header", |f| f.u64(field::BACKING_FILE_OFFSET, 104), NAME_OFFSET, "104 is not in 112..=4095", Opens),
    case("backing name after the first cluster", |f| f.u64(field::BACKING_FILE_OFFSET, 4097), NAME_OFFSET, "4097 is not in 112..=4095", Refuses),
    case("backing name at the end of memory", |f| f.u64(field::BACKING_FILE_OFFSET, u64::MAX), NAME_OFFSET, "18446744073709551615 is not in 112..=4095", Refuses),
    case("backing name of 1024 bytes", |f| f.u32(field::BACKING_FILE_SIZE, 1024), NAME_SIZE, "1024 is not in 1..=1023", Refuses),
    case("backing name over the cluster's end", |f| f.u64(field::BACKING_FILE_OFFSET, 4090), NAME_SIZE, "10 is not in 1..=6", Refuses),
    case("backing name of 4 GiB", |f| f.u32(field::BACKING_FILE_SIZE, u32::MAX), NAME_SIZE, "4294967295 is not in 1..=1023", Refuses),
    case("backing name with a zero byte", |f| f.put(NAME + 4, &[0]), ("backing file name", NAME), "contains a zero byte", Opens),
    case("backing name all zero bytes", |f| f.put(NAME, &[0; 10]), ("backing file name", NAME), "contains a zero byte", Opens),

    case("no refcount table", |f| f.u32(field::REFCOUNT_TABLE_CLUSTERS, 0), REFCOUNTS_SIZE, "0 is not in 1..=2048", Refuses),
    case("refcount table over 8 MiB", |f| f.u32(field::REFCOUNT_TABLE_CLUSTERS, 2049), REFCOUNTS_SIZE, "2049 is not in 0..=2048", Refuses),
    case("refcount table of 2^32 clusters", |f| f.u32(field::REFCOUNT_TABLE_CLUSTERS, u32::MAX), REFCOUNTS_SIZE, "4294967295 is not in 0..=2048", Refuses),
    case("refcount table off a cluster", |f| f.u64(field::REFCOUNT_TABLE_OFFSET, 0x1200), REFCOUNTS, "offset 0x1200 is not a multiple of 4096", Refuses),
    case("refcount table over the header", |f| f.u64(field::REFCOUNT_TABLE_OFFSET, 0), REFCOUNTS, "lies over the header", Opens),
    case("refcount table at the end of memory", |f| f.u64(field::REFCOUNT_TABLE_OFFSET, u64::MAX - 4095), REFCOUNTS, "reaches to byte 0xffffffffffffffff, the file ends at 0x8000", Refuses),

    case("L1 table too short for the disk", |f| f.u32(field::L1_SIZE, 1), L1_SIZE, "1 entries cannot map the whole disk, which needs 2", Refuses),
    case("no L1 table", |f| f.u32(field::L1_SIZE, 0), L1_SIZE, "0 entries cannot map the whole disk, which needs 2", Refuses),
    case("a disk of 2^64 bytes", |f| f.u64(field::SIZE, u64::MAX), L1_SIZE, "2 entries cannot map the whole disk, which needs 8796093022208", Refuses),
    case("L1 table over 32 MiB", |f| f.u32(field::L1_SIZE, (4 << 20) + 1), L1_SIZE, "4194305 is not in 0..=4194304", Refuses),
    case("L1 table of 2^32 entries", |f| f.u32(field::L1_SIZE, u32::MAX), L1_SIZE, "4294967295 is not in 0..=4194304", Refuses),
    case("L1 table off a cluster", |f| f.u64(field::L1_TABLE_OFFSET, 0x3008), L1, "offset 0x3008 is not a multiple of 4096", Refuses),
    case("L1 table over the header", |f| f.u64(field::L1_TABLE_OFFSET, 0), L1, "lies over the header", Opens),
    case("L1 table over the refcount table", |f| f.u64(field::L1_TABLE_OFFSET, 0x1000), L1, "lies over the refcount table", Opens),
    case("L1 table at 2^63", |f| f.u64(field::L1_TABLE_OFFSET, 1 << 63), L1, "reaches to byte 0x8000000000000010, the file ends at 0x8000", Refuses),
    case("file cut within the L1 table", |f| f.cut(0x3008), SNAPSHOT_TABLE, "reaches to byte 0x4028, the file ends at 0x3008", Refuses),

    case("65,537 snapshots", |f| f.u32(field::SNAPSHOT_COUNT, 65_537), SNAPSHOT_COUNT, "65537 is not in 0..=65536", Refuses),
    case("2^32 snapshots", |f| f.u32(field::SNAPSHOT_COUNT, u32::MAX), SNAPSHOT_COUNT, "4294967295 is not in 0..=65536", Refuses),
    case("snapshot table off a cluster", |f| f.u64(field::SNAPSHOTS_OFFSET, 0x4200), SNAPSHOT_TABLE, "offset 0x4200 is not a multiple of 4096", Refuses),
    case("snapshot table over the header", |f| f.u64(field::SNAPSHOTS_OFFSET, 0), SNAPSHOT_TABLE, "lies over the header", Opens),
    case("snapshot table over the L1 table", |f| f.u64(field::SNAPSHOTS_OFFSET, 0x3000), SNAPSHOT_TABLE, "lies over the L1 table", Opens),
    case("snapshot table over the refcount table", |f| f.u64(field::SNAPSHOTS_OFFSET, 0x1000), SNAPSHOT_TABLE, "lies over the refcount table", Opens),
    case("snapshot table after the file", |f| f.u64(field::SNAPSHOTS_OFFSET, 1 << 40), SNAPSHOT_TABLE, "reaches to byte 0x10000000028, the file ends at 0x8000", Opens),
    case("more snapshots than the file has room for", |f| f.u32(field::SNAPSHOT_COUNT, 65_536), SNAPSHOT_TABLE, "reaches to byte 0x284000, the file ends at 0x8000", Refuses),

    case("extension longer than the cluster", |f| f.u32(UNKNOWN + 4, 4096), (EXTENSION_LENGTH, UNKNOWN + 4), "4096 is not in 0..=16", Refuses),
    case("extension over the backing name", |f| f.u32(UNKNOWN + 4, 17), (EXTENSION_LENGTH, UNKNOWN + 4), "17 is not in 0..=16", Refuses),
    case("extension of 4 GiB", |f| f.u32(UNKNOWN + 4, u32::MAX), (EXTENSION_LENGTH, UNKNOWN + 4), "4294967295 is not in 0..=16", Refuses),
    case("extension length that wraps when padded", |f| f.u32(FORMAT + 4, u32::MAX - 3), (EXTENSION_LENGTH, FORMAT + 4), "4294967292 is not in 0..=120", Refuses),
    case("backing format of 16 bytes", |f| f.u32(FORMAT + 4, 16), ("backing file format name", FORMAT + 8), "16 is not in 0..=15", Refuses),
    case("backing format that is no text", |f| f.put(FORMAT + 8, b"\xff\xfe"), ("backing file format name", FORMAT + 8), "not valid UTF-8", Opens),

    case_v2("version 2 cut short", |f| f.cut(70), HEADER, "cut short: 72 bytes needed, 70 there", Opens),
    case_v2("version 2 with a backing name over the header", |f| f.u64(field::BACKING_FILE_OFFSET, 64), NAME_OFFSET, "64 is not in 72..=4095", Opens),
    case_v2("version 2 with encryption", |f| f.u32(field::CRYPT_METHOD, 1), CRYPT, "unsupported feature: AES encryption", Opens),
    case_v2("version 2 with an extension too long", |f| f.u32(76, 1 << 31), (EXTENSION_LENGTH, 76), "2147483648 is not in 0..=16", Refuses),
];
