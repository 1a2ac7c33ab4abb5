use super::*;

const BITS: ClusterBits = ClusterBits::DEFAULT;

fn v3() -> EntryFormat {
    EntryFormat::new(3, BITS)
}

fn data(host: u64, copied: bool) -> L2Entry {
    L2Entry::Data { host: HostOffset::new(host), copied }
}

#[test]
fn nothing_set_is_unallocated() {
    assert_eq!(v3().l2(0), Ok(L2Entry::Unallocated));
    assert_eq!(v3().l1(0), Ok(L1Entry { table: None, copied: false }));
}

#[test]
fn standard_entries_decode_to_offset_and_flags() {
    assert_eq!(v3().l2(0x5_0000 | COPIED), Ok(data(0x5_0000, true)));
    assert_eq!(v3().l2(0x5_0000), Ok(data(0x5_0000, false)));
    assert_eq!(v3().l2(ZERO_FLAG), Ok(L2Entry::Zero { host: None, copied: false }));
    let kept = L2Entry::Zero { host: Some(HostOffset::new(0x5_0000)), copied: true };
    assert_eq!(v3().l2(0x5_0000 | COPIED | ZERO_FLAG), Ok(kept));
    let table = Some(HostOffset::new(0x3_0000));
    assert_eq!(v3().l1(0x3_0000 | COPIED), Ok(L1Entry { table, copied: true }));
}

#[test]
fn the_highest_offset_of_the_format_is_accepted() {
    for bits in 9..=21 {
        let bits = ClusterBits::new(bits).unwrap();
        let host = HOST_OFFSET_LIMIT - bits.size();
        assert_eq!(EntryFormat::new(3, bits).l2(host), Ok(data(host, false)));
        assert_eq!(EntryFormat::new(3, bits).l1(host).unwrap().table, Some(HostOffset::new(host)));
    }
}

#[test]
fn every_reserved_bit_of_a_standard_entry_is_refused_by_name() {
    for bit in 0..64u32 {
        let raw = 0x5_0000 | 1u64 << bit;
        if L2_RESERVED >> bit & 1 == 1 {
            assert_eq!(v3().l2(raw), Err(EntryError::Reserved { raw, bits: 1 << bit }), "L2 bit {bit}");
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
        assert_eq!(v3().l2(raw), Err(EntryError::Misaligned { raw, offset }));
        assert_eq!(v3().l1(raw), Err(EntryError::Misaligned { raw, offset }));
    }
    // What is within a 64 KiB cluster starts a 512 B one.
    assert_eq!(EntryFormat::new(3, ClusterBits::MIN).l2(0x5_0200), Ok(data(0x5_0200, false)));
}

#[test]
fn version_2_has_no_zero_flag() {
    let v2 = EntryFormat::new(2, BITS);
    for raw in [ZERO_FLAG, 0x5_0000 | COPIED | ZERO_FLAG] {
        assert_eq!(v2.l2(raw), Err(EntryError::ZeroFlagInVersion2 { raw }));
    }
    assert_eq!(v2.l2(0x5_0000), Ok(data(0x5_0000, false)));
    assert_eq!(v2.l2_invalid_bits(), v3().l2_invalid_bits() | ZERO_FLAG);
}

#[test]
fn a_copied_flag_without_an_offset_says_nothing() {
    assert_eq!(v3().l2(COPIED), Ok(L2Entry::Unallocated));
    assert_eq!(v3().l2(COPIED | ZERO_FLAG), Ok(L2Entry::Zero { host: None, copied: false }));
    assert_eq!(v3().l1(COPIED), Ok(L1Entry { table: None, copied: false }));
}

/// Worked out by hand from the specification: with 64 KiB clusters x = 62 - (16 - 8) = 54.
#[test]
fn a_compressed_descriptor_splits_at_the_bit_the_specification_says() {
    let raw = COMPRESSED_FLAG | 3 << 54 | 0x5_0123;
    let entry = L2Entry::Compressed { host: HostOffset::new(0x5_0123), len: 4 * 512 - 0x123 };
    assert_eq!(v3().l2(raw), Ok(entry));
    assert_eq!(v3().encode_l2(entry), raw);
    // 512 B: x = 61, one bit of sector count. 2 MiB: x = 49, thirteen bits.
    let small = EntryFormat::new(3, ClusterBits::MIN).l2(COMPRESSED_FLAG | 1 << 61 | 0x401);
    assert_eq!(small, Ok(L2Entry::Compressed { host: HostOffset::new(0x401), len: 1023 }));
    let large = EntryFormat::new(3, ClusterBits::MAX).l2(COMPRESSED_FLAG | 0x1fff << 49 | 0x20_0000);
    assert_eq!(large, Ok(L2Entry::Compressed { host: HostOffset::new(0x20_0000), len: 4 << 20 }));
}

#[test]
fn a_compressed_cluster_has_no_copied_flag_and_is_never_above_the_limit() {
    let raw = COMPRESSED_FLAG | 0x5_0123;
    assert_eq!(v3().l2(raw | COPIED), v3().l2(raw));
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
        assert_eq!(format.l2(raw), expected, "cluster_bits {bits}");
    }
}

#[test]
fn a_compressed_cluster_starts_after_the_header() {
    let raw = COMPRESSED_FLAG | 0xffff;
    assert_eq!(v3().l2(raw), Err(EntryError::CompressedOverHeader { raw, offset: HostOffset::new(0xffff) }));
    assert!(v3().l2(COMPRESSED_FLAG | 0x1_0000).is_ok());
}

#[test]
fn compressed_length_is_rounded_up_to_the_sector_it_ends_in() {
    let host = HostOffset::new(0x5_0123);
    for (len, decoded) in [(1, 512 - 0x123), (512 - 0x123, 512 - 0x123), (512 - 0x122, 1024 - 0x123)] {
        let raw = v3().encode_l2(L2Entry::Compressed { host, len });
        assert_eq!(v3().l2(raw), Ok(L2Entry::Compressed { host, len: decoded }));
    }
    let max = v3().max_compressed_len(host);
    let raw = v3().encode_l2(L2Entry::Compressed { host, len: max });
    assert_eq!(v3().l2(raw), Ok(L2Entry::Compressed { host, len: max }));
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
