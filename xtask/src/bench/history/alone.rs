//! How steady the machine is: the guest's writes as a loop of `pwrite`, without a server and without a snapshot.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{BLOCK, CLUSTER};
use crate::chain::pattern::mix;

/// Writes between two glances at the clock.
const WRITES: u64 = 256;

/// Writes in a second over those in the one before, `changes` times: 4 KiB at random positions of a file of `span` bytes in
/// `dir` that the page cache holds in pieces of a cluster.
///
/// # Errors
/// A file that cannot be made or written.
pub(super) fn measure(dir: &Path, span: u64, second: Duration, changes: usize) -> io::Result<Vec<f64>> {
    let file = tempfile::tempfile_in(dir)?;
    let cluster = vec![1; CLUSTER as usize];
    for at in (0..span).step_by(cluster.len()) {
        file.write_all_at(&cluster, at)?;
    }
    let rates = (0..=changes as u64).map(|number| writes_in(&file, span, second, number));
    let rates = rates.collect::<io::Result<Vec<u64>>>()?;
    Ok(rates.windows(2).map(|pair| pair[1] as f64 / pair[0] as f64).collect())
}

fn writes_in(file: &File, span: u64, second: Duration, seed: u64) -> io::Result<u64> {
    let block = [2; BLOCK];
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < second {
        for number in done..done + WRITES {
            file.write_all_at(&block, mix(seed << 32 | number) % (span / BLOCK as u64) * BLOCK as u64)?;
        }
        done += WRITES;
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_is_compared_with_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let changes = measure(dir.path(), 1 << 20, Duration::from_millis(5), 3).unwrap();
        assert_eq!(changes.len(), 3);
        assert!(changes.iter().all(|change| change.is_finite() && *change > 0.0), "{changes:?}");
    }
}
