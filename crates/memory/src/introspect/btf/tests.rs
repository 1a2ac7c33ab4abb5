use super::*;
use crate::address::Physical;
use crate::introspect::testing::{Memory, Types};

fn page_types() -> Types {
    let mut types = Types::new();
    let word = types.int(8);
    let flags = types.typedef("memdesc_flags_t", word);
    let pointer = types.pointer(0);
    let name = types.array(word, 4);
    let inner = types.structure("", 24, &[("mapping", pointer, 8), ("name", name, 16)]);
    types.structure("page", 64, &[("flags", flags, 0), ("", inner, 16)]);
    types.enumeration("pageflags", &[("PG_locked", 0), ("PG_lru", 5)]);
    types.function("filemap_read");
    types
}

#[test]
fn members_are_found_inside_anonymous_structs() {
    let btf = Btf::parse(&page_types().finish()).unwrap();
    assert_eq!(btf.member("page", "flags"), Some(Member { offset: 0, size: 8 }));
    assert_eq!(btf.member("page", "mapping"), Some(Member { offset: 24, size: 8 }));
    assert_eq!(btf.member("page", "name"), Some(Member { offset: 32, size: 32 }));
    assert_eq!((btf.member("page", "map"), btf.member("folio", "flags")), (None, None));
    assert_eq!((btf.size_of("page"), btf.size_of("pageflags")), (Some(64), None));
    assert_eq!(btf.constant("pageflags", "PG_lru"), Some(5));
    assert_eq!(btf.constant("pageflags", "PG"), None);
    assert_eq!(btf.function("filemap_read").as_deref(), Some("filemap_read"));
    assert_eq!(btf.function("filemap_read_fast"), None);
}

#[test]
fn bit_fields_have_no_offset_in_bytes() {
    let mut types = Types::new();
    let word = types.int(4);
    let name = 1; // "int", the first string
    types.add("slab", 4, 1 | 1 << 7 << 24, 8, &[name, word, 15 << 24 | 48]);
    let btf = Btf::parse(&types.finish()).unwrap();
    assert_eq!(btf.member("slab", "int"), None);
}

#[test]
fn what_does_not_parse_to_its_end_is_refused() {
    let blob = page_types().finish();
    for len in 0..blob.len() {
        assert!(Btf::parse(&blob[..len]).is_none(), "cut to {len} bytes");
    }
    let mut types = page_types();
    types.add("later", 25, 0, 0, &[]);
    assert!(Btf::parse(&types.finish()).is_none(), "an unknown kind");
    let mut huge = blob.clone();
    huge[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(Btf::parse(&huge).is_none(), "4 GiB of types");
    assert_eq!(Extent::of(&huge), None);
}

#[test]
fn types_that_refer_to_themselves_are_left() {
    let mut types = Types::new();
    types.typedef("ring", 1);
    let own = 3;
    types.structure("holder", 8, &[("member", 1, 0)]);
    types.structure("nested", 8, &[("", own, 0), ("", own, 0), ("", own, 0)]);
    types.add("", 3, 0, 0, &[4, 4, u32::MAX]);
    types.structure("wide", 8, &[("array", 4, 0)]);
    let btf = Btf::parse(&types.finish()).unwrap();
    assert_eq!(btf.member("holder", "member"), None);
    assert_eq!(btf.member("nested", "member"), None, "within a bounded number of steps");
    assert_eq!(btf.member("wide", "array"), None);
}

#[test]
fn a_half_overwritten_copy_is_passed_over() {
    let blob = page_types().finish();
    let mut memory = Memory::new(1024, 4);
    memory.write(Physical::new(0x1_0000), &blob);
    let mut broken = blob.clone();
    broken[30..].fill(0x5a);
    memory.write(Physical::new(0x4_0000), &broken);
    memory.write(Physical::new(0x8_0004), &blob);
    let found = find(&memory, Physical::new(0x2_0000)).unwrap();
    assert_eq!(found.size_of("page"), Some(64));
    memory.write(Physical::new(0x8_0004), &[0; 4]);
    assert!(find(&memory, Physical::new(0x2_0000)).is_none(), "what lies below the kernel is old");
    assert!(find(&memory, Physical::new(0x1_0000)).is_some());
}
