use super::*;
use crate::introspect::testing::Memory;

const DIRECT: Virtual = Virtual::new(0xffff_8880_0000_0000);
const CODE: Virtual = Virtual::new(0xffff_ffff_8100_0000);

#[test]
fn pages_of_every_size_are_translated() {
    for (levels, direct) in [(4, DIRECT), (5, Virtual::new(0xff11_0000_0000_0000))] {
        let mut memory = Memory::new(1024, levels);
        memory.map(direct, Physical::new(0), 2, 30);
        memory.map(CODE, Physical::new(0x20_0000), 2, 21);
        memory.map(CODE.checked_add(4 << 20).unwrap(), Physical::new(0x7000), 1, 12);
        let mut view = View::new(&memory, memory.tables);
        // Twice: walked, and from memory.
        for _ in 0..2 {
            let at = |base: Virtual, offset| base.checked_add(offset).unwrap();
            let of = |view: &mut View<'_>, at| view.translate(at).map(|(to, rest)| (to.get(), rest));
            assert_eq!(of(&mut view, at(direct, 0x4030_1234)), Some((0x4030_1234, 0xf_edcc)));
            assert_eq!(of(&mut view, at(CODE, 0x20_0008)), Some((0x40_0008, 0x1f_fff8)));
            assert_eq!(of(&mut view, at(CODE, 0x40_0ffc)), Some((0x7ffc, 4)));
            assert_eq!(of(&mut view, at(CODE, 0x40_1000)), None);
            assert_eq!(of(&mut view, Virtual::new(0x00ff_8880_0000_0000)), None, "no canonical address");
        }
    }
}

#[test]
fn reads_cross_pages_and_stop_at_holes() {
    let mut memory = Memory::new(64, 4);
    memory.map(CODE, Physical::new(0x2_0000), 1, 12);
    memory.map(CODE.checked_add(0x1000).unwrap(), Physical::new(0x1_0000), 1, 12);
    memory.write(Physical::new(0x2_0ffc), &[1, 2, 3, 4]);
    memory.write(Physical::new(0x1_0000), &[5, 6, 7, 8]);
    let mut view = View::new(&memory, memory.tables);
    let at = |offset| CODE.checked_add(offset).unwrap();
    assert_eq!(view.u64(at(0xffc)), Some(0x0807_0605_0403_0201));
    assert_eq!(view.u64(at(0x1ffc)), None);
    let mut large = [0; 8];
    view.read_large(at(0x1ffc), &mut large);
    assert_eq!(large, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    view.read_large(at(0xffe), &mut large[..4]);
    assert_eq!(large[..4], [3, 4, 5, 6]);
    let mut end = [0; 4];
    view.read_large(Virtual::new(u64::MAX - 1), &mut end);
    assert_eq!(end, [0xff; 4]);
}

#[test]
fn objects_are_read_where_they_are_kept_and_over_the_ends_of_pages() {
    let mut memory = Memory::new(64, 4);
    memory.map(CODE, Physical::new(0x2_0000), 1, 12);
    memory.map(CODE.checked_add(0x1000).unwrap(), Physical::new(0x1_0000), 1, 12);
    memory.write(Physical::new(0x2_0ffc), &[1, 2, 3, 4]);
    memory.write(Physical::new(0x1_0000), &[5, 6, 7, 8]);
    for is_direct in [false, true] {
        memory.is_direct = is_direct;
        let mut view = View::new(&memory, memory.tables);
        let at = |offset| CODE.checked_add(offset).unwrap();
        assert_eq!(view.object(at(0xffc), &mut [0; 4]), Some(&[1, 2, 3, 4][..]));
        assert_eq!(view.object(at(0xffe), &mut [0; 4]), Some(&[3, 4, 5, 6][..]));
        assert_eq!(view.object(at(0x1ffd), &mut [0; 4]), None);
        assert_eq!(view.object(at(0x2000), &mut [0; 4]), None);
    }
}

#[test]
fn tables_that_loop_or_leave_memory_end() {
    let mut memory = Memory::new(64, 5);
    for index in 0..512 {
        memory.write(Physical::new(0x1000 + index * 8), &(0x1000_u64 | 1).to_le_bytes());
    }
    let mut view = View::new(&memory, memory.tables);
    // Every level is the same table: the walk ends at the last level with the table itself as the page.
    assert_eq!(view.u64(CODE), Some(0x1001));
    memory.write(Physical::new(0x1000), &[0xff; 4096]);
    let mut view = View::new(&memory, memory.tables);
    assert_eq!(view.u64(CODE), None, "a huge page at the top level, and addresses without memory");
}
