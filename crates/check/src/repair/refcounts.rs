//! Writing right refcounts.

use std::collections::BTreeSet;
use std::ops::Range;

use vmstrata_qcow2::header::{MAX_REFCOUNT_TABLE_BYTES, field};
use vmstrata_types::HostOffset;

use super::{flush, write};
use crate::counts::{Counts, PAGE, Use};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::image::Image;
use crate::refcounts::DiskRefcounts;
use crate::scan::{Scan, count_references};
use crate::{Phase, Repair};

/// Corrects refcounts in the blocks that there are; false when nothing had to be written.
///
/// # Errors
/// Whatever the store reports.
pub(super) fn repair_in_place(image: &Image<'_>, scan: &Scan) -> Result<bool> {
    let size = image.bits().size();
    let clusters = image.clusters();
    let blocks = scan.disk.blocks_below(image, clusters.div_ceil(1 << scan.disk.block_bits) as usize);
    let (mut block, mut written) = (vec![0; size as usize], false);
    for (done, (&at, indices)) in blocks.iter().enumerate() {
        let at = HostOffset::new(at);
        image
            .store
            .read_padded(&mut block, at)
            .while_trying("read a refcount block")
            .map_err(|e| e.at(at))?;
        // Sound structures have each block once; damaged ones are rebuilt.
        let first = (indices[0] as u64) << scan.disk.block_bits;
        if repair_block(image, scan, first, &mut block) {
            write(image.store, at, &block, "write a refcount block")?;
            written = true;
        }
        image.report_progress(Phase::Repair, done as u64 + 1, blocks.len() as u64);
    }
    if written {
        flush(image.store)?;
    }
    Ok(written)
}

/// Corrects one block, which starts with the refcount of `first`; tells whether it changed.
fn repair_block(image: &Image<'_>, scan: &Scan, first: u64, block: &mut [u8]) -> bool {
    let order = image.header.refcount_order;
    let end = image.clusters().min(first + (1 << scan.disk.block_bits));
    let raise = image.options.repair == Repair::All;
    let mut changed = false;
    for cluster in first..end {
        let index = (cluster - first) as usize;
        let (refcount, right) =
            (order.get(block, index), scan.counts.get(cluster).references.min(order.max()));
        let wanted = if refcount < right { raise } else { refcount > right && !scan.references_unknown };
        if wanted {
            order.set(block, index, right).expect("cut to the width");
            changed = true;
        }
    }
    changed
}

/// Where new refcount structures go.
#[derive(Debug)]
struct Layout {
    /// The first cluster of the table; the blocks follow it.
    start: u64,
    table_clusters: u64,
    /// The parts of the file that blocks cover, by number.
    blocks: BTreeSet<u64>,
}

impl Layout {
    fn end(&self) -> u64 {
        self.start + self.table_clusters + self.blocks.len() as u64
    }

    /// Adds blocks and table clusters until they cover themselves.
    fn new(image: &Image<'_>, mut blocks: BTreeSet<u64>, start: u64, block_bits: u32) -> Self {
        blocks.insert(start >> block_bits);
        let mut layout = Self { start, table_clusters: 1, blocks };
        loop {
            let end = layout.end();
            layout.blocks.extend(start >> block_bits..=(end - 1) >> block_bits);
            let entries = layout.blocks.last().map_or(0, |last| last + 1);
            layout.table_clusters = (entries * 8).div_ceil(image.bits().size());
            if layout.end() == end {
                return layout;
            }
        }
    }
}

/// Writes all refcounts anew, past all that is in use, and switches the header to them.
///
/// The clusters in `reserved`, which nothing uses and behind which nothing is in use, get a refcount of one for
/// structures to come; the new refcounts follow them. The old ones are left as they are, without references.
///
/// # Errors
/// Whatever the store reports; refcounts for more clusters than a refcount table can list.
pub(super) fn rebuild(image: &Image<'_>, disk: &DiskRefcounts, reserved: Range<u64>) -> Result<()> {
    let counts = image.new_counts();
    // What is wrong was noted by the scan.
    count_references(image, &counts, disk, &mut image.new_tally())?;
    reserved.clone().for_each(|cluster| counts.add(cluster, 1, Use::Exclusive));
    let layout = Layout::new(image, used_blocks(&counts, disk.block_bits), reserved.end, disk.block_bits);
    let size = image.bits().size();
    if layout.table_clusters * size > MAX_REFCOUNT_TABLE_BYTES {
        return Err(ErrorKind::Full { what: "the refcount table" }.into());
    }
    write_structures(image, &counts, &layout, disk.block_bits)?;
    flush(image.store)?;
    let mut switch = [0; 12];
    switch[..8].copy_from_slice(&(layout.start * size).to_be_bytes());
    switch[8..].copy_from_slice(&(layout.table_clusters as u32).to_be_bytes());
    write(
        image.store,
        HostOffset::new(field::REFCOUNT_TABLE_OFFSET),
        &switch,
        "switch to the new refcounts",
    )?;
    flush(image.store)
}

/// The blocks that have a cluster with references in them.
fn used_blocks(counts: &Counts, block_bits: u32) -> BTreeSet<u64> {
    let mut used = BTreeSet::new();
    for page in (0..counts.clusters()).step_by(PAGE as usize).filter(|&page| counts.has_page(page)) {
        let mut cluster = page;
        while cluster < page + PAGE {
            if counts.get(cluster).references == 0 {
                cluster += 1;
            } else {
                used.insert(cluster >> block_bits);
                cluster = ((cluster >> block_bits) + 1) << block_bits;
            }
        }
    }
    used
}

fn write_structures(image: &Image<'_>, counts: &Counts, layout: &Layout, block_bits: u32) -> Result<()> {
    let (size, order) = (image.bits().size(), image.header.refcount_order);
    let mut table = vec![0; (layout.table_clusters * size) as usize];
    let blocks_start = layout.start + layout.table_clusters;
    for (number, &index) in layout.blocks.iter().enumerate() {
        let at = HostOffset::new((blocks_start + number as u64) * size);
        table[index as usize * 8..][..8].copy_from_slice(&at.get().to_be_bytes());
        let mut block = vec![0; size as usize];
        for within in 0..1u64 << block_bits {
            let cluster = (index << block_bits) + within;
            let ours = (layout.start..layout.end()).contains(&cluster);
            let references = if ours { 1 } else { counts.get(cluster).references.min(order.max()) };
            order.set(&mut block, within as usize, references).expect("cut to the width");
        }
        write(image.store, at, &block, "write a refcount block")?;
        image.report_progress(Phase::Repair, number as u64 + 1, layout.blocks.len() as u64);
    }
    write(image.store, HostOffset::new(layout.start * size), &table, "write a refcount table")
}
