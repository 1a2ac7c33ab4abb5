//! What a guest's kernel says of itself: its VMCOREINFO note, and its types.

use std::hint::black_box;

use vmstrata_memory::introspect::Processor;
use vmstrata_memory::introspect::btf::Btf;
use vmstrata_memory::introspect::vmcoreinfo::{self, VmCoreInfo};
use vmstrata_memory::{Block, Introspection, Layout, PAGE_BYTES, Physical, Ram, RamError};

/// Memory that holds the bytes and zeros behind them.
struct Memory<'a> {
    layout: Layout,
    bytes: &'a [u8],
}

impl<'a> Memory<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let len = (bytes.len().next_multiple_of(PAGE_BYTES) + 2 * PAGE_BYTES) as u64;
        let block = Block { start: Physical::new(0), len, file_offset: 0 };
        Self { layout: Layout::new(vec![block]).expect("whole pages"), bytes }
    }
}

impl Ram for Memory<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, at: Physical, into: &mut [u8]) -> Result<(), RamError> {
        let len = into.len();
        let inside = self.layout.find(at).is_some_and(|(_, follow)| len as u64 <= follow);
        if !inside {
            return Err(RamError::Hole { at, len });
        }
        let rest = self.bytes.get(at.get() as usize..).unwrap_or_default();
        let there = rest.len().min(len);
        into[..there].copy_from_slice(&rest[..there]);
        into[there..].fill(0);
        Ok(())
    }
}

/// Bytes at the start of a guest's memory: a note with its header. What it leads to is not there, so no kernel is found.
pub fn vmcoreinfo(data: &[u8]) {
    let memory = Memory::new(data);
    for (at, info) in vmcoreinfo::notes(&memory) {
        assert!(at.within_page() == 0 && !info.release().contains('\n'));
    }
    if let Some(info) = VmCoreInfo::parse(data) {
        black_box((info.symbol("_stext"), info.number("phys_base"), info.length("mem_section")));
        black_box((info.offset("mem_section.section_mem_map"), info.size("page")));
    }
    // The last bytes as registers: page tables of a processor, anywhere.
    let running = data.last_chunk().map(|cr3| Processor::new(u64::from_le_bytes(*cr3), data.len() as u64));
    for processor in [None, running] {
        if let Introspection::Read { release, .. } = Introspection::of(&memory, processor) {
            // A page table, types and an array of struct pages would have to be in there.
            assert!(!release.is_empty());
        }
    }
}

/// A blob of BTF: what it answers lies in what it holds, whatever refers to what.
pub fn btf(data: &[u8]) {
    let Some(btf) = Btf::parse(data) else { return };
    assert!(btf.types() > 0 && btf.types() * 12 <= data.len());
    for of in ["page", "folio", "address_space", "inode", "buffer_head"] {
        for name in ["flags", "mapping", "_refcount", "b_state", "i_mode"] {
            black_box(btf.member(of, name));
        }
        black_box(btf.size_of(of));
    }
    black_box(btf.constant("pageflags", "PG_lru"));
    if let Some(name) = btf.function("filemap_read") {
        assert!(name.starts_with("filemap_read"));
    }
}
