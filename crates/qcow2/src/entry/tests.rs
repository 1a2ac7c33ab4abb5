use super::*;

const BITS: ClusterBits = ClusterBits::DEFAULT;

fn v3() -> EntryFormat {
    EntryFormat::new(3, BITS)
}

/// Decodes an entry of 8 bytes.
fn l2(format: EntryFormat, word: u64) -> Result<L2Entry, EntryError> {
    format.l2(RawEntry::standard(word))
}

fn data(host: u64, copied: bool) -> L2Entry {
    L2Entry::Data { host: HostOffset::new(host), copied }
}

#[test]
fn nothing_set_is_unallocated() {
    assert_eq!(l2(v3(), 0), Ok(L2Entry::Unallocated));
    assert_eq!(v3().l1(0), Ok(L1Entry { table: None, copied: false }));
}

#[test]
fn standard_entries_decode_to_offset_and_flags() {
    assert_eq!(l2(v3(), 0x5_0000 | COPIED), Ok(data(0x5_0000, true)));
    assert_eq!(l2(v3(), 0x5_0000), Ok(data(0x5_0000, false)));
    assert_eq!(l2(v3(), ZERO_FLAG), Ok(L2Entry::Zero { host: None, copied: false }));
    let kept = L2Entry::Zero { host: Some(HostOffset::new(0x5_0000)), copied: true };
    assert_eq!(l2(v3(), 0x5_0000 | COPIED | ZERO_FLAG), Ok(kept));
    let table = Some(HostOffset::new(0x3_0000));
    assert_eq!(v3().l1(0x3_0000 | COPIED), Ok(L1Entry { table, copied: true }));
}

#[test]
fn the_highest_offset_of_the_format_is_accepted() {
    for bits in 9..=21 {
        let bits = ClusterBits::new(bits).unwrap();
        let host = HOST_OFFSET_LIMIT - bits.size();
        assert_eq!(l2(EntryFormat::new(3, bits), host), Ok(data(host, false)));
        assert_eq!(EntryFormat::new(3, bits).l1(host).unwrap().table, Some(HostOffset::new(host)));
    }
}

#[test]
fn every_reserved_bit_of_a_standard_entry_is_refused_by_name() {
    for bit in 0..64u32 {
        let raw = 0x5_0000 | 1u64 << bit;
        if L2_RESERVED >> bit & 1 == 1 {
            assert_eq!(l2(v3(), raw), Err(EntryError::Reserved { raw, bits: 1 << bit }), "L2 bit {bit}");
        }
        if L1_RESERVED >> bit & 1 == 1 {
            assert_eq!(v3().l1(raw), Err(EntryError::Reserved { raw, bits: 1 << bit }), "L1 bit {bit}");
        }
    }
    // The masks stock `qemu-img check` uses.
    assert_eq!(L2_RESERVED, 0x3f00_0000_0000_01fe);
    assert_eq!(L1_RESERVED, 0x7f00_0000_0000_01ff);
}

#[test]
fn offsets_within_a_cluster_are_refused() {
    for bit in 9..16 {
        let raw = 0x5_0000 | 1 << bit | COPIED;
        let offset = HostOffset::new(0x5_0000 | 1 << bit);
        assert_eq!(l2(v3(), raw), Err(EntryError::Misaligned { raw, offset }));
        assert_eq!(v3().l1(raw), Err(EntryError::Misaligned { raw, offset }));
    }
    // What is within a 64 KiB cluster starts a 512 B one.
    assert_eq!(l2(EntryFormat::new(3, ClusterBits::MIN), 0x5_0200), Ok(data(0x5_0200, false)));
}

#[test]
fn version_2_has_no_zero_flag() {
    let v2 = EntryFormat::new(2, BITS);
    for raw in [ZERO_FLAG, 0x5_0000 | COPIED | ZERO_FLAG] {
        assert_eq!(l2(v2, raw), Err(EntryError::ZeroFlagInVersion2 { raw }));
    }
    assert_eq!(l2(v2, 0x5_0000), Ok(data(0x5_0000, false)));
    assert_eq!(v2.l2_invalid_bits(), v3().l2_invalid_bits() | ZERO_FLAG);
}

#[test]
fn a_copied_flag_without_an_offset_says_nothing() {
    assert_eq!(l2(v3(), COPIED), Ok(L2Entry::Unallocated));
    assert_eq!(l2(v3(), COPIED | ZERO_FLAG), Ok(L2Entry::Zero { host: None, copied: false }));
    assert_eq!(v3().l1(COPIED), Ok(L1Entry { table: None, copied: false }));
}

/// Worked out by hand from the specification: with 64 KiB clusters x = 62 - (16 - 8) = 54.
#[test]
fn a_compressed_descriptor_splits_at_the_bit_the_specification_says() {
    let raw = COMPRESSED_FLAG | 3 << 54 | 0x5_0123;
    let entry = L2Entry::Compressed { host: HostOffset::new(0x5_0123), len: 4 * 512 - 0x123 };
    assert_eq!(l2(v3(), raw), Ok(entry));
    assert_eq!(v3().encode_l2(entry), RawEntry::standard(raw));
    // 512 B: x = 61, one bit of sector count. 2 MiB: x = 49, thirteen bits.
    let small = l2(EntryFormat::new(3, ClusterBits::MIN), COMPRESSED_FLAG | 1 << 61 | 0x401);
    assert_eq!(small, Ok(L2Entry::Compressed { host: HostOffset::new(0x401), len: 1023 }));
    let large = l2(EntryFormat::new(3, ClusterBits::MAX), COMPRESSED_FLAG | 0x1fff << 49 | 0x20_0000);
    assert_eq!(large, Ok(L2Entry::Compressed { host: HostOffset::new(0x20_0000), len: 4 << 20 }));
}

#[test]
fn a_compressed_cluster_has_no_copied_flag_and_is_never_above_the_limit() {
    let raw = COMPRESSED_FLAG | 0x5_0123;
    assert_eq!(l2(v3(), raw | COPIED), l2(v3(), raw));
    for bits in 9..=14 {
        let format = EntryFormat::new(3, ClusterBits::new(bits).unwrap());
        let offset = HostOffset::new(HOST_OFFSET_LIMIT);
        let raw = COMPRESSED_FLAG | HOST_OFFSET_LIMIT;
        let expected = if bits == 14 {
            // Bit 56 is the lowest of the sector count here.
            Err(EntryError::CompressedOverHeader { raw, offset: HostOffset::ZERO })
        } else {
            Err(EntryError::CompressedTooHigh { raw, offset })
        };
        assert_eq!(l2(format, raw), expected, "cluster_bits {bits}");
    }
}

#[test]
fn a_compressed_cluster_starts_after_the_header() {
    let raw = COMPRESSED_FLAG | 0xffff;
    assert_eq!(l2(v3(), raw), Err(EntryError::CompressedOverHeader { raw, offset: HostOffset::new(0xffff) }));
    assert!(l2(v3(), COMPRESSED_FLAG | 0x1_0000).is_ok());
}

#[test]
fn compressed_length_is_rounded_up_to_the_sector_it_ends_in() {
    let host = HostOffset::new(0x5_0123);
    for (len, decoded) in [(1, 512 - 0x123), (512 - 0x123, 512 - 0x123), (512 - 0x122, 1024 - 0x123)] {
        let raw = v3().encode_l2(L2Entry::Compressed { host, len }).word;
        assert_eq!(l2(v3(), raw), Ok(L2Entry::Compressed { host, len: decoded }));
    }
    let max = v3().max_compressed_len(host);
    let raw = v3().encode_l2(L2Entry::Compressed { host, len: max }).word;
    assert_eq!(l2(v3(), raw), Ok(L2Entry::Compressed { host, len: max }));
}

/// Encoding what the format cannot hold is a bug of the caller, never a wrong entry on disk.
#[test]
fn encoding_outside_the_format_panics() {
    let at = HostOffset::new;
    let too_high = v3().compressed_offset_limit();
    let bad = [
        (3, L2Entry::Data { host: at(0x5_0200), copied: true }),
        (3, L2Entry::Data { host: at(HOST_OFFSET_LIMIT), copied: true }),
        (3, L2Entry::Data { host: at(1 << 62), copied: false }),
        (3, L2Entry::Data { host: at(0), copied: true }),
        (3, L2Entry::Zero { host: None, copied: true }),
        (3, L2Entry::Zero { host: Some(at(0)), copied: false }),
        (2, L2Entry::Zero { host: None, copied: false }),
        (3, L2Entry::Compressed { host: at(0x5_0123), len: 0 }),
        (3, L2Entry::Compressed { host: at(0x5_0123), len: (128 << 10) - 0x123 + 1 }),
        (3, L2Entry::Compressed { host: too_high, len: 512 }),
        (3, L2Entry::Compressed { host: at(0xfff0), len: 512 }),
    ];
    for (version, entry) in bad {
        let encode = || EntryFormat::new(version, BITS).encode_l2(entry);
        assert!(std::panic::catch_unwind(encode).is_err(), "{entry:?} was encoded");
    }
    for table in [None, Some(at(0x5_0200)), Some(at(HOST_OFFSET_LIMIT))] {
        let encode = || v3().encode_l1(L1Entry { table, copied: true });
        assert!(std::panic::catch_unwind(encode).is_err(), "{table:?} was encoded");
    }
}

const EXTENDED: EntryFormat = EntryFormat::extended(BITS);

fn states(allocated: u32, zero: u32) -> Subclusters {
    Subclusters { allocated, zero }
}

/// The second word of an entry: subclusters 0 to 3 zero, 8 to 15 allocated.
#[test]
fn an_extended_entry_says_what_each_subcluster_is() {
    let raw = RawEntry { word: 0x5_0000 | COPIED, subclusters: 0x0000_000f_0000_ff00 };
    let (host, states) = (Some(HostOffset::new(0x5_0000)), states(0xff00, 0xf));
    assert_eq!(EXTENDED.l2(raw), Ok(L2Entry::Subclusters { host, copied: true, states }));
    use SubclusterState::{Allocated, Unallocated, Zero};
    let runs: Vec<_> = states.runs().collect();
    assert_eq!(runs, [(0, 4, Zero), (4, 4, Unallocated), (8, 8, Allocated), (16, 16, Unallocated)]);
    let bytes = [0x8000_0000_0005_0000u64, 0x0000_000f_0000_ff00].map(u64::to_be_bytes).concat();
    assert_eq!(EXTENDED.raw_entries(&bytes).collect::<Vec<_>>(), [raw]);
}

#[test]
fn a_cluster_whose_subclusters_are_alike_is_one_thing() {
    let host = Some(HostOffset::new(0x5_0000));
    let of = |word, states: Subclusters| EXTENDED.l2(RawEntry { word, subclusters: states.bits() });
    assert_eq!(of(0x5_0000, Subclusters::ALLOCATED), Ok(data(0x5_0000, false)));
    assert_eq!(of(0x5_0000, Subclusters::ZERO), Ok(L2Entry::Zero { host, copied: false }));
    assert_eq!(of(0, Subclusters::ZERO), Ok(L2Entry::Zero { host: None, copied: false }));
    assert_eq!(of(0, states(0, 0)), Ok(L2Entry::Unallocated));
    let unused = L2Entry::Subclusters { host, copied: false, states: states(0, 0) };
    assert_eq!(of(0x5_0000, states(0, 0)), Ok(unused));
    // The zero flag is that of entries without subclusters.
    assert_eq!(of(ZERO_FLAG, states(0, 0)), Ok(L2Entry::Unallocated));
}

#[test]
fn subclusters_that_cannot_be_are_refused_by_name() {
    let nowhere = RawEntry { word: 0, subclusters: 1 };
    assert_eq!(EXTENDED.l2(nowhere), Err(EntryError::SubclustersNowhere { raw: nowhere }));
    let twice = RawEntry { word: 0x5_0000, subclusters: 1 << 37 | 1 << 5 };
    assert_eq!(EXTENDED.l2(twice), Err(EntryError::SubclustersTwice { raw: twice }));
    for subclusters in [1, 1 << 32] {
        let raw = RawEntry { word: COMPRESSED_FLAG | 0x5_0123, subclusters };
        assert_eq!(EXTENDED.l2(raw), Err(EntryError::SubclustersCompressed { raw }));
    }
    let said = EntryError::SubclustersTwice { raw: twice }.to_string();
    assert!(said.contains("0x0000000000050000 with subclusters 0x0000002000000020"), "{said}");
}
