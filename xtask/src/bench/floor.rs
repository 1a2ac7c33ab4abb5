//! What the host alone does, without any format and without any server: the measure for what is left to gain.
//!
//! Plain system calls on files in the page cache. Reading pieces of a chain's files at random shows what it costs the
//! kernel to meet another file each time; copying clusters shows what copy-on-write costs when nothing but the copy is done.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::run::CLUSTER;
use crate::chain::pattern::mix;

const BLOCK: usize = 4096;
/// Reads or writes between two looks at the clock.
const BATCH: u64 = 256;

/// Files that are read at random.
pub(super) struct Files {
    /// Each with the number of blocks in it and those before it.
    files: Vec<(u64, File)>,
    blocks: u64,
}

impl Files {
    /// Opens the files at `paths`.
    ///
    /// # Errors
    /// When one cannot be opened.
    pub(super) fn open(paths: &[PathBuf]) -> Result<Self> {
        let mut files: Vec<(u64, File)> = Vec::new();
        let mut blocks = 0;
        for path in paths {
            let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            blocks += file.metadata()?.len() / BLOCK as u64;
            files.push((blocks, file));
        }
        Ok(Self { files, blocks })
    }

    /// Reads of 4 KiB at random positions of random files (each as likely as it is long), a second, by one thread.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(super) fn read(&self, time: Duration, seed: u64) -> Result<f64> {
        let Self { files, blocks } = self;
        let (mut block, seed) = ([0; BLOCK], mix(seed));
        rate(time, |index| {
            let drawn = mix(seed.wrapping_add(index)) % blocks;
            let number = files.partition_point(|(end, _)| *end <= drawn);
            let first = if number == 0 { 0 } else { files[number - 1].0 };
            files[number].1.read_exact_at(&mut block, (drawn - first) * BLOCK as u64)
        })
    }
}

/// How often a second `one` is done, with numbers from 0 on.
fn rate(time: Duration, mut one: impl FnMut(u64) -> io::Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < time {
        (done..done + BATCH).try_for_each(&mut one)?;
        done += BATCH;
    }
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

/// Clusters a second that one thread for each processor copies from random places of `from` to the end of a new file in
/// `dir`: a read and a write for each.
///
/// # Errors
/// When a file cannot be read or written.
pub(super) fn copy_clusters(from: &Path, dir: &Path, time: Duration) -> Result<f64> {
    let source = File::open(from)?;
    let clusters = source.metadata()?.len() / CLUSTER;
    let target = tempfile::tempfile_in(dir)?;
    let (next, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let copy = || -> Result<()> {
        let mut cluster = vec![0; CLUSTER as usize];
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            source.read_exact_at(&mut cluster, mix(index) % clusters * CLUSTER)?;
            target.write_all_at(&cluster, index * CLUSTER)?;
            if over.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
    };
    let start = Instant::now();
    thread::scope(|scope| -> Result<()> {
        let threads = thread::available_parallelism()?.get();
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(copy)).collect();
        thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        running.into_iter().try_for_each(|thread| thread.join().expect("copying does not panic"))
    })?;
    Ok(next.into_inner() as f64 / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_and_clusters_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("one"), vec![1; 3 * CLUSTER as usize]).unwrap();
        std::fs::write(path("other"), vec![2; BLOCK]).unwrap();
        let files = Files::open(&[path("one"), path("other")]).unwrap();
        assert!(files.read(Duration::from_millis(1), 0).unwrap() > 0.0);
        assert!(Files::open(&[path("none")]).is_err());
        assert!(copy_clusters(&path("one"), dir.path(), Duration::from_millis(1)).unwrap() > 0.0);
    }
}
