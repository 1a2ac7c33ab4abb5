use super::*;

#[test]
fn the_default_cluster_size_has_8192_entries_for_512_mib() {
    let geometry = Geometry::new(ClusterBits::DEFAULT);
    assert_eq!(geometry.l2_entries(), 8192);
    assert_eq!(geometry.l2_span(), 512 << 20);
    assert_eq!(geometry.l1_index(GuestOffset::new(512 << 20)), 1);
    assert_eq!(geometry.l1_index(GuestOffset::new((512 << 20) - 1)), 0);
    assert_eq!(geometry.l2_index(GuestOffset::new((512 << 20) - 1)), 8191);
    assert_eq!(geometry.l2_index(GuestOffset::new(512 << 20)), 0);
}

#[test]
fn a_disk_needs_an_entry_for_its_last_byte_and_none_when_empty() {
    for bits in 9..=21 {
        let geometry = Geometry::new(ClusterBits::new(bits).unwrap());
        let span = geometry.l2_span();
        assert_eq!(span, geometry.cluster_bits.size() * geometry.l2_entries() as u64);
        let sizes = [0, 1, span - 1, span, span + 1].map(|size| geometry.l1_entries(size));
        assert_eq!(sizes, [0, 1, 1, 1, 2]);
        assert!(geometry.l1_entries(u64::MAX) > 0);
    }
}

#[test]
fn indices_and_offsets_convert_both_ways() {
    let geometry = Geometry::new(ClusterBits::MIN);
    for (l1, l2) in [(0, 0), (0, 63), (5, 17), (4 << 20, 1)] {
        let at = geometry.guest_offset(l1, l2);
        assert_eq!((geometry.l1_index(at), geometry.l2_index(at)), (l1, l2));
        assert_eq!((geometry.l1_index(at + 511), geometry.l2_index(at + 511)), (l1, l2));
    }
}
