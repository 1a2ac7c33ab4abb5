//! A guest whose programs flush often: SQLite, PostgreSQL, and appends on ext4 with its journal inside and on a disk of its own.
//!
//! ```text
//!   packages ──► root, read-only ──────────────────────────────┐
//!   one boot: ext4 with both databases ──► disk of databases ──┤
//!   empty disks: for files, for a journal ─────────────────────┴──► Vm ──► a rate for each
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::vm::FLUSHED;
use super::{Attach, BOOT_MAX, Guest, RootImage, Task, Vm, packages, spread, target};

const INIT: &str = include_str!("flushes-init.sh");
/// Longest that the guest takes, from power-on to its end.
const RUN_MAX: Duration = Duration::from_secs(900);
/// What it says after each batch of transactions.
const ROWS: &str = "guest: 5 rows written";
const BATCH: u32 = 5;
/// Longest that a batch takes.
const BATCH_MAX: Duration = Duration::from_secs(60);
/// What it prints before each rate.
pub const WORKLOADS: [&str; 6] = [
    "SQLite",
    "PostgreSQL",
    "appends, journal inside, data=ordered",
    "appends, journal outside, data=ordered",
    "appends, journal inside, data=journal",
    "appends, journal outside, data=journal",
];

/// How much the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    /// Appends of 4 KiB, each on stable storage.
    pub appends: u32,
    /// Transactions of SQLite.
    pub transactions: u32,
    /// How long PostgreSQL works.
    pub pgbench_s: u32,
}

impl Operations {
    pub(super) fn command_line(self) -> String {
        let Self { appends, transactions, pgbench_s } = self;
        format!("task=flushes rootflags=ro appends={appends} transactions={transactions} seconds={pgbench_s}")
    }
}

/// The guest with its root.
pub struct Flushing {
    guest: Guest,
    root: PathBuf,
}

impl Flushing {
    /// Fetches and builds what is missing; the root's image goes to `dir`.
    ///
    /// # Errors
    /// When packages cannot be fetched, or a tool is missing.
    pub fn prepare(dir: &Path) -> Result<Self> {
        let guest = Guest::with_root(&target()?, packages::databases, INIT)?;
        // PostgreSQL looks its user up, and runs commands by the shell.
        let users = "root:x:0:0::/:/bin/bash\npostgres:x:70:70::/work:/bin/bash\n";
        fs::write(guest.root.join("etc/passwd"), users)?;
        let shell = guest.root.join("usr/bin/sh");
        if shell.symlink_metadata().is_err() {
            symlink("bash", shell)?;
        }
        let image = RootImage { size: 1 << 30, files: 1, file_size: 64 }.make(&guest, dir)?;
        let root = spread(&image, &dir.join("root"), 1)?;
        Ok(Self { guest, root })
    }

    /// Makes databases on the disk that is served at a vhost-user-blk socket.
    ///
    /// # Errors
    /// When the guest fails.
    pub fn make_databases(&self, socket: &Path) -> Result<()> {
        self.run(&[socket], Task::Databases).map(drop)
    }

    /// The rate of each of [`WORKLOADS`], on disks of databases, files, and a journal.
    ///
    /// # Errors
    /// When the guest fails.
    pub fn work(&self, sockets: [&Path; 3], operations: Operations) -> Result<Vec<f64>> {
        let console = self.run(&sockets, Task::Flushes(operations))?;
        WORKLOADS.iter().map(|workload| rate(&console, workload)).collect()
    }

    /// Has a guest make transactions of SQLite on the disk that is served at a vhost-user-blk socket, in a new file system.
    ///
    /// # Errors
    /// When the guest fails.
    pub fn transact(&self, socket: &Path) -> Result<Transacting> {
        let mut vm = self.boot(&[socket], Task::Transactions)?;
        vm.wait_for(ROWS, BOOT_MAX)?;
        Ok(Transacting(vm))
    }

    fn run(&self, sockets: &[&Path], task: Task) -> Result<String> {
        let mut vm = self.boot(sockets, task)?;
        vm.wait_for_end(RUN_MAX)?;
        Ok(vm.console().to_owned())
    }

    fn boot(&self, sockets: &[&Path], task: Task) -> Result<Vm> {
        let mut more = Vec::new();
        for (number, socket) in sockets.iter().enumerate() {
            let path = socket.display();
            more.extend(["-chardev".to_owned(), format!("socket,id=more{number},path={path}")]);
            // Devices are found in the order of their slots: the root's first.
            let device = format!(
                "vhost-user-blk-pci,chardev=more{number},num-queues=1,{FLUSHED},addr={:#x}",
                0x10 + number
            );
            more.extend(["-device".to_owned(), device]);
        }
        Vm::boot_with(&self.guest, &Attach::Qcow2(self.root.clone()), task, &more)
    }
}

/// A guest that makes one transaction after another.
pub struct Transacting(Vm);

impl Transacting {
    /// Transactions a second while the guest `goes_on`, of one batch at least.
    ///
    /// # Errors
    /// When the guest fails, or is silent.
    pub fn rate(&mut self, goes_on: impl Fn() -> bool) -> Result<f64> {
        // What it has said before is passed over, and so is the batch that is being written.
        while self.0.saw(ROWS, Duration::ZERO)? {}
        self.0.wait_for(ROWS, BATCH_MAX)?;
        let (start, mut rows) = (Instant::now(), 0);
        while rows == 0 || goes_on() {
            self.0.wait_for(ROWS, BATCH_MAX)?;
            rows += BATCH;
        }
        Ok(f64::from(rows) / start.elapsed().as_secs_f64())
    }

    /// Has the guest end.
    ///
    /// # Errors
    /// As [`Transacting::rate`].
    pub fn stop(mut self) -> Result<()> {
        self.0.say("stop")?;
        self.0.wait_for_end(RUN_MAX)
    }
}

/// How often a second, from what the guest has said.
fn rate(console: &str, workload: &str) -> Result<f64> {
    let start = format!("guest: {workload}: ");
    let line = console.lines().find_map(|line| line.strip_prefix(&start)).with_context(|| start.clone())?;
    Ok(line.split(' ').next().context("a rate")?.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_from_the_line_of_its_workload() {
        let said = "guest: up\nguest: appends, journal inside, data=ordered: 15234e-2 a second\nguest: SQLite: 7.5 a second\n";
        assert_eq!(rate(said, WORKLOADS[2]).unwrap(), 152.34);
        assert_eq!(rate(said, WORKLOADS[0]).unwrap(), 7.5);
        assert!(rate(said, WORKLOADS[1]).is_err());
    }
}
