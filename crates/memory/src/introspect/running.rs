//! Finding the kernel that a processor of the guest runs, without looking through all of the guest's memory.
//!
//! ```text
//!   page tables of the processor ─► pages of the kernel's image that it may write (its data)
//!      └─ a word that is the kernel's address of a page: `vmcoreinfo_note`, if a note begins there
//! ```
//!
//! What it finds is no left-over of an earlier kernel, because a processor runs it. Source: Linux `kernel/vmcore_info.c`,
//! `arch/x86/include/asm/page_64_types.h`; Intel SDM volume 3, "Control Registers".

use super::view::{Leaf, Tables, View};
use super::vmcoreinfo::{self, VmCoreInfo};
use crate::address::{PAGE_BITS, PAGE_BYTES, Physical, Virtual};
use crate::ram::Ram;

/// Where x86-64 kernels have their image in virtual memory: `__START_KERNEL_map`, and the bytes kept for it.
pub(super) const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
const KERNEL_MAP_BYTES: u64 = 1 << 30;
/// Pages of data that are looked at: 64 MiB, several times what kernels have.
const PAGES_MAX: u32 = 1 << 14;
/// Low bits of CR3 that are no address.
const CR3_FLAGS: u64 = PAGE_BYTES as u64 - 1;
/// Where page tables are isolated, a process's own table follows the one that the kernel uses: Linux `PTI_PGTABLE_SWITCH_BIT`.
const USER_TABLE: u64 = PAGE_BYTES as u64;
/// CR4.LA57.
const FIVE_LEVELS: u64 = 1 << 12;

/// What tells which kernel a processor runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processor {
    tables: Tables,
}

impl Processor {
    /// Of the processor's control registers.
    pub fn new(cr3: u64, cr4: u64) -> Self {
        let levels = if cr4 & FIVE_LEVELS == 0 { 4 } else { 5 };
        Self { tables: Tables { root: Physical::new(cr3 & !CR3_FLAGS), levels } }
    }

    /// The note of the kernel that it runs; `None` where that does not show.
    pub fn note(&self, ram: &dyn Ram) -> Option<VmCoreInfo> {
        let root = self.tables.root.get();
        // It may have been stopped in a process.
        let of_kernel = (root & USER_TABLE != 0).then_some(root & !USER_TABLE);
        [Some(root), of_kernel].into_iter().flatten().find_map(|root| {
            let tables = Tables { root: Physical::new(root), ..self.tables };
            note_through(ram, &mut View::new(ram, tables))
        })
    }
}

/// The first note that the data of the kernel's image point to.
fn note_through(ram: &dyn Ram, view: &mut View<'_>) -> Option<VmCoreInfo> {
    let (mut at, mut left) = (KERNEL_MAP, PAGES_MAX);
    while at < KERNEL_MAP + KERNEL_MAP_BYTES {
        let bits = match view.walk(Virtual::new(at)) {
            Ok(Leaf { start, bits, is_writable }) => {
                let pages = if is_writable { (1 << (bits - PAGE_BITS)).min(left) } else { 0 };
                left -= pages;
                for page in 0..u64::from(pages) {
                    let page = start.checked_add(page << PAGE_BITS)?;
                    if let Some(note) = note_of_page(ram, view, page) {
                        return Some(note);
                    }
                }
                bits
            }
            Err(missing) => missing,
        };
        // What is not mapped may reach to the end of all addresses.
        at = (at | ((1 << bits) - 1)).checked_add(1)?;
    }
    None
}

/// The first note that the page at `at` has the address of.
fn note_of_page(ram: &dyn Ram, view: &mut View<'_>, at: Physical) -> Option<VmCoreInfo> {
    let mut bytes = [0; PAGE_BYTES];
    ram.read(at, &mut bytes).ok()?;
    let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    // The kernel's half, and the start of a page.
    let addresses = words.filter(|word| word.cast_signed() < 0 && word.is_multiple_of(PAGE_BYTES as u64));
    let mut notes = addresses.filter_map(|word| {
        let (note, _) = view.translate(Virtual::new(word))?;
        vmcoreinfo::note_at(ram, note)
    });
    notes.next()
}
