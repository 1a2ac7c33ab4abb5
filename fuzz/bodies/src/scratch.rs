//! A small disk in a file, the same again for each run of a body: a layer of 4 KiB clusters on another one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vmstrata_disk::{CheckOptions, check};
use vmstrata_disk::{CreateOptions, Disk, Format, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_store::Segment;
use vmstrata_types::{ClusterBits, GuestOffset};

/// Bytes of the disk.
pub(crate) const SIZE: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// The directory of this process, and the upper layer as it is before each run.
static HOME: LazyLock<(TempDir, Vec<u8>)> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let dir = dir.expect("a directory for the disk");
    let cluster_bits = ClusterBits::new(12).expect("in range");
    let base = CreateOptions { size: Some(SIZE), cluster_bits, ..CreateOptions::default() };
    create(&dir.path().join("base"), &base).expect("a base");
    fill(&dir.path().join("base"), &[(0, 0x11), (SIZE / 2, 0x12)]);
    let backing = Some(("base".into(), Format::Qcow2));
    create(&dir.path().join("top"), &CreateOptions { size: None, backing, ..base }).expect("a layer on it");
    fill(&dir.path().join("top"), &[(SIZE / 4, 0x21), (SIZE / 2 + 8192, 0x22)]);
    let bytes = std::fs::read(dir.path().join("top")).expect("it was just made");
    (dir, bytes)
});

fn fill(path: &Path, runs: &[(u64, u8)]) {
    let disk = open(path, false);
    for &(at, byte) in runs {
        disk.write(GuestOffset::new(at), &[Segment::from_mut(&mut [byte; 16 << 10])])
            .expect("room for a write");
    }
    disk.close().expect("a disk that can be closed");
}

fn open(path: &Path, read_only: bool) -> Arc<Disk> {
    let options = ResourceOptions { metadata_cache_bytes: 1 << 20, workers: 1, ..ResourceOptions::default() };
    let options = (OpenOptions { read_only, ..OpenOptions::default() }, Resources::new(options));
    Disk::open(path, &options.0, &options.1).expect("our own image")
}

/// Where files of this process may lie.
pub(crate) fn directory() -> &'static Path {
    HOME.0.path()
}

/// The disk, fresh and open. One at a time.
pub(crate) fn disk(read_only: bool) -> Arc<Disk> {
    std::fs::write(path(), &HOME.1).expect("room for the image");
    open(&path(), read_only)
}

fn path() -> PathBuf {
    directory().join("top")
}

/// Closes the disk, and looks whether it is sound. Who served it may take a moment to let go of it.
///
/// # Panics
/// When it is not sound, or someone holds on to it.
pub(crate) fn finish(disk: Arc<Disk>) {
    disk.close().expect("a disk that can be closed");
    let since = Instant::now();
    while Arc::strong_count(&disk) > 1 {
        assert!(since.elapsed() < PATIENCE, "someone holds on to the disk");
        std::thread::sleep(Duration::from_micros(50));
    }
    drop(disk);
    let report = check(&path(), &CheckOptions::default()).expect("an image that can be checked");
    assert!(report.is_clean(), "{report:#?}");
}
