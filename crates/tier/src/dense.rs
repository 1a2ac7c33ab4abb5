//! Dense layers: a frozen layer, or a whole state of a disk, as one immutable qcow2 file that holds no more than it must.
//!
//! ```text
//!   header │ refcount table, blocks │ L1 table │ L2 tables │ host clusters
//!
//!   guest cluster 7   ·a··b···   ─┐
//!   guest cluster 90  ··c·····   ─┼─►  host cluster  ·ac·b··d   refcount 3, not COPIED
//!   guest cluster 512 ·······d   ─┘
//! ```
//!
//! Clusters have 128 KiB and 32 subclusters. Subcluster i of a guest cluster lies at place i of its host cluster, so that guest clusters of
//! which no two have the same subcluster share a host cluster. Stock tools read such a file, find it clean, and copy a shared cluster before
//! they write it. Tables are clusters of which most is zeros: the repository keeps those as holes where it can.
//!
//! What is stored is known before the first byte is written, so that the file is written from front to back.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vmstrata_disk::{Disk, Error as DiskError, ErrorKind, Format, FrozenLayer, OpenOptions, Resources};
use vmstrata_qcow2::create::{Places, Refcounts, first_cluster};
use vmstrata_qcow2::geometry::ENTRY_LEN;
use vmstrata_qcow2::{
    CreateError, CreateOptions, EntryFormat, Geometry, L1Entry, L2Entry, NewBacking, RefcountOrder,
    SubclusterState, Subclusters,
};
use vmstrata_repo::Repository;
use vmstrata_store::Segment;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, HostOffset};

use crate::digests::CHUNK;
use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};
use crate::object::{Shipment, ship};

const CLUSTER: ClusterBits = ClusterBits::from_size(128 << 10).expect("a power of two");
const GEOMETRY: Geometry = Geometry::extended(CLUSTER);
/// Bytes of a subcluster.
const UNIT: u64 = GEOMETRY.unit().size();
/// The most guest clusters of a layer: 5 TiB of them, in 1 GiB of memory.
const CLUSTERS_MAX: usize = (1 << 30) / size_of::<Cluster>();
/// Host clusters with as much room as each other that are tried for a guest cluster.
const TRIED_MAX: usize = 16;
/// How long a merge that gives way rests, in times for which it worked, and between two looks whether it still has to.
const RESTS: u32 = 15;
const REST: Duration = Duration::from_millis(10);
/// Host clusters written at once.
const BATCH: usize = 8;
/// L2 tables read, or runs of allocation asked for, before it is checked how many clusters there are.
pub(crate) const TABLES_AT_ONCE: u64 = 64;
const EXTENTS_AT_ONCE: usize = 4096;

/// Ships the state of a disk whose newest layer is the frozen file `state`: that layer alone, to stand on the layer `below`, or
/// without one all of the disk.
///
/// # Errors
/// A state that cannot be read or is being written; too many clusters; what [`ship`] reports.
pub fn ship_state(
    repository: &dyn Repository,
    state: &Path,
    below: Option<ObjectId>,
    options: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<Object> {
    ship_merged(repository, state, &[state], below, options, resources, &MergeOrders::default())
}

/// Whether a frozen layer with tables says nothing: its disk was not written since the layer below.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn says_nothing(layer: &Path, resources: &Arc<Resources>) -> Result<bool> {
    let layer = FrozenLayer::open(layer, Some(Format::Qcow2), resources)?;
    Ok(!layer.has_tables(0, usize::MAX)?.contains(&true))
}

/// What the thread that writes a merged layer looks at.
#[derive(Debug, Default)]
pub struct MergeOrders {
    /// It ends as soon as it can.
    pub is_given_up: AtomicBool,
    /// It rests most of the time: epochs are late, and need the wire.
    pub gives_way: Arc<AtomicBool>,
}

impl MergeOrders {
    /// Rests after so much work, if it is to.
    fn give_way(&self, worked: Duration) {
        let until = Instant::now() + worked * RESTS;
        let rests = || self.gives_way.load(Ordering::Relaxed) && !self.is_given_up.load(Ordering::Relaxed);
        while rests() && Instant::now() < until {
            thread::sleep(REST);
        }
    }
}

/// As [`ship_state`], but several layers as one: `layers`, lowest first, say what has changed since the state of `below`, and bytes
/// come from `state`, which may be another chain for the same state. Ends soon once it is given up.
///
/// # Errors
/// As there; [`Error::GivenUp`].
///
/// # Panics
/// Without a layer.
pub fn ship_merged(
    repository: &dyn Repository,
    state: &Path,
    layers: &[&Path],
    below: Option<ObjectId>,
    options: &OpenOptions,
    resources: &Arc<Resources>,
    orders: &MergeOrders,
) -> Result<Object> {
    assert!(!layers.is_empty());
    let options = OpenOptions { read_only: true, ..options.clone() };
    let disk = Disk::open(state, &options, resources)?;
    let mut plan = Plan::new(disk.size());
    let all_have_tables = match below {
        Some(_) => plan.mark_layers(layers, options.format, resources)?,
        None => false,
    };
    if !all_have_tables {
        plan = Plan::new(disk.size());
        plan.mark_disk(&disk, below.is_some())?;
    }
    plan.pack();
    ship(repository, plan.zeros(), |shipment| {
        plan.write_tables(below, |bytes| shipment.put_tables(bytes))?;
        plan.write_data(&disk, shipment, orders)
    })
}

/// A guest cluster that is stored.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    /// Its number on the disk.
    number: u64,
    states: Subclusters,
    /// Its place among the host clusters, if a subcluster is data.
    host: u32,
}

/// Bits `from..to`.
fn bits(from: u64, to: u64) -> u32 {
    if from < to { ((1u64 << to) - (1u64 << from)) as u32 } else { 0 }
}

/// What is stored, and where.
struct Plan {
    size: u64,
    /// In the order of the disk.
    clusters: Vec<Cluster>,
    /// How many guest clusters each host cluster holds.
    counts: Vec<u8>,
}

impl Plan {
    fn new(size: u64) -> Self {
        Self { size, clusters: Vec::new(), counts: Vec::new() }
    }

    /// Marks what layers say, lowest first, of which a newer one hides the older ones. False where one has no tables: a raw file
    /// hides everything below it.
    fn mark_layers(
        &mut self,
        layers: &[&Path],
        format: Option<Format>,
        resources: &Arc<Resources>,
    ) -> Result<bool> {
        // A layer shows nothing past the end of a smaller one above it.
        let mut end = self.size;
        for path in layers.iter().rev() {
            let layer = FrozenLayer::open(path, format, resources)?;
            let Some(geometry) = layer.geometry() else { return Ok(false) };
            end = end.min(layer.size());
            let mut older = Self::new(end);
            older.mark_layer(&layer, geometry)?;
            self.put_below(older)?;
        }
        if end < self.size {
            let mut grown = Self::new(self.size);
            grown.mark(GuestRange::new(GuestOffset::new(end), self.size - end), true)?;
            self.put_below(grown)?;
        }
        Ok(true)
    }

    /// Adds what an older layer says where this one says nothing.
    fn put_below(&mut self, older: Self) -> Result<()> {
        let newer = std::mem::take(&mut self.clusters);
        if newer.is_empty() {
            self.clusters = older.clusters;
            return Ok(());
        }
        let (mut newer, mut older) = (newer.into_iter().peekable(), older.clusters.into_iter().peekable());
        while let Some(number) =
            newer.peek().into_iter().chain(older.peek()).map(|cluster| cluster.number).min()
        {
            let of = |cluster: Cluster| cluster.states;
            let new = newer.next_if(|cluster| cluster.number == number).map_or_else(Subclusters::default, of);
            let old = older.next_if(|cluster| cluster.number == number).map_or_else(Subclusters::default, of);
            let states = &mut self.cluster(number)?.states;
            states.allocated = new.allocated | (old.allocated & !new.zero);
            states.zero = new.zero | (old.zero & !new.allocated);
        }
        Ok(())
    }

    /// Bytes of the disk that are zeros as far as this says.
    fn zeros(&self) -> u64 {
        self.clusters.iter().map(|cluster| u64::from(cluster.states.zero.count_ones()) * UNIT).sum()
    }

    /// Marks what the layer's tables say.
    fn mark_layer(&mut self, layer: &FrozenLayer, geometry: Geometry) -> Result<()> {
        let span = geometry.l2_span().saturating_mul(TABLES_AT_ONCE);
        let tables_max = layer.identity().len >> geometry.cluster_bits.get();
        let (mut tables, mut last_table) = (0, None);
        let mut at = 0;
        while at < self.size {
            let range = GuestRange::new(GuestOffset::new(at), span.min(self.size - at));
            let mut marked = Ok(());
            layer.entries(range, |at, entry| {
                let table = Some(geometry.l1_index(at));
                tables += u64::from(table != last_table);
                last_table = table;
                if marked.is_ok() {
                    marked = match entry {
                        Ok(entry) => self.mark_entry(geometry, at, entry),
                        Err(entry) => {
                            let kind = ErrorKind::Entry { table: "L2 table", entry };
                            Err(DiskError::from(kind).in_file(layer.path()).into())
                        }
                    };
                }
            })?;
            marked?;
            if tables > tables_max {
                return Err(Error::SharedTables { layer: layer.path().to_owned() });
            }
            at = at.saturating_add(span);
        }
        Ok(())
    }

    fn mark_entry(&mut self, geometry: Geometry, at: GuestOffset, entry: L2Entry) -> Result<()> {
        let whole = GuestRange::new(at, geometry.cluster_bits.size());
        match entry {
            L2Entry::Unallocated => Ok(()),
            L2Entry::Zero { .. } => self.mark(whole, true),
            L2Entry::Data { .. } | L2Entry::Compressed { .. } => self.mark(whole, false),
            L2Entry::Subclusters { states, .. } => states.runs().try_for_each(|(first, count, state)| {
                let unit = geometry.unit().size();
                let run = GuestRange::new(at + u64::from(first) * unit, u64::from(count) * unit);
                match state {
                    SubclusterState::Unallocated => Ok(()),
                    SubclusterState::Allocated => self.mark(run, false),
                    SubclusterState::Zero => self.mark(run, true),
                }
            }),
        }
    }

    /// Marks all of the disk; of zeros only that they are there, if something lies below.
    fn mark_disk(&mut self, disk: &Disk, keep_zeros: bool) -> Result<()> {
        let mut at = GuestOffset::ZERO;
        while at.get() < self.size {
            let extents = disk.extents(GuestRange::new(at, self.size - at.get()), EXTENTS_AT_ONCE)?;
            for extent in &extents {
                let is_zero = extent.kind.reads_zero();
                if !is_zero || keep_zeros {
                    self.mark(extent.range, is_zero)?;
                }
            }
            at = extents.last().expect("a range that is not empty has an extent").range.end();
        }
        Ok(())
    }

    /// Marks a run of zeros or data behind all that was marked; a subcluster that is zeros in part only is stored as data.
    fn mark(&mut self, range: GuestRange, is_zero: bool) -> Result<()> {
        let end = range.end().get().min(self.size);
        let mut at = range.start.get();
        while at < end {
            let number = at >> CLUSTER.get();
            let start = number << CLUSTER.get();
            let stop = end.min(start + CLUSTER.size());
            let touched = bits((at - start) / UNIT, (stop - start).div_ceil(UNIT));
            let zero = if is_zero {
                let last =
                    if stop == self.size { (stop - start).div_ceil(UNIT) } else { (stop - start) / UNIT };
                bits((at - start).div_ceil(UNIT), last)
            } else {
                0
            };
            let states = &mut self.cluster(number)?.states;
            states.allocated |= touched & !zero;
            states.zero = (states.zero | zero) & !states.allocated;
            at = stop;
        }
        Ok(())
    }

    /// The last cluster, which has this number or is made for it.
    fn cluster(&mut self, number: u64) -> Result<&mut Cluster> {
        if self.clusters.last().is_none_or(|last| last.number != number) {
            assert!(self.clusters.last().is_none_or(|last| last.number < number), "marked in order");
            if self.clusters.len() == CLUSTERS_MAX {
                return Err(Error::TooLarge { clusters: CLUSTERS_MAX });
            }
            self.clusters.push(Cluster { number, states: Subclusters::default(), host: 0 });
        }
        Ok(self.clusters.last_mut().expect("made above"))
    }

    /// Gives each guest cluster with data a host cluster: the fullest first, each one of those with the least room that has its places
    /// free, of a few with as much room.
    fn pack(&mut self) {
        let mut order: Vec<usize> =
            (0..self.clusters.len()).filter(|&place| self.clusters[place].states.allocated != 0).collect();
        order.sort_by_key(|&place| Reverse(self.clusters[place].states.allocated.count_ones()));
        // By how many places are free: the host cluster, and its places that are taken.
        let mut open = vec![VecDeque::<(usize, u32)>::new(); Subclusters::COUNT as usize + 1];
        for place in order {
            let wanted = self.clusters[place].states.allocated;
            let fitting = open[wanted.count_ones() as usize..].iter_mut().find_map(|hosts| {
                let fits = |(_, taken): &(usize, u32)| taken & wanted == 0;
                let found = hosts.iter().take(TRIED_MAX).position(fits);
                match found {
                    Some(found) => hosts.remove(found),
                    None => {
                        // Others the next time.
                        hosts.rotate_left(TRIED_MAX.min(hosts.len()));
                        None
                    }
                }
            });
            let (host, taken) = fitting.unwrap_or_else(|| {
                self.counts.push(0);
                (self.counts.len() - 1, 0)
            });
            self.counts[host] += 1;
            self.clusters[place].host = u32::try_from(host).expect("fewer than guest clusters");
            let taken = taken | wanted;
            open[taken.count_zeros() as usize].push_back((host, taken));
        }
    }

    /// Puts all but the host clusters: whole chunks.
    fn write_tables(&self, below: Option<ObjectId>, mut put: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let tables: Vec<&[Cluster]> =
            self.clusters.chunk_by(|one, next| l1_index(one) == l1_index(next)).collect();
        let l1_clusters = (GEOMETRY.l1_entries(self.size) * ENTRY_LEN).div_ceil(CLUSTER.size());
        // With one between tables and data, perhaps.
        let others = 2 + l1_clusters + tables.len() as u64 + self.counts.len() as u64;
        let refcounts = Refcounts::for_clusters(CLUSTER, RefcountOrder::DEFAULT, 1, others);
        let l1 = 1 + refcounts.clusters();
        let l2 = l1 + l1_clusters;
        let tables_end = l2 + tables.len() as u64;
        let data = tables_end.next_multiple_of(CHUNK >> CLUSTER.get());
        let at = |cluster: u64| HostOffset::new(cluster << CLUSTER.get());
        let backing = below.map(|below| NewBacking {
            name: below.layer_name().as_str().into(),
            format: Some("qcow2".to_owned()),
        });
        let options = CreateOptions {
            cluster_bits: CLUSTER,
            subclusters: true,
            backing,
            ..CreateOptions::new(self.size)
        };
        let header = first_cluster(&options, &Places { l1: at(l1), refcounts });
        put(&header.map_err(|error: CreateError| DiskError::from(error))?)?;
        let count = |cluster: u64| match cluster.checked_sub(data) {
            None => u64::from(cluster < tables_end),
            Some(host) => self.counts.get(host as usize).copied().map_or(0, u64::from),
        };
        refcounts.bytes(CLUSTER, count).try_for_each(|cluster| put(&cluster))?;
        let entries = EntryFormat::extended(CLUSTER);
        let mut l1_table = vec![0; (l1_clusters << CLUSTER.get()) as usize];
        for (clusters, number) in tables.iter().zip(l2..) {
            let entry = entries.encode_l1(L1Entry { table: Some(at(number)), copied: true });
            let place = l1_index(&clusters[0]) * ENTRY_LEN as usize;
            l1_table[place..place + ENTRY_LEN as usize].copy_from_slice(&entry.to_be_bytes());
        }
        put(&l1_table)?;
        for clusters in tables {
            let mut table = Vec::with_capacity(CLUSTER.size() as usize);
            for cluster in clusters {
                table.resize(GEOMETRY.l2_index(start(cluster)) * entries.entry_len(), 0);
                let has_data = cluster.states.allocated != 0;
                let host = has_data.then(|| at(data + u64::from(cluster.host)));
                let copied = has_data && self.counts[cluster.host as usize] == 1;
                let entry = L2Entry::of_subclusters(host, copied, cluster.states);
                entries.put_raw(entries.encode_l2(entry), &mut table);
            }
            table.resize(CLUSTER.size() as usize, 0);
            put(&table)?;
        }
        put(&vec![0; ((data - tables_end) << CLUSTER.get()) as usize])
    }

    /// Puts the host clusters.
    fn write_data(&self, disk: &Disk, out: &mut Shipment, orders: &MergeOrders) -> Result<()> {
        let mut stored: Vec<&Cluster> =
            self.clusters.iter().filter(|cluster| cluster.states.allocated != 0).collect();
        stored.sort_by_key(|cluster| cluster.host);
        let batch_of = |cluster: &Cluster| cluster.host as usize / BATCH;
        for batch in stored.chunk_by(|one, next| batch_of(one) == batch_of(next)) {
            if orders.is_given_up.load(Ordering::Relaxed) {
                return Err(Error::GivenUp);
            }
            let begun = Instant::now();
            let first = batch_of(batch[0]) * BATCH;
            let hosts = BATCH.min(self.counts.len() - first);
            let mut bytes = vec![0; hosts << CLUSTER.get()];
            for (guest, place, len) in self.reads(batch, first) {
                disk.read(guest, &[Segment::from_mut(&mut bytes[place..place + len])])?;
            }
            out.put(&bytes)?;
            orders.give_way(begun.elapsed());
        }
        Ok(())
    }

    /// What of the disk goes where in the host clusters from `first` on; neighbours together.
    fn reads(&self, batch: &[&Cluster], first: usize) -> Vec<(GuestOffset, usize, usize)> {
        let mut reads: Vec<(GuestOffset, usize, usize)> = Vec::new();
        for cluster in batch {
            let place = (cluster.host as usize - first) << CLUSTER.get();
            for (run, count, _) in
                cluster.states.runs().filter(|(.., state)| *state == SubclusterState::Allocated)
            {
                let (run, count) = (u64::from(run) * UNIT, u64::from(count) * UNIT);
                let (guest, place) = (start(cluster) + run, place + run as usize);
                let len = count.min(self.size - guest.get()) as usize;
                match reads.last_mut() {
                    Some((at, before, bytes))
                        if (*at + *bytes as u64, *before + *bytes) == (guest, place) =>
                    {
                        *bytes += len;
                    }
                    _ => reads.push((guest, place, len)),
                }
            }
        }
        reads
    }
}

fn start(cluster: &Cluster) -> GuestOffset {
    GuestOffset::new(cluster.number << CLUSTER.get())
}

fn l1_index(cluster: &Cluster) -> usize {
    GEOMETRY.l1_index(start(cluster))
}

/// What is stored of a layer on another one with this data, a bit for each subcluster.
#[cfg(test)]
pub(crate) fn stored_bytes(data: &[u32]) -> u64 {
    let mut plan = Plan::new((data.len() as u64) << CLUSTER.get());
    let mut stored = 0;
    for (number, allocated) in (0..).zip(data).filter(|(_, allocated)| **allocated != 0) {
        let states = Subclusters { allocated: *allocated, ..Subclusters::default() };
        plan.clusters.push(Cluster { number, states, host: plan.counts.len() as u32 });
        plan.counts.push(1);
        stored += u64::from(allocated.count_ones()) * UNIT;
    }
    plan.write_tables(None, |bytes| {
        stored += crate::object::stored_bytes(bytes);
        Ok(())
    })
    .unwrap();
    stored
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len)
    }

    fn states(plan: &Plan) -> Vec<(u64, u32, u32)> {
        let of = |cluster: &Cluster| (cluster.number, cluster.states.allocated, cluster.states.zero);
        plan.clusters.iter().map(of).collect()
    }

    #[test]
    fn zeros_of_a_part_of_a_subcluster_are_stored_as_data() {
        let mut plan = Plan::new((128 << 10) + 6144);
        plan.mark(range(512, 8192), true).unwrap();
        plan.mark(range(124 << 10, 10240), true).unwrap();
        assert_eq!(states(&plan), [(0, 0b101, 1 << 31 | 0b10), (1, 0, 0b11)]);
    }

    #[test]
    fn data_wins_over_zeros() {
        let mut plan = Plan::new(1 << 20);
        plan.mark(range(0, 4096), true).unwrap();
        plan.mark(range(0, 1), false).unwrap();
        plan.mark(range(1, 1 << 20), true).unwrap();
        assert_eq!(states(&plan)[0], (0, 1, u32::MAX - 1));
    }

    #[test]
    fn clusters_that_share_a_host_cluster_have_no_place_in_common() {
        let mut random = SmallRng::seed_from_u64(7);
        let mut plan = Plan::new(64 << 30);
        for number in 0..20_000 {
            let (first, len) = (random.random_range(0..32), random.random_range(1..=32));
            plan.mark(range((number << 17) + first * 4096, len.min(32 - first) * 4096), false).unwrap();
        }
        plan.pack();
        let mut used = vec![(0, 0); plan.counts.len()];
        for cluster in &plan.clusters {
            let (places, count) = &mut used[cluster.host as usize];
            assert_eq!(*places & cluster.states.allocated, 0);
            *places |= cluster.states.allocated;
            *count += 1;
        }
        assert!(used.iter().zip(&plan.counts).all(|((_, count), counted)| count == counted && *count > 0));
        let wants = |place: u32| {
            plan.clusters.iter().filter(|cluster| cluster.states.allocated >> place & 1 == 1).count()
        };
        let least = (0..Subclusters::COUNT).map(wants).max().unwrap();
        assert!(plan.counts.len() <= least * 21 / 20, "{} host clusters, not {least}", plan.counts.len());
    }

    #[test]
    fn random_writes_take_little_more_than_their_bytes() {
        // One block of a cluster, or five; where there are many more, no two clusters fit together.
        for (size, most) in [(50 << 30, 1.12), (1 << 30, 1.15), (256 << 20, 1.25)] {
            let mut random = SmallRng::seed_from_u64(7);
            let mut written: Vec<u64> = (0..10_000).map(|_| random.random_range(0..size / 4096)).collect();
            written.sort_unstable();
            written.dedup();
            let blocks = written.len() as f64;
            let mut plan = Plan::new(size);
            written.into_iter().for_each(|block| plan.mark(range(block * 4096, 4096), false).unwrap());
            plan.pack();
            let times = plan.counts.len() as f64 * 32.0 / blocks;
            assert!(times < most, "{size}: {times} times what was written");
        }
    }
}
