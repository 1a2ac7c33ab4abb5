use super::*;

fn orders() -> impl Iterator<Item = RefcountOrder> {
    (0..=6).map(|order| RefcountOrder::new(order).unwrap())
}

#[test]
fn widths_are_powers_of_two_up_to_64_bits() {
    assert_eq!(orders().map(RefcountOrder::width_bits).collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 64]);
    assert_eq!(RefcountOrder::new(7), None);
    assert_eq!(RefcountOrder::from_width_bits(16), Some(RefcountOrder::DEFAULT));
    assert_eq!(RefcountOrder::from_width_bits(64), Some(RefcountOrder::MAX));
    for width in [0, 3, 24, 128] {
        assert_eq!(RefcountOrder::from_width_bits(width), None, "width {width}");
    }
}

#[test]
fn a_block_has_as_many_entries_as_fit_in_a_cluster() {
    for order in orders() {
        let expected = (ClusterBits::MIN.size() * 8 / u64::from(order.width_bits())) as usize;
        assert_eq!(order.entries_per_block(ClusterBits::MIN), expected);
        assert_eq!(
            1 << order.entries_per_block_bits(ClusterBits::MAX),
            order.entries_per_block(ClusterBits::MAX)
        );
    }
}

/// The first refcount of a byte is in its lowest bits, wider ones are big-endian.
#[test]
fn entries_lie_where_the_specification_says() {
    let block = [0b1011_0110, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde];
    let all = |order: u32, count| {
        let order = RefcountOrder::new(order).unwrap();
        (0..count).map(|index| order.get(&block, index)).collect::<Vec<_>>()
    };
    assert_eq!(all(0, 8), [0, 1, 1, 0, 1, 1, 0, 1]);
    assert_eq!(all(1, 4), [0b10, 0b01, 0b11, 0b10]);
    assert_eq!(all(2, 4), [0b0110, 0b1011, 2, 1]);
    assert_eq!(all(3, 2), [0xb6, 0x12]);
    assert_eq!(all(4, 2), [0xb612, 0x3456]);
    assert_eq!(all(5, 2), [0xb612_3456, 0x789a_bcde]);
    assert_eq!(all(6, 1), [0xb612_3456_789a_bcde]);
}

#[test]
fn setting_one_entry_leaves_its_neighbours() {
    for order in orders() {
        for (background, value) in [(0x00, order.max()), (0xff, 0)] {
            let mut block = [background; 64];
            let count = 64 * 8 / order.width_bits() as usize;
            let others = order.get(&block, 0);
            order.set(&mut block, 3, value).unwrap();
            for index in 0..count {
                let expected = if index == 3 { value } else { others };
                assert_eq!(order.get(&block, index), expected, "{order:?} entry {index}");
            }
        }
    }
}

#[test]
fn a_refcount_too_large_changes_nothing() {
    for order in orders().filter(|&order| order < RefcountOrder::MAX) {
        let mut block = [0x5a; 64];
        let value = order.max() + 1;
        let error = Overflow { value, width_bits: order.width_bits() };
        assert_eq!(order.set(&mut block, 1, value), Err(error));
        assert_eq!(block, [0x5a; 64]);
    }
    assert_eq!(RefcountOrder::MAX.max(), u64::MAX);
}

#[test]
fn table_entries_are_checked() {
    let bits = ClusterBits::DEFAULT;
    assert_eq!(decode_table_entry(0, bits), Ok(None));
    assert_eq!(decode_table_entry(0x2_0000, bits), Ok(Some(HostOffset::new(0x2_0000))));
    for bit in 0..9 {
        let raw = 0x2_0000 | 1 << bit;
        assert_eq!(decode_table_entry(raw, bits), Err(EntryError::Reserved { raw, bits: 1 << bit }));
    }
    let raw = 0x2_0200;
    let offset = HostOffset::new(raw);
    assert_eq!(decode_table_entry(raw, bits), Err(EntryError::Misaligned { raw, offset }));
    for block in [None, Some(HostOffset::new(0x2_0000)), Some(HostOffset::new(1 << 63))] {
        assert_eq!(decode_table_entry(encode_table_entry(block, bits), bits), Ok(block));
    }
}
