//! Compares the references there are with the refcounts the image has.

use std::collections::HashSet;

use vmstrata_types::HostOffset;

use crate::counts::{Count, Counts, PAGE};
use crate::error::{IoContext as _, Result};
use crate::finding::FindingKind;
use crate::image::Image;
use crate::read::in_parallel;
use crate::refcounts::{DiskRefcounts, block_of};
use crate::report::Tally;

/// Clusters that one job of a worker covers at least.
const CLUSTERS_PER_JOB: u64 = 1 << 15;

/// What comparing found.
#[derive(Debug)]
pub(crate) struct Compared {
    pub(crate) tally: Tally,
    /// The highest cluster that has a refcount or a reference.
    pub(crate) highest: u64,
    /// A cluster in use that no refcount block covers: writing the right refcounts needs a new block.
    pub(crate) block_missing: bool,
}

/// Compares every cluster of the file; of clusters in `noted` it is known already that something overlaps there.
///
/// # Errors
/// Whatever the store reports.
pub(crate) fn compare(
    image: &Image<'_>,
    counts: &Counts,
    disk: &DiskRefcounts,
    noted: &HashSet<u64>,
) -> Result<Compared> {
    let clusters = image.clusters().max(highest_counted(image, counts));
    let per_job = CLUSTERS_PER_JOB.max(1 << disk.block_bits);
    let jobs = clusters.div_ceil(per_job) as usize;
    let parts = in_parallel(jobs, |claim| {
        let mut part = Part {
            image,
            counts,
            disk,
            noted,
            block: Vec::new(),
            result: Compared { tally: image.new_tally(), highest: 0, block_missing: false },
        };
        for job in claim {
            let first = job as u64 * per_job;
            part.compare_clusters(first, (first + per_job).min(clusters))?;
        }
        Ok(part.result)
    })?;
    let mut whole = Compared { tally: image.new_tally(), highest: 0, block_missing: false };
    for part in parts {
        whole.tally.merge(part.tally);
        whole.highest = whole.highest.max(part.highest);
        whole.block_missing |= part.block_missing;
    }
    Ok(whole)
}

/// The file's clusters, and the one past its end that a structure may reach into.
fn highest_counted(image: &Image<'_>, counts: &Counts) -> u64 {
    let past = image.clusters();
    if counts.get(past).references > 0 { past + 1 } else { past }
}

struct Part<'a> {
    image: &'a Image<'a>,
    counts: &'a Counts,
    disk: &'a DiskRefcounts,
    noted: &'a HashSet<u64>,
    /// The block at hand; empty for one that does not exist or holds nothing but zeros.
    block: Vec<u8>,
    result: Compared,
}

impl Part<'_> {
    fn compare_clusters(&mut self, first: u64, end: u64) -> Result<()> {
        let mut cluster = first;
        while cluster < end {
            let block = cluster >> self.disk.block_bits;
            let block_end = end.min((block + 1) << self.disk.block_bits);
            let exists = self.load(block as usize)?;
            if exists != Block::Unusable {
                self.compare_block(cluster, block_end, exists);
            }
            cluster = block_end;
        }
        Ok(())
    }

    fn load(&mut self, index: usize) -> Result<Block> {
        self.block.clear();
        let raw = self.disk.table.get(index).copied().unwrap_or(0);
        let Some(at) = block_of(raw, self.image.bits()) else {
            return Ok(if raw == 0 { Block::Missing } else { Block::Unusable });
        };
        let size = self.image.bits().size();
        if !self.image.is_hole(at, size)? {
            self.block.resize(size as usize, 0);
            let read = self.image.store.read_padded(&mut self.block, at);
            read.while_trying("read a refcount block").map_err(|error| error.at(at))?;
        }
        Ok(if at.get() < self.image.file_len { Block::There } else { Block::Missing })
    }

    fn compare_block(&mut self, first: u64, end: u64, exists: Block) {
        let mut cluster = first;
        while cluster < end {
            let page_end = end.min((cluster / PAGE + 1) * PAGE);
            if !self.block.is_empty() || self.counts.has_page(cluster) {
                (cluster..page_end).for_each(|cluster| self.compare_cluster(cluster, exists));
            }
            cluster = page_end;
        }
    }

    fn compare_cluster(&mut self, cluster: u64, exists: Block) {
        let order = self.image.header.refcount_order;
        let within = cluster & ((1 << self.disk.block_bits) - 1);
        let refcount = if self.block.is_empty() { 0 } else { order.get(&self.block, within as usize) };
        let count = self.counts.get(cluster);
        if refcount == 0 && count.references == 0 {
            return;
        }
        self.result.highest = self.result.highest.max(cluster);
        if exists == Block::Missing && count.references > 0 {
            self.result.block_missing = true;
        }
        if refcount != count.references || count.overlaps() {
            self.judge(cluster, refcount, count);
        }
    }

    /// Notes what a refcount and the references to its cluster have against each other.
    ///
    /// An overlap that the refcount shows is one finding, as stock tools count it; one that it hides, because
    /// someone counted the references of a broken image right, is a finding of its own.
    fn judge(&mut self, cluster: u64, refcount: u64, count: Count) {
        let at = HostOffset::new(cluster << self.image.bits().get());
        let max = self.image.header.refcount_order.max();
        let references = count.references;
        let tally = &mut self.result.tally;
        if references > max {
            tally.add_weighted(at, FindingKind::RefcountOverflow { references, max }, references - max);
        }
        let countable = references.min(max);
        if refcount < countable {
            tally.add(at, FindingKind::RefcountTooLow { refcount, references });
        } else if refcount == 1 && countable == 0 && self.image.options.journaled.contains(&at) {
            tally.journaled += 1;
        } else if refcount > countable {
            tally.add(at, FindingKind::Leak { refcount, references });
        }
        if count.overlaps() && (references..=max).contains(&refcount) && !self.noted.contains(&cluster) {
            tally.add(at, FindingKind::Overlap { references });
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    There,
    /// All its refcounts are zero.
    Missing,
    /// The table entry is damaged: what its block says is not known, and the damage was noted.
    Unusable,
}
