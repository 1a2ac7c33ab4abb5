//! The rules of classification, one broken at a time, on kernels made up for it. Real ones are judged by the guest tests.

use super::testing::kernel::{
    self as made, BTF, BUDDY, CHECKED, DIRTY, FILE_PAGES, FREE_BLOCKS, NOTE, PRIVATE,
};
use super::testing::{Kernel, Page};
use super::*;
use crate::address::{Frame, PAGE_BYTES, Physical, Virtual};

/// The frame under judgement; a folio of up to 64 pages may begin there.
const FRAME: u64 = 0x2000;

fn cause_of(kernel: &Kernel, frame: u64) -> Cause {
    match Introspection::of(&kernel.memory, None) {
        Introspection::Read { pages, .. } => pages.causes.get(Frame::new(frame)),
        Introspection::Unreadable(reason) => panic!("{reason}"),
    }
}

fn pages_of(kernel: &Kernel) -> Pages {
    Guest::find(&kernel.memory, None).unwrap().pages(&kernel.memory, Rules::default()).unwrap()
}

fn unreadable(kernel: &Kernel) -> Unreadable {
    match Introspection::of(&kernel.memory, None) {
        Introspection::Read { .. } => panic!("it was read"),
        Introspection::Unreadable(reason) => reason,
    }
}

/// A kernel with a clean page of ext4, and where its buffer heads, mapping, inode and super block lie.
struct Ext4 {
    kernel: Kernel,
    page: Page,
    heads: Vec<u64>,
    mapping: u64,
    inode: u64,
    super_block: u64,
}

impl Ext4 {
    fn new(block_bits: u8) -> Self {
        let mut kernel = Kernel::new();
        let (at, mapping, inode, super_block) = kernel.file("ext4", block_bits);
        let blocks = 4096 >> block_bits;
        let heads = kernel.buffers(FRAME, super_block, blocks, 1 << block_bits);
        let private = Kernel::direct(heads[0]);
        let clean = Page::cached(at);
        let page = Page { flags: clean.flags | PRIVATE, private, refcount: 2, ..clean };
        kernel.page(FRAME, page);
        Self { kernel, page, heads, mapping, inode, super_block }
    }
}

#[test]
fn a_page_that_the_kernel_keeps_longer_is_hot() {
    let mut ext4 = Ext4::new(12);
    let is_hot =
        |ext4: &Ext4| pages_of(&ext4.kernel).files.iter().map(|pages| pages.is_hot).collect::<Vec<_>>();
    assert_eq!(is_hot(&ext4), [false]);
    ext4.kernel.page(FRAME, Page { flags: ext4.page.flags | 1 << 8, ..ext4.page });
    assert_eq!(is_hot(&ext4), [true]);
}

#[test]
fn a_clean_page_is_hidden_by_its_flag_and_every_buffer_head() {
    let ext4 = Ext4::new(10);
    let pages = pages_of(&ext4.kernel);
    assert_eq!(pages.classes.get(Frame::new(FRAME)), crate::PageClass::Clean);
    let hide = pages.hiding.of(Frame::new(FRAME)).unwrap();
    let clears: Vec<_> = hide.clears.iter().map(|clear| (clear.at.get(), clear.mask)).collect();
    let heads = ext4.heads.iter().map(|&head| (head, 1));
    let expected: Vec<_> = std::iter::once((Kernel::page_at(FRAME, 0), 1 << 3)).chain(heads).collect();
    assert_eq!(clears, expected);
    let origins: Vec<_> = pages.origins.iter().map(|origin| (origin.within_page, origin.offset)).collect();
    let block = |index: u64| (index as u16 * 1024, (2048 << 9) + (700 + index) * 1024);
    assert_eq!(origins, [0, 1, 2, 3].map(block));
    assert_eq!(pages.disks, [Disk { name: "vda".into(), major: 254, minor: 0 }]);
}

#[test]
fn any_broken_rule_makes_a_page_critical() {
    type Break = fn(&mut Ext4);
    let breaks: [(&str, Break); 17] = [
        ("dirty", |it| it.kernel.page(FRAME, Page { flags: it.page.flags | DIRTY, ..it.page })),
        ("a flag of the file system's", |it| {
            it.kernel.page(FRAME, Page { flags: it.page.flags | CHECKED, ..it.page })
        }),
        ("locked", |it| it.kernel.page(FRAME, Page { flags: it.page.flags | 1, ..it.page })),
        ("not up to date", |it| {
            it.kernel.page(FRAME, Page { flags: it.page.flags & !made::UPTODATE, ..it.page })
        }),
        ("a reader in flight", |it| it.kernel.page(FRAME, Page { refcount: 3, ..it.page })),
        ("mapped", |it| it.kernel.page(FRAME, Page { mapcount: 0, ..it.page })),
        ("a buffer in use", |it| it.kernel.write(it.heads[1] + 48, &[1])),
        ("a dirty buffer", |it| it.kernel.word(it.heads[1], 0b1_1011)),
        ("a buffer of another page", |it| it.kernel.word(it.heads[1] + 16, Kernel::direct(0x60_0000))),
        ("a ring that never closes", |it| it.kernel.word(it.heads[1] + 8, Kernel::direct(it.heads[1]))),
        ("a ring that closes early", |it| it.kernel.word(it.heads[0] + 8, Kernel::direct(it.heads[0]))),
        ("buffers nowhere", |it| it.kernel.word(it.heads[0] + 8, 0)),
        ("a directory", |it| it.kernel.write(it.inode, &0o040_755_u16.to_le_bytes())),
        ("fs-verity", |it| it.kernel.write(it.inode + 8, &(1_u32 << 16).to_le_bytes())),
        ("the journal", |it| it.kernel.word(it.inode + 32, 8)),
        ("no device", |it| it.kernel.word(it.super_block, 0)),
        ("an error of its own", |it| it.kernel.word(it.mapping + 8, 1)),
    ];
    for (rule, break_it) in breaks {
        let mut ext4 = Ext4::new(10);
        break_it(&mut ext4);
        let cause = cause_of(&ext4.kernel, FRAME);
        assert_eq!(cause.class(), crate::PageClass::Critical, "{rule}: {cause:?}");
    }
}

#[test]
fn only_ext4_and_xfs_have_clean_pages() {
    for (system, cause) in [
        ("ext4", Cause::CleanExt4),
        ("xfs", Cause::CleanXfs),
        ("btrfs", Cause::OtherCache),
        ("ext4dev", Cause::OtherCache),
        ("tmpfs", Cause::Shmem),
        ("bdev", Cause::BlockCache),
    ] {
        let mut kernel = Kernel::new();
        let (mapping, ..) = kernel.file(system, 12);
        kernel.page(FRAME, Page::cached(mapping));
        assert_eq!(cause_of(&kernel, FRAME), cause, "{system}");
        kernel.page(FRAME, Page::cached(Virtual::new(mapping.get() | 1)));
        assert_eq!(cause_of(&kernel, FRAME), Cause::Anonymous);
    }
}

#[test]
fn a_large_folio_of_iomap_is_hidden_with_all_its_blocks() {
    let make = |state: [u64; 3], pending: u32| {
        let mut kernel = Kernel::new();
        let (mapping, ..) = kernel.file("xfs", 10);
        let words = kernel.object(64);
        kernel.write(words + 4, &pending.to_le_bytes());
        state.iter().zip(0..).for_each(|(&word, index)| kernel.word(words + 16 + index * 8, word));
        let page = Page::cached(mapping);
        // 16 pages of 4 blocks: 64 valid bits, and 64 for dirty ones behind them.
        let page = Page { flags: page.flags | PRIVATE, private: Kernel::direct(words), refcount: 2, ..page };
        kernel.folio(FRAME, 4, page);
        (kernel, words)
    };
    let (kernel, words) = make([u64::MAX, 0, u64::MAX], 0);
    let pages = pages_of(&kernel);
    let hide = pages.hiding.of(Frame::new(FRAME + 15)).expect("clean");
    assert_eq!((hide.first, hide.pages), (Frame::new(FRAME), 16));
    let clears: Vec<_> = hide.clears.iter().map(|clear| (clear.at.get(), clear.mask)).collect();
    assert_eq!(clears, [(Kernel::page_at(FRAME, 0), 1 << 3), (words + 16, u64::MAX)]);
    assert_eq!(cause_of(&make([u64::MAX, 1, 0], 0).0, FRAME), Cause::BusyCache, "a dirty block");
    assert_eq!(cause_of(&make([u64::MAX, 0, 0], 512).0, FRAME), Cause::BusyCache, "a read under way");
    let (mut mapped, _) = make([u64::MAX, 0, 0], 0);
    mapped.write(Kernel::page_at(FRAME + 1, 16), &0_u32.to_le_bytes());
    assert_eq!(cause_of(&mapped, FRAME + 7), Cause::MappedCache);
    let (mut torn, _) = make([u64::MAX, 0, 0], 0);
    torn.word(Kernel::page_at(FRAME + 9, 8), 0);
    assert_eq!(cause_of(&torn, FRAME), Cause::Kernel, "a folio with a page that is none of its own");
}

#[test]
fn free_is_what_the_allocator_holds_and_nothing_else() {
    let mut kernel = Kernel::new();
    let idle = Page { flags: 0, mapping: 0, private: 0, mapcount: u32::MAX, refcount: 0 };
    let block = |kernel: &mut Kernel, frame: u64, order: u64| {
        (frame..frame + (1 << order)).for_each(|frame| kernel.page(frame, idle));
        kernel.page(frame, Page { mapcount: BUDDY, private: order, ..idle });
    };
    block(&mut kernel, FRAME, 3);
    // A page without references that no one gave back: part of a larger allocation.
    kernel.page(FRAME + 0x100, idle);
    block(&mut kernel, FRAME + 0x200, 2);
    kernel.page(FRAME + 0x202, Page { refcount: 1, ..idle });
    block(&mut kernel, FRAME + 0x304, 3);
    kernel.page(FRAME + 0x400, Page { mapcount: BUDDY, private: 11, ..idle });
    let pages = pages_of(&kernel);
    let free: Vec<_> = pages
        .causes
        .iter()
        .filter(|(_, cause)| *cause == Cause::Free)
        .map(|(frame, _)| frame.get())
        .collect();
    assert_eq!(
        free,
        (FRAME..FRAME + 8).collect::<Vec<_>>(),
        "no block that is in use, unaligned or too large"
    );
}

#[test]
fn kernels_that_are_not_understood_say_why() {
    let broken = |break_it: fn(&mut Kernel)| {
        let mut kernel = Kernel::new();
        break_it(&mut kernel);
        unreadable(&kernel).to_string()
    };
    assert_eq!(broken(|it| it.write(NOTE, &[0; 64])), Unreadable::NoKernel.to_string());
    assert_eq!(
        broken(|it| it.note("6.12.0-made-up", "NUMBER(sme_mask)=1\n")),
        Unreadable::Encrypted.to_string()
    );
    assert_eq!(broken(|it| it.write(BTF, &[0; 64])), Unreadable::NoTypes.to_string());
    assert!(broken(|it| it.note("6.12.1-other", "")).contains("release"));
    assert!(broken(|it| it.note("6.12.0-made-up", "NUMBER(phys_base)=4096\n")).contains("disagree"));
    assert!(
        broken(|it| it.note("6.12.0-made-up", "NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=5\n"))
            .contains("PAGE_BUDDY")
    );
    let second = |it: &mut Kernel| {
        let mut text = [0; 4096];
        crate::Ram::read(&it.memory, Physical::new(NOTE + 24), &mut text).unwrap();
        let end = text.iter().position(|&byte| byte == 0).unwrap();
        it.note_at(NOTE + 0x10_0000, &[&text[..end], b"KERNELOFFSET=0\n"].concat());
    };
    assert!(broken(second).contains("both seem to run"));
    let fast = |it: &mut Kernel| {
        let mut types = made::types();
        types.function("filemap_read_fast_rcu");
        it.write(BTF, &types.finish());
    };
    assert!(broken(fast).contains("filemap_read_fast_rcu"));
    assert!(broken(|it| it.word(FREE_BLOCKS, 1 << 20)).contains("free pages were found"));
    assert!(broken(|it| it.word(FILE_PAGES, 1 << 20)).contains("cache pages were found"));
}

#[test]
fn the_kernel_that_a_processor_runs_is_found_through_its_data() {
    let mut kernel = Kernel::new();
    let root = kernel.memory.tables.root.get();
    let is_found = |kernel: &Kernel, cr3: u64, cr4: u64| {
        let note = Processor::new(cr3, cr4).note(&kernel.memory);
        note.is_some_and(|note| note.release() == "6.12.0-made-up")
    };
    assert!(!is_found(&kernel, root, 0), "nothing points to the note");
    let data = 0x133_3000;
    kernel.word(data + 16, Kernel::direct(NOTE + 0x2000));
    kernel.word(data + 24, Kernel::direct(NOTE));
    assert!(is_found(&kernel, root | 0x805, 0));
    assert!(!is_found(&kernel, root, 1 << 12), "tables of another depth");
    assert!(!is_found(&kernel, 0xffff_ffff_f000, 0), "no memory");
    // Stopped in a process, whose table follows that of the kernel.
    let mut table = [0; PAGE_BYTES];
    kernel.memory.read(Physical::new(root), &mut table).unwrap();
    kernel.write(0x1f_8000, &table);
    assert!(is_found(&kernel, 0x1f_8000, 0) && is_found(&kernel, 0x1f_9000, 0));
    assert!(!is_found(&kernel, 0x1f_a000, 0));
    // A kernel more is one too many only where all of the memory is looked through.
    let more = Kernel::note_text("6.12.0-made-up", "LEFT=over\n");
    kernel.note_at(NOTE + 0x10_0000, more.as_bytes());
    assert!(matches!(Guest::find(&kernel.memory, None), Err(Unreadable::TwoKernels { .. })));
    Guest::find(&kernel.memory, Some(Processor::new(root, 0))).unwrap();
    // What the kernel may not write does not change: the note's address does.
    let entry = kernel.memory.entry(Kernel::image(data - 0x100_0000), 21);
    let before = kernel.memory.read_u64(entry);
    kernel.word(entry.get(), before & !2);
    assert!(!is_found(&kernel, root, 0));
}

#[test]
fn notes_are_found_in_order_wherever_they_lie() {
    let mut memory = super::testing::Memory::new(260 << 8, 4);
    let text = b"OSRELEASE=6.1.0";
    let note =
        [&11_u32.to_le_bytes()[..], &(text.len() as u32).to_le_bytes(), &[0; 4], b"VMCOREINFO\0\0", text];
    let places = [0, 0x2000, 0x40_0000, 0x7f_e000, 0x200_0000, 0x1000_0000, 0x103f_e000];
    places.iter().rev().for_each(|&at| memory.write(Physical::new(at), &note.concat()));
    // Nowhere but at the start of every other page.
    memory.write(Physical::new(0x1_1000), &note.concat());
    memory.write(Physical::new(0x1_2004), &note.concat());
    let found: Vec<_> =
        vmcoreinfo::notes(&memory).map(|(at, info)| (at.get(), info.release().len())).collect();
    assert_eq!(found, places.map(|at| (at, 5)));
}

/// Whatever a guest's memory says, reading it ends, and stays within bounds.
#[test]
fn random_damage_never_breaks_the_reader() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let ext4 = Ext4::new(10);
    let mut kernel = ext4.kernel;
    let (mut read, mut refused) = (0, 0);
    for round in 0..60_u64 {
        // Objects and struct pages most of the time; now and then the note, the types and the page tables.
        let area = [
            (0x50_0000, 0x3_1000),
            (Kernel::page_at(FRAME, 0), 256),
            (0x2000, 0x2000),
            (NOTE, 512),
            (BTF, 2048),
        ];
        let (start, len) =
            area[if round % 8 == 7 { (2 + round / 8 % 3) as usize } else { (round % 2) as usize }];
        let at = (start + next() % len) & !7;
        let before = kernel.memory.read_u64(Physical::new(at));
        let value = if round % 3 == 0 { before ^ 1 << (next() % 64) } else { next() };
        kernel.word(at, value);
        match Introspection::of(&kernel.memory, None) {
            Introspection::Read { .. } => read += 1,
            Introspection::Unreadable(_) => refused += 1,
        }
        kernel.word(at, before);
    }
    assert!(read > 0 && refused > 0, "{read} read, {refused} refused");
}
