//! Properties over arbitrary values: what is encoded decodes to the same, what decodes encodes to the same
//! bytes, and no bytes whatever make a parser panic.

use crate::common;
use crate::common::image::{File, parse, version_2, version_3};
use proptest::collection::vec;
use proptest::prelude::*;
use vmstrata_qcow2::bitmap::{self, BitmapsExtension};
use vmstrata_qcow2::create::max_size;
use vmstrata_qcow2::entry::{COMPRESSED_FLAG, COPIED, HOST_OFFSET_LIMIT, ZERO_FLAG};
use vmstrata_qcow2::extension::{Extension, FeatureKind, FeatureNames};
use vmstrata_qcow2::geometry::MIN_EXTENDED;
use vmstrata_qcow2::header::{MAX_BACKING_NAME_LEN, field};
use vmstrata_qcow2::{
    Autoclear, Compatible, CompressionType, CreateOptions, EntryFormat, Extensions, Header, Incompatible,
    L1Entry, L2Entry, RawEntry, RefcountOrder, Subclusters, new_image, refcount, snapshot,
};
use vmstrata_types::{ClusterBits, HostOffset};

fn cluster_bits() -> impl Strategy<Value = ClusterBits> {
    (ClusterBits::MIN.get()..=ClusterBits::MAX.get()).prop_map(|bits| ClusterBits::new(bits).unwrap())
}

/// Of both versions, and with subclusters where clusters are large enough.
fn format() -> impl Strategy<Value = (EntryFormat, ClusterBits)> {
    (2u32..=4, cluster_bits()).prop_map(|(version, bits)| match version {
        4 if bits >= MIN_EXTENDED => (EntryFormat::extended(bits), bits),
        version => (EntryFormat::new(version.min(3), bits), bits),
    })
}

/// Bits of which many make a valid bitmap.
fn subclusters() -> impl Strategy<Value = u64> {
    let half = || prop_oneof![Just(0u32), Just(u32::MAX), any::<u32>()];
    (half(), half(), any::<bool>()).prop_map(|(allocated, zero, is_valid)| {
        Subclusters { allocated, zero: if is_valid { zero & !allocated } else { zero } }.bits()
    })
}

fn order() -> impl Strategy<Value = RefcountOrder> {
    (0u32..=6).prop_map(|order| RefcountOrder::new(order).unwrap())
}

/// 64 bits with whole fields of them often zero or all ones, so that many are valid entries.
fn raw_entry() -> impl Strategy<Value = u64> {
    let low = prop_oneof![6 => Just(0u64), 1 => Just(1), 1 => any::<u64>()];
    let high = prop_oneof![Just(0u64), Just(1 << 63), Just(1 << 62), Just(3 << 62)];
    let keep = 0..=21u32;
    (low, high, any::<u64>(), keep, 0..=12u32).prop_map(|(low, high, middle, clear, clear_top)| {
        let middle = middle << 8 >> 8 >> clear << clear >> clear_top;
        low & 0x1ff | high | middle & !0x1ff
    })
}

fn cluster_start(bits: ClusterBits) -> impl Strategy<Value = HostOffset> {
    (1..1u64 << (56 - bits.get())).prop_map(move |index| HostOffset::new(index << bits.get()))
}

/// A valid entry of version 3 and its cluster size.
fn valid_l2() -> impl Strategy<Value = (ClusterBits, L2Entry)> {
    cluster_bits().prop_flat_map(|bits| {
        let format = EntryFormat::new(3, bits);
        let limit = format.compressed_offset_limit().get();
        let compressed = (bits.size()..limit, 1u64..=bits.size()).prop_map(|(host, len)| {
            // Whole sectors, as a decoder reports them.
            let within = host % 512;
            L2Entry::Compressed {
                host: HostOffset::new(host),
                len: (within + len).next_multiple_of(512) - within,
            }
        });
        let entry = prop_oneof![
            Just(L2Entry::Unallocated),
            Just(L2Entry::Zero { host: None, copied: false }),
            (cluster_start(bits), any::<bool>())
                .prop_map(|(host, copied)| L2Entry::Zero { host: Some(host), copied }),
            (cluster_start(bits), any::<bool>()).prop_map(|(host, copied)| L2Entry::Data { host, copied }),
            compressed,
        ];
        (Just(bits), entry)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn any_l2_entry_that_decodes_encodes_to_the_same_bits(
        (format, bits) in format(), word in raw_entry(), subclusters in subclusters()
    ) {
        let raw = RawEntry { word, subclusters: if format.is_extended() { subclusters } else { 0 } };
        if let Ok(entry) = format.l2(raw) {
            let host = entry.host();
            let mut says_nothing = if host.is_some() { 0 } else { COPIED };
            if format.is_extended() && word & COMPRESSED_FLAG == 0 {
                says_nothing |= ZERO_FLAG;
            }
            prop_assert_eq!(format.encode_l2(entry), RawEntry { word: word & !says_nothing, ..raw });
            prop_assert!(host.is_none_or(|host| host.is_aligned(bits) && host >= HostOffset::new(bits.size())));
            if let L2Entry::Compressed { host, len } = entry {
                prop_assert!(host >= HostOffset::new(bits.size()) && len <= 2 * bits.size());
                prop_assert_eq!((host.get() + len) % 512, 0);
            }
        }
    }

    #[test]
    fn any_l1_entry_that_decodes_encodes_to_the_same_bits((format, _) in format(), raw in raw_entry()) {
        if let Ok(entry) = format.l1(raw) {
            let says_nothing = if entry.table.is_none() { COPIED } else { 0 };
            prop_assert_eq!(format.encode_l1(entry), raw & !says_nothing);
        }
    }

    #[test]
    fn any_valid_l2_entry_survives_encoding((bits, entry) in valid_l2()) {
        let format = EntryFormat::new(3, bits);
        let raw = format.encode_l2(entry);
        prop_assert_eq!(format.l2(raw), Ok(entry));
        let standard = !matches!(entry, L2Entry::Compressed { .. });
        prop_assert_eq!(standard, raw.word & COMPRESSED_FLAG == 0);
        prop_assert!(!standard || raw.word & format.l2_invalid_bits() == 0);
    }

    #[test]
    fn any_valid_l1_entry_survives_encoding(bits in cluster_bits(), index in 0u64..1 << 35, copied: bool) {
        let format = EntryFormat::new(3, bits);
        let table = (index > 0).then(|| HostOffset::new(index << bits.get()));
        let entry = L1Entry { table, copied: copied && index > 0 };
        prop_assert_eq!(format.l1(format.encode_l1(entry)), Ok(entry));
    }

    #[test]
    fn other_entries_never_panic(bits in cluster_bits(), raw in raw_entry()) {
        if let Ok(block) = refcount::decode_table_entry(raw, bits) {
            prop_assert_eq!(refcount::encode_table_entry(block, bits), raw);
        }
        if let Ok(Some(data)) = bitmap::decode_table_entry(raw, bits) {
            prop_assert!(data.is_aligned(bits));
        }
    }

    #[test]
    fn refcounts_are_an_array(order in order(), sets in vec((0usize..64, any::<u64>()), 0..200)) {
        let mut block = vec![0; 64 * 8];
        let mut oracle = [0; 64];
        for (index, value) in sets {
            // Mostly values that fit.
            let value = if value % 5 == 0 { value } else { value & order.max() };
            let result = order.set(&mut block, index, value);
            prop_assert_eq!(result.is_ok(), value <= order.max());
            if result.is_ok() {
                oracle[index] = value;
            }
        }
        let stored: Vec<_> = (0..64).map(|index| order.get(&block, index)).collect();
        prop_assert_eq!(stored, oracle);
    }
}

fn extension() -> impl Strategy<Value = Extension> {
    let kind = prop_oneof![
        Just(FeatureKind::Incompatible),
        Just(FeatureKind::Compatible),
        Just(FeatureKind::Autoclear)
    ];
    let names = vec((kind, 0u8..64, "[ -~]{0,46}"), 0..4);
    prop_oneof![
        "[a-z0-9-]{0,15}".prop_map(Extension::BackingFormat),
        names.prop_map(|names| {
            let names = names.iter().map(|(kind, bit, name)| (*kind, *bit, name.as_str()));
            Extension::FeatureNames(FeatureNames::new(names))
        }),
        vec(any::<u8>(), 0..40).prop_map(Extension::Bitmaps),
        (1u32..0x1000, vec(any::<u8>(), 0..40)).prop_map(|(magic, data)| Extension::Unknown { magic, data }),
    ]
}

/// Extensions of which each known type is there at most once.
fn extensions() -> impl Strategy<Value = Extensions> {
    vec(extension(), 0..6).prop_map(|all| {
        let mut items: Vec<Extension> = Vec::new();
        for one in all {
            if !items.iter().any(|other| other.magic() == one.magic()) {
                items.push(one);
            }
        }
        Extensions { items }
    })
}

/// A header that a new image could have, with every field free that may be.
fn header() -> impl Strategy<Value = Header> {
    let sectors = (0..=max_size(ClusterBits::MIN) / 512).prop_map(|sectors| sectors * 512);
    let shape = (cluster_bits(), order(), sectors);
    let flags = (any::<bool>(), any::<bool>(), any::<u64>(), any::<u64>(), vec(any::<u8>(), 0..40));
    (shape, flags).prop_map(|((cluster_bits, refcount_order, size), flags)| {
        let (dirty, zstd, compatible, autoclear, additional) = flags;
        let options = CreateOptions { cluster_bits, refcount_order, ..CreateOptions::new(size) };
        let mut header = new_image(&options).unwrap().header;
        header.incompatible.set(Incompatible::DIRTY, dirty);
        header.incompatible.set(Incompatible::COMPRESSION_TYPE, zstd);
        header.compression_type = if zstd { CompressionType::Zstd } else { CompressionType::Zlib };
        header.compatible = Compatible::from_bits_retain(compatible);
        header.autoclear = Autoclear::from_bits_retain(autoclear);
        header.header_length = field::ADDITIONAL as u32 + additional.len() as u32;
        header.additional = additional;
        header
    })
}

/// How to damage an image.
#[derive(Clone, Debug)]
struct Damage {
    version_2: bool,
    /// Byte positions and what to put there.
    bytes: Vec<(usize, u8)>,
    /// Length to cut the file to.
    len: usize,
}

impl Damage {
    fn file(&self) -> File {
        let mut file = if self.version_2 { version_2() } else { version_3() };
        for &(at, byte) in &self.bytes {
            if let Some(slot) = file.bytes.get_mut(at) {
                *slot = byte;
            }
        }
        file.bytes.truncate(self.len);
        file
    }
}

/// Some bytes changed, mostly in the places that matter; perhaps a cut.
fn damage() -> impl Strategy<Value = Damage> {
    let byte = prop_oneof![Just(0u8), Just(1), Just(0x7f), Just(0x80), Just(0xff), any::<u8>()];
    let cluster = common::image::CLUSTER as usize;
    let place = prop_oneof![
        6 => 4usize..300,
        1 => 4 * cluster..4 * cluster + 80,
        1 => 6 * cluster..6 * cluster + 40,
        1 => 0..8 * cluster,
    ];
    let len = prop_oneof![4 => Just(usize::MAX), 1 => 0..8 * cluster];
    (any::<bool>(), vec((place, byte), 1..8), len).prop_map(|(version_2, bytes, len)| Damage {
        version_2,
        bytes,
        len,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn any_header_survives_encoding(header in header(), extensions in extensions(), name in "[a-z/]{0,40}") {
        let name = (!name.is_empty()).then_some(name.as_bytes());
        let Ok(mut cluster) = header.encode(&extensions, name) else {
            // Only small clusters run out of room.
            prop_assert!(header.cluster_bits < ClusterBits::new(11).unwrap());
            return Ok(());
        };
        cluster.resize(header.cluster_bits.size() as usize, 0);
        let again = Header::parse(&cluster, 1 << 40).unwrap();
        prop_assert_eq!(again.backing_name(&cluster).unwrap(), name);
        prop_assert_eq!(again.extensions(&cluster).unwrap(), extensions);
        prop_assert_eq!(&Header { backing_file: again.backing_file, ..header }, &again);
    }

    #[test]
    fn a_name_too_long_is_refused_not_cut(len in MAX_BACKING_NAME_LEN as usize + 1..5000) {
        let header = new_image(&CreateOptions::new(1 << 20)).unwrap().header;
        prop_assert!(header.encode(&Extensions::default(), Some(&vec![b'n'; len])).is_err());
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..600), version in 2u8..=3, file_len: u64) {
        let mut bytes = bytes;
        let _ = Header::parse(&bytes, file_len);
        let _ = Extensions::parse(&bytes, 0, bytes.len());
        let start = [0x51, 0x46, 0x49, 0xfb, 0, 0, 0, version];
        let len = bytes.len().min(8);
        bytes[..len].copy_from_slice(&start[..len]);
        let _ = Header::parse(&bytes, file_len);
    }

    #[test]
    fn random_tables_never_panic(table in vec(any::<u8>(), 0..600), count in 0u32..=65_536, file_len: u64) {
        let mut header = new_image(&CreateOptions::new(1 << 20)).unwrap().header;
        header.snapshot_count = count;
        header.snapshots_offset = HostOffset::new(1 << 20);
        let found = snapshot::parse_table(&table, &header, file_len);
        prop_assert!(found.is_err() || found.unwrap().len() == count as usize);
        let _ = BitmapsExtension::parse(&table, 200, &header, file_len);
        let directory_offset = HostOffset::new(1 << 20);
        let extension = BitmapsExtension { count: count.max(1), directory_len: table.len() as u64, directory_offset };
        let _ = extension.parse_directory(&table, &header, file_len);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8192))]

    /// What is accepted in spite of the changes keeps every promise of a parsed header.
    #[test]
    fn damaged_images_are_refused_or_kept_within_bounds(damage in damage()) {
        let file = damage.file();
        let Ok(parsed) = parse(&file) else { return Ok(()) };
        let (header, len) = (&parsed.header, file.bytes.len() as u64);
        let bits = header.cluster_bits;
        let l1_end = header.l1_table_offset.get() + u64::from(header.l1_size) * 8;
        let table_len = u64::from(header.refcount_table_clusters) << bits.get();
        prop_assert!(header.l1_size == 0 || l1_end <= HOST_OFFSET_LIMIT);
        prop_assert!(header.refcount_table_offset.get() + table_len <= HOST_OFFSET_LIMIT);
        prop_assert!(header.l1_table_offset.is_aligned(bits) && header.refcount_table_offset.is_aligned(bits));
        prop_assert!(header.geometry().l1_entries(header.size) <= u64::from(header.l1_size));
        prop_assert!(parsed.name.is_none_or(|name| !name.is_empty() && name.len() <= 1023));
        prop_assert_eq!(parsed.snapshots.len(), header.snapshot_count as usize);
        for found in &parsed.snapshots {
            prop_assert!(found.l1_size == 0 || found.l1_table_offset.get() + u64::from(found.l1_size) * 8 <= len);
        }
        for found in &parsed.bitmaps {
            prop_assert!(found.table_offset.get() + u64::from(found.table_size) * 8 <= len);
        }
    }
}
