//! A guest at work whose memory and disk can be taken, killed, and started again from what was taken.
//!
//! Its disk comes over NBD: what a vhost-user server writes into its memory, QEMU's live mode does not see.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::super::machine::settle;
use super::super::qmp::Qmp;
use super::{COPIES, Options};
use crate::guest::{Export, Guest, Hardware, RootImage, ServedGuest, Task, spread};

/// How long the work may take until the guest is ready, under software emulation on a busy machine.
const READY_MAX: Duration = Duration::from_secs(900);
/// Longest that a restore takes.
const RESTORE_MAX: Duration = Duration::from_secs(300);
/// Layers of the guest's disk.
const LAYERS: u32 = 4;

/// The guest, and what belongs to it.
pub(super) struct Stage {
    pub(super) guest: ServedGuest,
    /// Disk and vaults.
    dir: TempDir,
    /// The memory, and sockets.
    shm: TempDir,
}

impl Stage {
    /// Starts a guest and waits until it is ready.
    pub(super) fn start(guest: &Guest, work: &str, options: &Options) -> Result<Self> {
        let work = super::WORKS.iter().find(|known| **known == work).context("no such work")?;
        Self::boot(guest, Task::Work(work), options.mib, &options.dir)
    }

    /// Starts a guest with so much memory.
    pub(super) fn boot(guest: &Guest, task: Task, mib: u32, dir: &Path) -> Result<Self> {
        let shm = tempfile::tempdir_in("/dev/shm")?;
        // Room for what work writes, which is no more than fits its memory.
        let size = (u64::from(mib) + 1024) << 20;
        let image = RootImage { size, files: 1, file_size: 64 }.make(guest, dir)?;
        let dir = tempfile::Builder::new().prefix("memory-").tempdir_in(dir)?;
        let disk = spread(&image, &dir.path().join("chain"), LAYERS)?;
        let own = format!("unix:{},server=on,wait=off", shm.path().join("qmp").display());
        let memory = Some(shm.path().join("memory"));
        let hardware = Hardware { memory, mib, arguments: vec!["-qmp".into(), own], ..Hardware::default() };
        let taken = shm.path().join("taken");
        let mut guest = ServedGuest::start(guest, (disk, Export::Nbd), task, &hardware, taken)?;
        guest.vm.wait_for("guest: ready", READY_MAX)?;
        Ok(Self { guest, dir, shm })
    }

    /// The file that is the guest's memory.
    pub(super) fn memory(&self) -> PathBuf {
        self.shm.path().join("memory")
    }

    /// Where large files go.
    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A monitor that vmstrata does not use.
    pub(super) fn monitor(&self) -> Result<Qmp> {
        Qmp::connect(&self.shm.path().join("qmp"))
    }

    /// The repositories of a vault.
    pub(super) fn vault(&self, name: &str) -> Vec<PathBuf> {
        (0..COPIES).map(|copy| self.dir().join(format!("vault-{name}-{copy}"))).collect()
    }

    /// `vmstrata vm WORDS --vault ...`
    pub(super) fn vm_command(&self, words: &[&str], vault: &str) -> Result<Command> {
        self.guest.vm_command(words, &self.vault(vault))
    }

    /// The same with vmstrata's monitor.
    pub(super) fn vm_monitored(&self, words: &[&str], vault: &str) -> Result<Command> {
        self.guest.vm_monitored(words, &self.vault(vault))
    }

    /// Kills the guest, and starts it from the snapshot `name`, on its disk as it was at `state`; how long that took.
    pub(super) fn restore(
        &mut self,
        name: &str,
        state: &str,
        vault: &str,
        flags: &[&str],
    ) -> Result<Duration> {
        let repositories = self.vault(vault);
        // What is left of the guest, a kernel that gives its memory back among it, is no part of what is measured.
        self.guest.end()?;
        settle();
        self.guest.restore_on(state, &format!("guest@{name}"), &repositories, flags)?;
        self.guest.vm.wait_for(" restored ", RESTORE_MAX)
    }
}
