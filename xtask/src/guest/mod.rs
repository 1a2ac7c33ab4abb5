//! A small Linux that boots in stock QEMU in seconds, without KVM.
//!
//! ```text
//!   packages (apt-get download, dpkg-deb -x; cached) ──► kernel + initramfs ──┐
//!        └──► root: Debian's bash and coreutils, init script, files ──► ext4 ──► Vm ──► console lines
//! ```
//!
//! The guest's init obeys `task=` on the kernel command line and reports on the serial console in lines that
//! start with `guest:`. Everything fetched or made stays below `target/guest`, and is made again when missing.

mod bare;
pub mod census;
pub mod cpio;
pub mod flushes;
pub mod image;
pub mod judge;
pub mod modules;
pub mod packages;
pub mod rocksdb;
mod served;
pub mod suites;
pub mod swap;
pub mod system;
pub mod trio;
pub mod vm;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

pub use image::RootImage;
pub use served::{Export, ServedGuest, kill_and_serve, must, serve};
pub use vm::{Attach, Hardware, Task, Vm};

use crate::bench::server::{Disk, Kind, Server};
use crate::chain::{self, Base, Manifest, Plan, Spec};

/// Longest a boot may take under software emulation on a busy machine.
pub const BOOT_MAX: Duration = Duration::from_secs(180);
/// The line that init prints first.
pub const UP: &str = "guest: up";

/// Kernel, initramfs and userland, ready to boot.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initramfs that finds and mounts the disk.
    pub initramfs: PathBuf,
    /// The directory tree that root images are made of.
    pub root: PathBuf,
}

/// In the order of their dependencies, below `kernel/drivers`; ext4 is built into Debian's cloud kernel.
const MODULES: [&str; 7] = [
    "virtio/virtio_ring.ko",
    "virtio/virtio.ko",
    "virtio/virtio_pci_modern_dev.ko",
    "virtio/virtio_pci_legacy_dev.ko",
    "virtio/virtio_pci.ko",
    "block/virtio_blk.ko",
    "char/virtio_console.ko",
];
const INITRAMFS_INIT: &str = include_str!("initramfs-init.sh");
const ROOT_INIT: &str = include_str!("root-init.sh");
const WORKS_INIT: &str = include_str!("works-init.sh");

impl Guest {
    /// Fetches and builds what is missing below `target` (the repository's `target` directory).
    ///
    /// # Errors
    /// When packages cannot be fetched, or a tool is missing.
    pub fn prepare(target: &Path) -> Result<Self> {
        Self::with_root(target, packages::userland, ROOT_INIT)
    }

    /// As [`Guest::here`], with a userland for [`Task::Work`].
    ///
    /// # Errors
    /// As [`Guest::prepare`].
    pub fn for_work() -> Result<Self> {
        Self::with_root(&target()?, packages::workshop, WORKS_INIT)
    }

    fn with_root(target: &Path, userland: impl Fn(&Path) -> Result<PathBuf>, init: &str) -> Result<Self> {
        let dir = target.join("guest");
        let lock = packages::lock(&dir)?;
        let kernel = packages::kernel(&dir)?;
        let root = userland(&dir)?;
        fs::write(root.join("sbin/init"), init)?;
        make_executable(&root.join("sbin/init"))?;
        let initramfs = dir.join("initramfs.cpio");
        fs::write(&initramfs, initramfs_bytes(&kernel, &packages::busybox(&dir)?)?)?;
        drop(lock);
        Ok(Self { kernel: kernel.image, initramfs, root })
    }

    /// A guest made once below the `target` directory this program was built in.
    ///
    /// # Errors
    /// As [`Guest::prepare`].
    pub fn here() -> Result<Self> {
        Self::prepare(&target()?)
    }
}

/// The `target` directory this program was built in.
pub(crate) fn target() -> Result<PathBuf> {
    let vmstrata = crate::bench::server::vmstrata();
    let target = vmstrata.ancestors().nth(2).context("this program lies outside a target directory")?;
    Ok(target.to_owned())
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

fn initramfs_bytes(kernel: &packages::Kernel, busybox: &Path) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    for dir in ["bin", "dev", "proc", "root", "modules"] {
        archive.directory(dir);
    }
    archive.file("init", 0o755, INITRAMFS_INIT.as_bytes());
    archive.file("bin/busybox", 0o755, &fs::read(busybox)?);
    for (index, module) in MODULES.iter().enumerate() {
        if let Some(bytes) = packages::module(kernel, module)? {
            archive.file(&format!("modules/{index}.ko"), 0o644, &bytes);
        }
    }
    Ok(archive.finish())
}

/// Guest disks for boots: the same root image spread over each number of layers. Returns `(layers, top)`.
///
/// # Errors
/// When the guest or a chain cannot be made.
pub fn disks(dir: &Path, lengths: &[u32]) -> Result<Vec<(u32, PathBuf)>> {
    let guest = Guest::here()?;
    let raw = RootImage { size: 1 << 30, files: 24, file_size: 8 << 20 }.make(&guest, dir)?;
    let disk = |&layers: &u32| Ok((layers, spread(&raw, &dir.join(format!("guest-{layers}")), layers)?));
    lengths.iter().map(disk).collect()
}

/// Spreads a raw image over `layers` qcow2 layers in `dir`, unless that is done already; returns the newest.
///
/// # Errors
/// When the chain cannot be made.
pub fn spread(raw: &Path, dir: &Path, layers: u32) -> Result<PathBuf> {
    let plan = Plan {
        layers,
        size: raw.metadata()?.len(),
        cluster_size: 64 << 10,
        fill: 1.0,
        overlap: 0.2,
        compress: 0.0,
        seed: 500,
    };
    let spec = Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: Some(raw.to_owned()) };
    let newer = |manifest: &Manifest| -> Result<bool> {
        let made = dir.join(chain::manifest::FILE_NAME).metadata()?.modified()?;
        Ok(manifest.matches(&spec) && made >= raw.metadata()?.modified()?)
    };
    match Manifest::load(dir) {
        Ok(manifest) if newer(&manifest)? => Ok(manifest.top(dir)),
        _ => Ok(chain::generate(dir, &spec)?.top(dir)),
    }
}

/// Boots a read-only disk and returns the time from nothing running to init's first line.
///
/// For [`Kind::Qemu`] the guest's QEMU opens the chain itself; for vmstrata the server is started within the
/// time.
///
/// # Errors
/// When the server or the guest fails.
pub fn boot_through(kind: Kind, disk: &Path) -> Result<Duration> {
    let guest = Guest::here()?;
    let start = Instant::now();
    let (attach, server) = match kind {
        Kind::Qemu => (Attach::Qcow2(disk.to_owned()), None),
        _ => {
            let mut server =
                Server::start(kind, &Disk { path: disk.to_owned(), writable: false, backing: None })?;
            server.wait_for_vhost_user()?;
            (Attach::VhostUser(server.vhost_user()), Some(server))
        }
    };
    let mut vm = Vm::boot(&guest, &attach, Task::Boot)?;
    vm.wait_for(UP, BOOT_MAX)?;
    let up = start.elapsed();
    vm.wait_for_end(BOOT_MAX)?;
    server.map_or(Ok(()), Server::stop)?;
    Ok(up)
}
