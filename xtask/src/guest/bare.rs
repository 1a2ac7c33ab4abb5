//! Guests whose initramfs is the whole system: busybox, and file systems of three kinds.

use std::fs::{self, File};
use std::path::Path;

use anyhow::Result;

use super::packages::Kernel;
use super::{cpio, image, modules};

/// What such a guest's init begins with.
const PRELUDE: &str = include_str!("bare-init.sh");
/// What it needs besides what is built in; with what those need.
const MODULES: [&str; 6] = ["virtio_pci", "virtio_blk", "crc32c_intel", "crc32c_generic", "ext4", "xfs"];

/// A kind of file system.
pub(super) struct System {
    /// Where the guest mounts it.
    pub(super) name: &'static str,
    mkfs: &'static [&'static str],
    /// Bytes.
    pub(super) size: u64,
}

/// All kinds; mkfs.xfs refuses less than 300 MiB.
pub(super) const SYSTEMS: [System; 3] = [
    System { name: "ext4", mkfs: &["mkfs.ext4", "-q", "-F", "-b", "4096"], size: 64 << 20 },
    System { name: "ext4-1k", mkfs: &["mkfs.ext4", "-q", "-F", "-b", "1024"], size: 64 << 20 },
    System { name: "xfs", mkfs: &["mkfs.xfs", "-q"], size: 320 << 20 },
];

impl System {
    /// Makes one in a new file; ext4 with what is in `tree`.
    pub(super) fn make(&self, tree: &Path, path: &Path) -> Result<()> {
        File::create(path)?.set_len(self.size)?;
        let (program, arguments) = self.mkfs.split_first().expect("a program");
        let filled = [Path::new("-d"), tree];
        let filled = if *program == "mkfs.ext4" { &filled[..] } else { &[] };
        image::mkfs(program, |mkfs| mkfs.args(arguments).args(filled).arg(path))
    }
}

/// The system, whose init goes on with `init`; the caller may add files.
pub(super) fn initramfs(kernel: &Kernel, busybox: &Path, init: &str) -> Result<cpio::Archive> {
    let mut archive = cpio::Archive::default();
    let places = ["bin", "dev", "proc", "modules", "tmp"];
    places.into_iter().chain(SYSTEMS.iter().map(|system| system.name)).for_each(|dir| archive.directory(dir));
    archive.file("init", 0o755, [PRELUDE, init].concat().as_bytes());
    archive.file("bin/busybox", 0o755, &fs::read(busybox)?);
    for (index, bytes) in modules::with_needed(kernel, &MODULES)?.iter().enumerate() {
        archive.file(&format!("modules/{index:02}.ko"), 0o644, bytes);
    }
    Ok(archive)
}
