//! One look at a whole image: every reference counted, and compared with the refcounts.

use std::collections::HashSet;

use vmstrata_qcow2::Incompatible;
use vmstrata_types::HostOffset;

use crate::compare::compare;
use crate::counts::{Counts, Use};
use crate::entries::{Stats, count_entries};
use crate::error::{Error, ErrorKind, Result};
use crate::finding::FindingKind;
use crate::image::{Image, Region};
use crate::refcounts::{DiskRefcounts, block_of};
use crate::report::{Report, Tally};
use crate::roots::{TableRef, count_roots};

/// What a scan found, and what a repair needs to know.
#[derive(Debug)]
pub(crate) struct Scan {
    pub(crate) report: Report,
    pub(crate) counts: Counts,
    pub(crate) disk: DiskRefcounts,
    /// All L2 tables, sorted by offset.
    pub(crate) tables: Vec<TableRef>,
    /// The refcount structures are damaged, shared, or lack a block: they must be written anew.
    pub(crate) must_rebuild: bool,
    /// The first of the clusters at the end, within the file or past it, that have neither refcount nor reference.
    pub(crate) free_from: u64,
    /// Something that holds clusters could not be followed: what seems leaked may be in use.
    pub(crate) references_unknown: bool,
}

/// Scans the image.
///
/// # Errors
/// Whatever the store reports; an image that needs more memory than allowed.
pub(crate) fn scan(image: &Image<'_>) -> Result<Scan> {
    let disk = DiskRefcounts::load(image)?;
    let counts = image.new_counts();
    let mut tally = image.new_tally();
    let Found { tables, stats } = count_references(image, &counts, &disk, &mut tally)?;
    let structures = count_refcounts(image, &counts, &disk, &mut tally);
    if counts.is_exhausted() {
        return Err(out_of_memory(image));
    }
    let compared = compare(image, &counts, &disk, &structures.shared_blocks)?;
    tally.merge(compared.tally);
    let free_from = compared.highest + 1;
    let end = HostOffset::new(free_from << image.bits().get());
    let references_unknown = tally.unfollowed > 0;
    let report = report(image, tally, stats, end);
    let must_rebuild = structures.damaged || compared.block_missing;
    Ok(Scan { report, counts, disk, tables, must_rebuild, free_from, references_unknown })
}

/// What the references lead to.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) tables: Vec<TableRef>,
    pub(crate) stats: Stats,
}

/// Counts every reference but those of the refcount structures.
///
/// # Errors
/// As [`scan`].
pub(crate) fn count_references(
    image: &Image<'_>,
    counts: &Counts,
    disk: &DiskRefcounts,
    tally: &mut Tally,
) -> Result<Found> {
    let tables = count_roots(image, counts, disk, tally)?;
    let stats = count_entries(image, counts, disk, &tables, tally)?;
    if counts.is_exhausted() { Err(out_of_memory(image)) } else { Ok(Found { tables, stats }) }
}

fn out_of_memory(image: &Image<'_>) -> Error {
    ErrorKind::Memory { bytes_max: image.options.memory_bytes_max }.into()
}

/// The state of the refcount structures.
#[derive(Debug)]
struct Structures {
    /// They are of no use as they are.
    damaged: bool,
    /// Clusters of blocks that something else lies on, as the tally says.
    shared_blocks: HashSet<u64>,
}

/// Counts the refcount structures, last, so that whatever lies on a refcount block is known.
fn count_refcounts(
    image: &Image<'_>,
    counts: &Counts,
    disk: &DiskRefcounts,
    tally: &mut Tally,
) -> Structures {
    let bits = image.bits();
    let start = image.header.refcount_table_offset;
    let len = image.header.refcount_table_entries() as u64 * 8;
    image.count_exclusive(counts, tally, Region { start, len }, "the refcount table");
    let damaged = (start.get()..start.get() + len)
        .step_by(bits.size() as usize)
        .any(|at| at >= image.file_len || counts.get(at >> bits.get()).references != 1);
    let mut found = Structures { damaged, shared_blocks: HashSet::new() };
    for (index, &raw) in disk.table.iter().enumerate() {
        let at = start + index as u64 * 8;
        if let Some(error) = disk.entry_error(index, bits) {
            tally.add(at, FindingKind::RefcountTableEntry(error));
            found.damaged = true;
        } else if let Some(block) = block_of(raw, bits) {
            count_block(image, counts, Entry { at, block }, tally, &mut found);
        }
    }
    found
}

/// A refcount table entry, and the block it leads to.
struct Entry {
    at: HostOffset,
    block: HostOffset,
}

fn count_block(image: &Image<'_>, counts: &Counts, entry: Entry, tally: &mut Tally, found: &mut Structures) {
    let (Entry { at, block }, bits) = (entry, image.bits());
    if block.get() >= image.file_len {
        tally.add(at, FindingKind::PastEnd { what: "a refcount block", start: block, len: bits.size() });
        found.damaged = true;
        return;
    }
    let cluster = block.get() >> bits.get();
    counts.add(cluster, 1, Use::Exclusive);
    let references = counts.get(cluster).references;
    found.damaged |= references != 1;
    // Stock tools count references no further than refcounts of this width go.
    if references.min(image.header.refcount_order.max()) != 1 {
        tally.add(at, FindingKind::RefcountBlockShared { block, references });
        found.shared_blocks.insert(cluster);
    }
}

fn report(image: &Image<'_>, tally: Tally, stats: Stats, image_end_offset: HostOffset) -> Report {
    const SECTOR: u64 = 512;
    let header = &image.header;
    Report {
        corruptions: tally.corruptions,
        leaks: tally.leaks,
        journaled: tally.journaled,
        journal_missing: false,
        check_errors: tally.check_errors,
        corruptions_fixed: 0,
        leaks_fixed: 0,
        image_end_offset,
        // Stock tools count disks in sectors.
        total_clusters: (header.size / SECTOR * SECTOR).div_ceil(image.bits().size()),
        allocated_clusters: stats.allocated,
        compressed_clusters: stats.compressed,
        fragmented_clusters: stats.fragmented,
        dirty: header.incompatible.contains(Incompatible::DIRTY),
        marked_corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        findings_total: tally.total,
        findings: tally.into_findings(),
    }
}
