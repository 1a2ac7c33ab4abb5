//! Completing partial clusters ([`super::partial`]): what is missing of them is copied up.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_qcow2::RawEntry;
use vmstrata_store::on_threads;
use vmstrata_types::{GuestOffset, HostOffset};

use super::with_scratch;
use crate::active::{Active, Change, EntryGuard};
use crate::error::{Error, IoContext as _, Result};
use crate::layers::{Layers, Top};

/// Clusters from a store that takes longer for one of them are waited for by several threads.
const SLOW: Duration = Duration::from_millis(1);
const THREADS: usize = 8;

/// Why a cluster could not be completed. Nothing is lost, and it can be tried again.
#[derive(Debug)]
pub(crate) enum Incomplete {
    /// What lies below it, here, cannot be read: others may be completed nevertheless.
    Below(GuestOffset, Error),
    /// The active layer's tables cannot be read, or its file not be written.
    Own(Error),
}

impl From<Error> for Incomplete {
    fn from(error: Error) -> Self {
        Self::Own(error)
    }
}

impl From<Incomplete> for Error {
    fn from(why: Incomplete) -> Self {
        let (Incomplete::Below(_, error) | Incomplete::Own(error)) = why;
        error
    }
}

/// Completes a cluster, on the thread that calls it.
type Complete<'a> = dyn Fn(u64) -> Result<(), Incomplete> + Sync + 'a;

impl Layers {
    /// Copies up what is missing of a cluster, if anything is, and returns its raw entry.
    ///
    /// # Errors
    /// What lies below cannot be read, or the active layer's file not be written.
    pub(crate) fn complete_entry(
        &self,
        active: &Active,
        cluster: u64,
        guard: &EntryGuard<'_>,
    ) -> Result<RawEntry, Incomplete> {
        let raw = active.entry_locked(cluster, guard)?;
        let Some(partial) = active.partial(raw) else { return Ok(raw) };
        let start = GuestOffset::new(cluster << active.tables.geometry.cluster_bits.get());
        partial.missing().try_for_each(|run| {
            self.copy_below(active, start + run.start, partial.host + run.start, run.len)
        })?;
        let new = partial.complete();
        let change = Change { cluster, old: raw, new };
        active.publish(&[change], &[], guard).map_err(|error| error.in_file(&active.path))?;
        Ok(new)
    }

    /// Writes what lies below `len` bytes at `at` to the active layer's file.
    ///
    /// # Errors
    /// As [`Layers::complete_entry`].
    pub(crate) fn copy_below(
        &self,
        active: &Active,
        at: GuestOffset,
        host: HostOffset,
        len: u64,
    ) -> Result<(), Incomplete> {
        with_scratch(len as usize, |bytes| {
            self.copy_up(active, RawEntry::EMPTY, at, bytes).map_err(|error| Incomplete::Below(at, error))?;
            let written = active.store.write_all(bytes, host).while_trying("write");
            Ok(written.map_err(|error| error.at(host).in_file(&active.path))?)
        })
    }

    /// Completes one cluster.
    ///
    /// # Errors
    /// As [`Layers::complete_entry`].
    pub(crate) fn complete_one(&self, cluster: u64) -> Result<(), Incomplete> {
        let Top::Qcow2(active) = &self.top else { return Ok(()) };
        self.complete_entry(active, cluster, &active.lock_cluster(cluster)?).map(drop)
    }

    /// Completes all clusters that were partial before the call, as far as what lies below them can be read.
    ///
    /// # Errors
    /// As [`Layers::complete_entry`], for one of those that are still partial.
    pub(crate) fn complete_all(&self) -> Result<(), Incomplete> {
        self.complete_each(&|cluster| self.complete_one(cluster))
    }

    /// As [`Layers::complete_all`], by `complete`.
    pub(crate) fn complete_each(&self, complete: &Complete<'_>) -> Result<(), Incomplete> {
        let Top::Qcow2(active) = &self.top else { return Ok(()) };
        let clusters = active.changes.partials();
        let (completed, left) = complete_in_turn(&clusters, complete, SLOW);
        let completed = worse(completed, complete_by_threads(left, complete));
        active.partials_are_stuck(completed.as_ref().err());
        completed
    }
}

impl Active {
    /// Records why there are clusters that cannot be completed, if there are any.
    pub(crate) fn partials_are_stuck(&self, why: Option<&Incomplete>) {
        let is_news = self.changes.partials_are_stuck(why.is_some());
        match why {
            Some(Incomplete::Below(guest, error)) if is_news => {
                tracing::warn!(disk = %self.path.display(), %guest, %error, "the rest of a cluster that the guest wrote in part cannot be read: no flush or snapshot succeeds until the layer below is mended, or the guest writes or discards all of the cluster");
            }
            Some(Incomplete::Own(error)) if is_news => {
                tracing::warn!(disk = %self.path.display(), %error, "cannot copy up what first writes left");
            }
            _ => {}
        }
    }
}

/// Goes from cluster to cluster until one takes longer than `patience`, or there is no use in going on; returns those that are
/// left then.
fn complete_in_turn<'a>(
    clusters: &'a [u64],
    complete: &Complete<'_>,
    patience: Duration,
) -> (Result<(), Incomplete>, &'a [u64]) {
    let mut completed = Ok(());
    for (done, &cluster) in clusters.iter().enumerate() {
        let began = Instant::now();
        completed = worse(completed, complete(cluster));
        if let Err(Incomplete::Own(_)) = completed {
            return (completed, &[]);
        }
        if began.elapsed() > patience {
            return (completed, &clusters[done + 1..]);
        }
    }
    (completed, &[])
}

fn complete_by_threads(clusters: &[u64], complete: &Complete<'_>) -> Result<(), Incomplete> {
    if clusters.is_empty() {
        return Ok(());
    }
    let share = clusters.len().div_ceil(THREADS);
    let shares = Mutex::new(clusters.chunks(share));
    let run = || {
        let shares = std::iter::from_fn(|| shares.lock().next());
        shares.map(|share| complete_in_turn(share, complete, Duration::MAX).0).fold(Ok(()), worse)
    };
    on_threads(THREADS, run).into_iter().fold(Ok(()), worse)
}

/// The error to report of two clusters: the first error, but one of the active layer itself before any of those below.
fn worse(first: Result<(), Incomplete>, second: Result<(), Incomplete>) -> Result<(), Incomplete> {
    match (first, second) {
        (Ok(()), second) | (_, second @ Err(Incomplete::Own(_))) => second,
        (first, _) => first,
    }
}
