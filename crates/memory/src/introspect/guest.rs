//! Finding a guest's kernel: from the VMCOREINFO note to its page tables, its types and its struct pages.

use super::Unreadable;
use super::btf;
use super::running::{KERNEL_MAP, Processor};
use super::shapes::Shapes;
use super::view::{Tables, View};
use super::vmcoreinfo::{self, VmCoreInfo};
use crate::address::{Frame, PAGE_BITS, Physical, Virtual};
use crate::ram::Ram;

/// Low bits of `section_mem_map` that are flags (Linux `SECTION_MAP_LAST_BIT`); struct pages are aligned further.
const SECTION_FLAGS: u64 = 0x3f;
/// `SECTION_MARKED_PRESENT` and `SECTION_HAS_MEM_MAP`.
const SECTION_IN_USE: u64 = 0b11;
const PAGE: u64 = 1 << PAGE_BITS;
/// NUMA nodes looked at.
const NODES_MAX: u64 = 1024;

/// A kernel that was found in a guest's memory. Valid until the guest boots again.
#[derive(Clone, Debug)]
pub struct Guest {
    pub(super) release: String,
    pub(super) tables: Tables,
    pub(super) shapes: Shapes,
    sections: Sections,
    nodes: Nodes,
}

/// The kernel's list of sections of memory, each with its array of struct pages (`SPARSEMEM`).
#[derive(Clone, Copy, Debug)]
struct Sections {
    /// `mem_section`: pointers to pages of `struct mem_section`.
    roots: Virtual,
    root_count: u64,
    /// Bytes of `struct mem_section`.
    size: u64,
    /// `mem_section.section_mem_map`.
    map: u64,
    /// Base-2 logarithm of a section's number of frames.
    frame_bits: u32,
}

/// Where the NUMA nodes are described.
#[derive(Clone, Copy, Debug)]
enum Nodes {
    /// `node_data`: an array of pointers.
    Array(Virtual, u64),
    /// `contig_page_data`: the only one.
    One(Virtual),
}

impl Guest {
    /// Finds the kernel that `processor` runs in `ram`. Where that does not show, all of the memory is looked through: for a
    /// large guest that takes longer than all else, and two kernels in it are one too many.
    ///
    /// # Errors
    /// [`Unreadable`] says what is missing or wrong.
    pub fn find(ram: &dyn Ram, processor: Option<Processor>) -> Result<Self, Unreadable> {
        let note = processor.and_then(|processor| processor.note(ram));
        if let Some(note) = note.filter(|note| tables(ram, note).is_ok()) {
            return Self::of(ram, &note);
        }
        let mut found: Option<VmCoreInfo> = None;
        let mut reason = Unreadable::NoKernel;
        for (_, info) in vmcoreinfo::notes(ram) {
            if found.as_ref() == Some(&info) {
                continue;
            }
            match (tables(ram, &info), &found) {
                (Ok(_), Some(first)) => {
                    let (first, second) = (first.release().to_owned(), info.release().to_owned());
                    return Err(Unreadable::TwoKernels { first, second });
                }
                (Ok(_), None) => found = Some(info),
                (Err(wrong), _) => reason = wrong,
            }
        }
        Self::of(ram, &found.ok_or(reason)?)
    }

    fn of(ram: &dyn Ram, info: &VmCoreInfo) -> Result<Self, Unreadable> {
        let stext = image(info, "_stext")?;
        let btf = btf::find(ram, stext).ok_or(Unreadable::NoTypes)?;
        if let Some(name) = btf.function("filemap_read_fast") {
            return Err(Unreadable::FastRead(name));
        }
        let nodes = match info.symbol("node_data") {
            Some(array) => Nodes::Array(array, info.length("node_data").unwrap_or(NODES_MAX).min(NODES_MAX)),
            None => Nodes::One(symbol(info, "contig_page_data")?),
        };
        Ok(Self {
            release: info.release().to_owned(),
            tables: tables(ram, info)?,
            shapes: Shapes::of(&btf, info)?,
            sections: Sections::of(info)?,
            nodes,
        })
    }

    /// The kernel's release, such as `6.1.0-50-cloud-amd64`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Number of frames in a section.
    pub(super) const fn section_frames(&self) -> u64 {
        1 << self.sections.frame_bits
    }

    /// Where the struct page of `frame` lies; `None` where the kernel has none. Those of a section follow one another.
    pub(super) fn struct_page(&self, view: &mut View<'_>, frame: Frame) -> Option<Virtual> {
        let Sections { roots, root_count, size, map, frame_bits } = self.sections;
        let (section, per_root) = (frame.get() >> frame_bits, PAGE / size);
        let root = section / per_root;
        let root = view.pointer(roots.checked_add((root < root_count).then_some(root * 8)?)?)?;
        let entry = root.checked_add(section % per_root * size + map)?;
        let map = view.u64(entry).filter(|map| root.get() != 0 && map & SECTION_IN_USE == SECTION_IN_USE)?;
        // The pointer is to where the struct page of frame 0 would lie.
        let offset = frame.get().checked_mul(self.shapes.page.size as u64)?;
        Some(Virtual::new((map & !SECTION_FLAGS).wrapping_add(offset)))
    }

    /// The descriptions of NUMA nodes, `struct pglist_data`.
    pub(super) fn nodes(&self, view: &mut View<'_>) -> Vec<Virtual> {
        match self.nodes {
            Nodes::One(node) => vec![node],
            Nodes::Array(array, count) => {
                let pointers = (0..count).filter_map(|index| view.pointer(array.checked_add(index * 8)?));
                pointers.filter(|node| node.get() != 0).collect()
            }
        }
    }
}

impl Sections {
    fn of(info: &VmCoreInfo) -> Result<Self, Unreadable> {
        let missing = |what: &str| Unreadable::Missing(what.to_owned());
        let bits = info.number("SECTION_SIZE_BITS").and_then(|bits| u32::try_from(bits).ok());
        let bits =
            bits.filter(|bits| (24..=40).contains(bits)).ok_or_else(|| missing("SECTION_SIZE_BITS"))?;
        Ok(Self {
            roots: symbol(info, "mem_section")?,
            root_count: info.length("mem_section").ok_or_else(|| missing("LENGTH(mem_section)"))?,
            size: info
                .size("mem_section")
                .filter(|size| (16..=64).contains(size))
                .ok_or_else(|| missing("mem_section"))?,
            map: info.offset("mem_section.section_mem_map").filter(|&map| map < 64).unwrap_or(0),
            frame_bits: bits - PAGE_BITS,
        })
    }
}

fn symbol(info: &VmCoreInfo, name: &str) -> Result<Virtual, Unreadable> {
    info.symbol(name).ok_or_else(|| Unreadable::Missing(format!("SYMBOL({name})")))
}

/// The physical address of something in the kernel's image.
fn image(info: &VmCoreInfo, name: &str) -> Result<Physical, Unreadable> {
    let base = info.number("phys_base").ok_or_else(|| Unreadable::Missing("phys_base".into()))?;
    let offset = symbol(info, name)?.get().checked_sub(KERNEL_MAP);
    let at = offset.and_then(|offset| offset.checked_add_signed(base));
    at.map(Physical::new)
        .ok_or_else(|| Unreadable::Inconsistent(format!("{name} lies outside the kernel's image")))
}

/// The page tables that a note leads to, if they and the kernel's name for itself agree with it.
fn tables(ram: &dyn Ram, info: &VmCoreInfo) -> Result<Tables, Unreadable> {
    if info.number("sme_mask").is_some_and(|mask| mask != 0) {
        return Err(Unreadable::Encrypted);
    }
    let levels = if info.number("pgtable_l5_enabled").is_some_and(|enabled| enabled != 0) { 5 } else { 4 };
    let tables = Tables { root: image(info, "init_top_pgt")?, levels };
    let mut view = View::new(ram, tables);
    let code = view.translate(symbol(info, "_stext")?).map(|(at, _)| at);
    if code != Some(image(info, "_stext")?) {
        return Err(Unreadable::Inconsistent("page tables and VMCOREINFO disagree".into()));
    }
    // Before Linux 5.11 notes do not say where the names are: behind a reference count. In `struct new_utsname` the
    // release is third, after two names of 65 bytes.
    let names = info.offset("uts_namespace.name").unwrap_or(4);
    let release = symbol(info, "init_uts_ns")?.checked_add(names.saturating_add(130));
    let release = release.and_then(|at| view.bytes::<65>(at)).unwrap_or([0; 65]);
    let known = info.release().as_bytes();
    if !release.starts_with(known) || release.get(known.len()) != Some(&0) {
        return Err(Unreadable::Inconsistent("the kernel's release is not that of VMCOREINFO".into()));
    }
    Ok(tables)
}
