//! A guest with three file systems on one disk, whose files it has in memory and knows the contents of.
//!
//! ```text
//!   disk: partition table ─ ext4 with blocks of 4 KiB ─ ext4 of 1 KiB ─ xfs
//! ```

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::bare::{self, SYSTEMS};
use super::packages::{self, Kernel};
use super::{Guest, suites, target};

const INIT: &str = include_str!("trio-init.sh");
/// Files that it reads, and bytes of each.
const FILES: u64 = 6;
const FILE_BYTES: u64 = 1_300_000;
const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;
/// Of a partition that holds a Linux file system.
const LINUX: u8 = 0x83;

/// The kernel and an initramfs in `dir` that is the whole system.
///
/// # Errors
/// When packages cannot be fetched.
pub fn guest(dir: &Path, kernel: &Kernel) -> Result<Guest> {
    let cache = target()?.join("guest");
    let lock = packages::lock(&cache)?;
    let init = bare::initramfs(kernel, &packages::busybox(&cache)?, INIT)?.finish();
    drop(lock);
    let initramfs = dir.join("trio-initramfs");
    fs::write(&initramfs, init)?;
    Ok(Guest { kernel: kernel.image.clone(), initramfs, root: dir.to_owned() })
}

/// The kernels to try it with, see [`suites::kernels`].
///
/// # Errors
/// When packages cannot be fetched.
pub fn kernels() -> Result<Vec<Kernel>> {
    suites::kernels(&target()?.join("guest"))
}

/// The disk, as a raw file in `dir`.
///
/// # Errors
/// When a tool is missing or fails.
pub fn disk(dir: &Path) -> Result<PathBuf> {
    let tree = dir.join("tree");
    fs::create_dir_all(&tree)?;
    for file in 0..FILES {
        let mut out = File::create(tree.join(format!("read-{file}")))?;
        std::io::copy(&mut File::open("/dev/urandom")?.take(FILE_BYTES + 333 * file), &mut out)?;
    }
    let path = dir.join("trio.raw");
    let disk = File::create(&path)?;
    let mut table = [0; SECTOR as usize];
    let mut start = MIB;
    for (index, system) in SYSTEMS.iter().enumerate() {
        let part = dir.join("part");
        system.make(&tree, &part)?;
        copy(&part, &disk, start)?;
        table[446 + 16 * index..][..16].copy_from_slice(&entry(start / SECTOR, system.size / SECTOR)?);
        start += system.size;
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    disk.set_len(start)?;
    disk.write_all_at(&table, 0)?;
    fs::remove_dir_all(&tree)?;
    fs::remove_file(dir.join("part"))?;
    Ok(path)
}

/// Copies what is not zero.
fn copy(part: &Path, disk: &File, start: u64) -> Result<()> {
    let mut part = File::open(part)?;
    let mut piece = vec![0; MIB as usize];
    for at in (start..start + part.metadata()?.len()).step_by(MIB as usize) {
        part.read_exact(&mut piece)?;
        if piece.iter().any(|byte| *byte != 0) {
            disk.write_all_at(&piece, at)?;
        }
    }
    Ok(())
}

/// A partition in the table of the master boot record; numbers of sectors.
fn entry(start: u64, sectors: u64) -> Result<[u8; 16]> {
    let mut entry = [0; 16];
    entry[4] = LINUX;
    entry[8..12].copy_from_slice(&u32::try_from(start)?.to_le_bytes());
    entry[12..].copy_from_slice(&u32::try_from(sectors)?.to_le_bytes());
    Ok(entry)
}
