//! Reading many clusters of a file in few big reads, from several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use vmstrata_store::on_threads;
use vmstrata_types::HostOffset;

use crate::Phase;
use crate::error::{Error, IoContext as _, Result};
use crate::image::Image;

/// Bytes of one read, where clusters are smaller.
const READ_BYTES: u64 = 1 << 20;
/// More threads than this wait for the memory bus, not for each other.
const WORKERS_MAX: usize = 8;

fn workers(jobs: usize) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    cpus.min(WORKERS_MAX).min(jobs).max(1)
}

/// Calls `work` on as many threads as pay for `jobs` jobs; each call claims job numbers until none is left.
///
/// Returns what the threads return.
///
/// # Errors
/// The first error of any thread; the others stop at their next job.
pub(crate) fn in_parallel<T: Send>(
    jobs: usize,
    work: impl Fn(&mut dyn Iterator<Item = usize>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut claim =
            std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&job| job < jobs));
        let result = work(&mut claim);
        if result.is_err() {
            next.store(jobs, Ordering::Relaxed);
        }
        result
    };
    on_threads(workers(jobs), run).into_iter().collect()
}

/// Reads the clusters that start at `offsets`, sorted and distinct, and calls `visit` with the number and the
/// bytes of each that is not in a hole of the file; what lies past the end of the file reads as zeros.
///
/// Each thread starts from a state of its own; the states are returned.
///
/// # Errors
/// Whatever the store reports, with the offset.
pub(crate) fn for_each_cluster<S: Send>(
    image: &Image<'_>,
    phase: Phase,
    offsets: &[u64],
    state: impl Fn() -> S + Sync,
    visit: impl Fn(&mut S, usize, &[u8]) + Sync,
) -> Result<Vec<S>> {
    let size = image.bits().size();
    let runs = runs(offsets, size);
    let done = Mutex::new(0);
    in_parallel(runs.len(), |claim| {
        let mut state = state();
        let mut buf = Vec::new();
        for run in claim {
            let (first, count) = runs[run];
            let (at, len) = (HostOffset::new(offsets[first]), count as u64 * size);
            if !image.is_hole(at, len).map_err(|error| error.at(at))? {
                buf.resize(len as usize, 0);
                image
                    .store
                    .read_padded(&mut buf, at)
                    .while_trying("read tables")
                    .map_err(|e: Error| e.at(at))?;
                for (number, cluster) in buf.chunks_exact(size as usize).enumerate() {
                    visit(&mut state, first + number, cluster);
                }
            }
            let mut done = done.lock();
            *done += count as u64;
            image.report_progress(phase, *done, offsets.len() as u64);
        }
        Ok(state)
    })
}

/// Splits sorted offsets into runs of contiguous clusters: number of the first, and how many.
fn runs(offsets: &[u64], size: u64) -> Vec<(usize, usize)> {
    let count_max = (READ_BYTES / size).max(1) as usize;
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (number, &offset) in offsets.iter().enumerate() {
        match runs.last_mut() {
            Some((_, count)) if *count < count_max && offsets[number - 1] + size == offset => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn neighbours_share_a_read_up_to_its_size() {
        let offsets = [0x1_0000, 0x2_0000, 0x4_0000, 0x5_0200, 0x6_0200];
        assert_eq!(runs(&offsets, 0x1_0000), [(0, 2), (2, 1), (3, 2)]);
        let long: Vec<u64> = (0..40).map(|n| n << 16).collect();
        assert_eq!(runs(&long, 0x1_0000), [(0, 16), (16, 16), (32, 8)]);
        assert_eq!(runs(&[0, 2 << 20], 2 << 20), [(0, 1), (1, 1)]);
    }

    #[test]
    fn every_job_is_done_once_and_an_error_ends_the_rest() {
        let done = in_parallel(1000, |claim| Ok(claim.count())).unwrap();
        assert_eq!(done.iter().sum::<usize>(), 1000);
        let failed = in_parallel(1_000_000, |claim| match claim.next() {
            Some(_) => Err::<(), _>(Error::from(ErrorKind::Full { what: "the test" })),
            None => Ok(()),
        });
        assert!(failed.is_err());
    }
}
