//! First writes to several clusters at once.
//!
//! A small write to a cluster that the active layer does not own copies the rest of the cluster up. When many such writes
//! wait, one thread takes a few of them: their clusters are allocated next to each other, filled from below, and go to
//! the file in one write. The file system locks a file for each write and finds its pages for each write; together the
//! writes pay for that once, and threads do not queue for the same file's lock.
//!
//! Nothing is decided here that [`Disk::write`] does not decide: a write that is not plainly of this kind, or meets any
//! trouble, is left to it, so that an error is found and said in one place.
//!
//! Lock order: the pages' locks in order of their numbers; then as everywhere.

use smallvec::SmallVec;
use vmstrata_qcow2::L2Entry;
use vmstrata_qcow2::entry::COPIED;
use vmstrata_store::{Segment, copy_to_slice};
use vmstrata_types::{GuestOffset, HostOffset};

use super::allocate::RUN_BYTES;
use super::with_scratch;
use crate::active::{Active, Change, PageGuards};
use crate::alloc::Allocated;
use crate::changes::Freed;
use crate::disk::Disk;
use crate::epoch::thread_shard;
use crate::error::{Error, Result};
use crate::layers::{Layers, Top};
use crate::request::{Op, Request};

/// Most requests carried out together.
pub(crate) const TOGETHER_MAX: usize = 8;
/// Requests of more bytes are better off alone.
const SMALL_BYTES: u64 = 32 << 10;

/// A write to a part of one cluster that is not there yet.
struct First<'a> {
    /// Which of the requests it is.
    number: usize,
    at: GuestOffset,
    len: usize,
    segments: &'a [Segment<'static>],
    cluster: u64,
    /// The cluster's entry before.
    old: u64,
    /// The rest of the cluster is zeros, and so is its new place: only the request's bytes need writing.
    sparse: bool,
}

type Firsts<'a> = SmallVec<[First<'a>; TOGETHER_MAX]>;
/// A result for each request, `None` for those that were not carried out.
type Results = SmallVec<[Option<Result<()>>; TOGETHER_MAX]>;

/// Whether a request may be one of several that are carried out together.
pub(crate) fn is_small_write(request: &Request) -> bool {
    request.op == Op::Write { fua: false } && (1..=SMALL_BYTES).contains(&request.range.len)
}

impl Disk {
    /// Carries out each of `requests` as [`Disk::run`] does, in any order: first writes of less than a cluster together.
    pub fn run_together(&self, requests: &[&Request]) -> Vec<Result<()>> {
        let mut results: Results = requests.iter().map(|_| None).collect();
        if requests.len() > 1 {
            self.write_first(requests, &mut results);
        }
        let alone = |(result, request): (Option<Result<()>>, &&Request)| match result {
            Some(Err(error)) if error.is_change() => self.run(request),
            Some(result) => result,
            None => self.run(request),
        };
        results.into_iter().zip(requests).map(alone).collect()
    }

    /// Carries out those of `requests` that are first writes.
    fn write_first(&self, requests: &[&Request], results: &mut Results) {
        let _guard = self.epochs.guard(thread_shard());
        let _inside = self.write_gate.enter();
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return };
        let size = active.tables.geometry.cluster_bits.size();
        let most = (RUN_BYTES / size).min(requests.len() as u64) as usize;
        let mut firsts: Firsts<'_> = requests
            .iter()
            .enumerate()
            .filter(|(_, request)| is_small_write(request) && self.check(request).is_ok())
            .filter_map(|(number, request)| First::of(active, number, request))
            .collect();
        firsts.sort_by_key(|first| first.cluster);
        firsts.dedup_by_key(|first| first.cluster);
        firsts.truncate(most);
        layers.write_firsts(active, firsts, |number, result| {
            results[number] = Some(result.map_err(|error| self.fail_if_lost(error)));
        });
    }
}

impl<'a> First<'a> {
    fn of(active: &Active, number: usize, request: &'a Request) -> Option<Self> {
        let bits = active.tables.geometry.cluster_bits;
        let (at, len) = (request.range.start, request.range.len);
        // A cluster that is covered whole has nothing to copy up.
        let is_part = at.within(bits) + len <= bits.size() && len < bits.size();
        is_part.then(|| Self {
            number,
            at,
            len: len as usize,
            segments: &request.segments,
            cluster: active.cluster_of(at),
            old: 0,
            sparse: false,
        })
    }
}

impl Layers {
    /// Writes what `firsts` say, in order of their clusters; `done` is told of each that was carried out, or failed in a
    /// way that nobody else can say.
    fn write_firsts(&self, active: &Active, mut firsts: Firsts<'_>, mut done: impl FnMut(usize, Result<()>)) {
        let pages = active.lock_pages(firsts.iter().map(|first| first.cluster));
        firsts.retain(|first| first.needs_cluster(self, active, &pages).unwrap_or(false));
        if firsts.len() < 2 {
            return;
        }
        let Ok(mut space) = active.allocate(firsts.len() as u64) else { return };
        firsts.truncate(space.clusters as usize);
        if self.write_clusters(active, &mut firsts, *space).is_err() {
            return;
        }
        let granule = |first: &First<'_>| first.cluster + active.run_limit(first.cluster);
        for run in firsts.chunk_by(|one, other| granule(one) == granule(other)) {
            let result = publish(active, run, space.at, &pages);
            let failed = result.is_err();
            // After an error the others are written again, each alone.
            done(run[0].number, result);
            if failed {
                return;
            }
            space.keep_first(run.len() as u64);
            run[1..].iter().for_each(|first| done(first.number, Ok(())));
        }
    }

    /// Writes the new clusters from `space` on.
    fn write_clusters(&self, active: &Active, firsts: &mut Firsts<'_>, space: Allocated) -> Result<()> {
        let bits = active.tables.geometry.cluster_bits;
        let size = bits.size() as usize;
        if space.zeroed {
            for first in firsts.iter_mut() {
                first.sparse =
                    self.was_zero(active, first.old, GuestOffset::new(first.cluster << bits.get()), size)?;
            }
        }
        // `[write][byte of cluster]`
        with_scratch(firsts.len() * size, |scratch| {
            let mut written = 0;
            for run in firsts.chunk_by(|one, other| !one.sparse && !other.sparse) {
                let host = space.at + (written * size) as u64;
                self.write_run(active, run, host, &mut scratch[..run.len() * size])?;
                written += run.len();
            }
            Ok(())
        })
    }

    /// Writes a run of new clusters: one that is sparse, or any number that are not.
    fn write_run(
        &self,
        active: &Active,
        run: &[First<'_>],
        host: HostOffset,
        scratch: &mut [u8],
    ) -> Result<()> {
        let bits = active.tables.geometry.cluster_bits;
        let in_file = |error| Error::io("write", error).at(host).in_file(&active.path);
        if let [First { sparse: true, at, segments, .. }] = run {
            return active.store.write_segments(segments, host + at.within(bits)).map_err(in_file);
        }
        for (first, cluster) in run.iter().zip(scratch.chunks_exact_mut(bits.size() as usize)) {
            self.copy_up(active, first.old, first.at.align_down(bits), cluster)?;
            let within = first.at.within(bits) as usize;
            copy_to_slice(first.segments, &mut cluster[within..][..first.len]);
        }
        active.store.write_all(scratch, host).map_err(in_file)
    }
}

impl First<'_> {
    /// Looks at the cluster's entry: whether it plainly needs a cluster, and has a table to be entered in.
    fn needs_cluster(&mut self, layers: &Layers, active: &Active, pages: &PageGuards<'_>) -> Result<bool> {
        self.old = active.entry_locked(self.cluster, pages.of(self.cluster))?;
        if self.old == 0 && layers.would_defer(active, self.at, self.len as u64) {
            // Nothing need be copied now.
            return Ok(false);
        }
        let plain = match active.decode(self.old)? {
            L2Entry::Data { copied, .. } => !copied,
            L2Entry::Zero { host, .. } => host.is_none(),
            L2Entry::Unallocated | L2Entry::Compressed { .. } => true,
        };
        if plain {
            active.ensure_table(self.cluster)?;
        }
        Ok(plain)
    }
}

/// Publishes new clusters from `host` on, of one page and one L2 table.
fn publish(active: &Active, run: &[First<'_>], host: HostOffset, pages: &PageGuards<'_>) -> Result<()> {
    let mut changed: SmallVec<[Change; TOGETHER_MAX]> = SmallVec::new();
    let mut freed: SmallVec<[Freed; TOGETHER_MAX]> = SmallVec::new();
    for (number, first) in run.iter().enumerate() {
        let host = host + ((number as u64) << active.tables.geometry.cluster_bits.get());
        changed.push(Change { cluster: first.cluster, old: first.old, new: host.get() | COPIED });
        freed.extend(active.clusters_of(first.old)?);
    }
    active.publish(&changed, &freed, pages.of(run[0].cluster)).map_err(|error| error.in_file(&active.path))
}
