//! A guest that benchmarks RocksDB: `db_bench` in an initramfs that is the whole system, a database on the disk.
//!
//! ```text
//!   packages ──► db_bench and its libraries ──► initramfs ──────────────┐
//!                     └──► (on the host) database ──► ext4 ──► disk ──► Vm ──► a rate for each workload
//! ```
//!
//! Debian's package `rocksdb-tools` has `db_bench`; it is fetched as the guest's other packages are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Guest, bare, image, must, packages, target};

const INIT: &str = include_str!("rocksdb-init.sh");
/// For all runs of `db_bench`. Small write buffers: few writes reach files of sorted keys, and are merged. Values are stored as they
/// are: emulated processors decompress slowly.
const FLAGS: &str = "--seed=1\n--value_size=1024\n--write_buffer_size=4194304\n--compression_type=none\n";
/// Bytes of the disk.
const SIZE: u64 = 1 << 30;
/// Workloads in their order.
pub const WORKLOADS: [&str; 3] = ["readrandom", "readwhilewriting", "fillrandom"];

/// How much the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    /// Keys of the database, each with a value of 1 KiB; 400,000 at most.
    pub keys: u32,
    /// Reads of each workload that reads.
    pub reads: u32,
    /// Writes of `fillrandom`, into a new database.
    pub writes: u32,
}

impl Operations {
    pub(super) fn command_line(self) -> String {
        format!("keys={} reads={} writes={}", self.keys, self.reads, self.writes)
    }
}

/// The kernel and the initramfs, which is made in `dir`.
///
/// # Errors
/// When packages cannot be fetched.
pub fn guest(dir: &Path) -> Result<Guest> {
    let cache = target()?.join("guest");
    let lock = packages::lock(&cache)?;
    let (kernel, root) = (packages::kernel(&cache)?, packages::rocksdb(&cache)?);
    let mut archive = bare::initramfs(&kernel, &packages::busybox(&cache)?, INIT)?;
    drop(lock);
    archive.directory("lib");
    archive.file("flags", 0o644, FLAGS.as_bytes());
    archive.file("bin/db_bench", 0o755, &fs::read(program(&root))?);
    archive.file("lib/ld.so", 0o755, &fs::read(loader(&root))?);
    for library in libraries(&root)? {
        let name = library.file_name().and_then(|name| name.to_str()).context("a library's name")?;
        archive.file(&format!("lib/{name}"), 0o644, &fs::read(&library)?);
    }
    let initramfs = dir.join("rocksdb-initramfs");
    fs::write(&initramfs, archive.finish())?;
    Ok(Guest { kernel: kernel.image, initramfs, root })
}

/// The disk as a raw file in `dir`, with a database of `keys` keys in random order of writing, compacted.
///
/// # Errors
/// When a tool is missing or fails.
pub fn disk(guest: &Guest, dir: &Path, keys: u32) -> Result<PathBuf> {
    let tree = tempfile::tempdir_in(dir)?;
    let mut fill = db_bench(&guest.root);
    fill.args(FLAGS.lines()).args(["--benchmarks=filluniquerandom,compact", &format!("--num={keys}")]);
    must(fill.arg(format!("--db={}", tree.path().join("db").display())))?;
    let raw = dir.join("rocksdb.raw");
    image::make_ext4(tree.path(), &raw, SIZE)?;
    Ok(raw)
}

/// Operations a second of `workload`, from what the guest has said. Reads must have found every key.
///
/// # Errors
/// When the guest has not said so.
pub fn rate(console: &str, workload: &str) -> Result<f64> {
    let start = format!("guest: {workload} ");
    let line = console.lines().find(|line| line.starts_with(&start)).with_context(|| start.clone())?;
    if let Some((_, found)) = line.split_once('(') {
        let (found, all) = found.trim_end_matches(" found)").split_once(" of ").context("what was found")?;
        ensure!(found == all, "keys are missing: {line}");
    }
    let (rate, _) = line.split_once(" ops/sec").context("a rate")?;
    Ok(rate.rsplit(' ').next().context("a rate")?.parse()?)
}

fn program(root: &Path) -> PathBuf {
    root.join("usr/bin/db_bench")
}

fn directory(root: &Path) -> PathBuf {
    root.join("usr/lib/x86_64-linux-gnu")
}

fn loader(root: &Path) -> PathBuf {
    directory(root).join("ld-linux-x86-64.so.2")
}

/// `db_bench` with the libraries it was fetched with.
fn db_bench(root: &Path) -> Command {
    let mut command = Command::new(loader(root));
    command.arg("--library-path").arg(directory(root)).arg(program(root));
    command
}

/// The libraries that `db_bench` loads.
fn libraries(root: &Path) -> Result<Vec<PathBuf>> {
    let mut command = Command::new(loader(root));
    command.arg("--library-path").arg(directory(root)).arg("--list").arg(program(root));
    let list = String::from_utf8(must(&mut command)?.stdout)?;
    // `NAME => PATH (ADDRESS)`; the kernel's own has no path.
    let paths = list.lines().filter_map(|line| line.split_once(" => ")?.1.split_once(" ("));
    let paths: Vec<PathBuf> = paths.map(|(path, _)| path.into()).collect();
    let strange = paths.iter().find(|path| !path.starts_with(root));
    ensure!(strange.is_none(), "the packages lack a library: {strange:?}");
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_counts_only_if_every_key_was_found() {
        let line = |found: u32| {
            format!(
                "guest: readrandom   :       7.380 micros/op 135418 ops/sec 0.015 seconds 2000 operations;  \
                 134.3 MB/s ({found} of 2000 found)"
            )
        };
        assert_eq!(rate(&line(2000), "readrandom").unwrap(), 135_418.0);
        assert!(rate(&line(1999), "readrandom").is_err());
        assert!(rate(&line(2000), "fillrandom").is_err());
        let written = "guest: up\nguest: fillrandom   :  8.018 micros/op 122887 ops/sec 0.163 seconds 20000 operations;";
        assert_eq!(rate(written, "fillrandom").unwrap(), 122_887.0);
    }
}
