//! `cargo xtask soak`: a guest works on its file system through a thousand snapshots of its disk, while most of them are
//! deleted from the middle and the server is killed at random moments.
//!
//! ```text
//!   guest (ext4, checksummed files) ──vhost-user──► server ◄── snapshots, one after the other, and kill -9   (this thread)
//!                                                      ◄────── deletes, a few at a time, from the middle     (deleter)
//!   afterwards: guest verifies its files ──► every layer: qemu-img check ──► some: journal replay, e2fsck ──► stock boot
//! ```
//!
//! What is drawn (when to kill, what to delete) follows from the seed; when things meet does not, as they run side by side.

mod deletes;
mod disk;
mod progress;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::bench::server::{self, Kind, Server};
use crate::build;
use crate::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, judge, kill_and_serve, spread};
use deletes::Deleter;
use disk::Disk;
use progress::{Progress, Who};

/// The longest that is waited for the guest's last round.
const LAST_ROUND_MAX: Duration = Duration::from_secs(600);
/// The longest that deletes may go on once all snapshots are taken.
const DELETES_MAX: Duration = Duration::from_secs(3600);
/// A kill falls so long after a snapshot was asked for, at most.
const KILL_WITHIN: Duration = Duration::from_millis(150);

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Snapshots to take.
    pub snapshots: usize,
    /// How many of them to delete.
    pub deletes: usize,
    /// From one snapshot's end to the next.
    pub every: Duration,
    /// Snapshots from one kill to the next, on average; 0 never kills.
    pub kill_every: usize,
    /// Of the snapshots that are left, the file system of one in so many is checked.
    pub check_every: usize,
    /// What is drawn.
    pub seed: u64,
    /// Where the disk is made; it stays if something is wrong.
    pub dir: PathBuf,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Snapshots that were taken.
    pub snapshots: usize,
    /// Snapshots that were deleted.
    pub deletes: usize,
    /// Times that the server was killed.
    pub kills: usize,
    /// Deletes that a kill, or a snapshot that came first, cut short.
    pub cut_short: usize,
    /// Rounds that the guest verified.
    pub rounds: usize,
    /// Layers that `qemu-img check` judged.
    pub layers: usize,
    /// Those in which a kill has leaked clusters.
    pub leaks: usize,
    /// Snapshots whose file system recovered.
    pub recovered: usize,
}

/// Runs it.
///
/// # Errors
/// When the guest complains, a byte is wrong, a layer is not sound, or something takes for ever.
pub fn run(options: &Options) -> Result<Outcome> {
    let deletes_max = options.snapshots.saturating_sub(deletes::LEFT_MIN);
    ensure!(
        options.deletes <= deletes_max,
        "of {} snapshots {deletes_max} can be deleted",
        options.snapshots
    );
    server::raise_file_limit()?;
    build::vmstrata()?;
    std::fs::create_dir_all(&options.dir)?;
    let progress = Progress::begin();
    progress.now(Who::Taker, "the guest's disk is made".to_owned());
    let dir = tempfile::Builder::new().prefix("soak-").tempdir_in(&options.dir)?;
    // Whatever is wrong with it can be looked at.
    let dir = dir.keep();
    let guest = Guest::here()?;
    let raw = RootImage { size: 256 << 20, files: 4, file_size: 2 << 20 }.make(&guest, &dir)?;
    let top = spread(&raw, &dir.join("chain"), 3)?;
    let served = server::Disk { path: top.clone(), writable: true, backing: None };
    let mut server = Server::start(Kind::Vmstrata, &served)?;
    server.wait_for_vhost_user()?;
    let disk = Disk { path: top, control: server.control() };
    let mut outcome = Outcome::default();
    let worked = work(options, &guest, &disk, &mut server, &mut outcome, &progress);
    let deleted = worked.with_context(|| format!("{}: the server said:\n{}", dir.display(), server.log()))?;
    server.stop()?;
    let judged = check_names(&disk, options.snapshots, &deleted)
        .and_then(|()| after(options, &guest, &disk, &mut outcome, &progress));
    judged.with_context(|| format!("{}: {outcome:?}", dir.display()))?;
    std::fs::remove_dir_all(&dir)?;
    Ok(outcome)
}

/// The guest's life, from power on to power off.
fn work(
    options: &Options,
    guest: &Guest,
    disk: &Disk,
    server: &mut Server,
    outcome: &mut Outcome,
    progress: &Progress,
) -> Result<Vec<String>> {
    progress.now(Who::Taker, "the guest boots".to_owned());
    let mut vm = Vm::boot(guest, &Attach::VhostUser(server.vhost_user()), Task::Soak)?;
    vm.wait_for(UP, BOOT_MAX)?;
    let deleter = Deleter::start(disk.clone(), options.deletes, options.seed, progress.clone());
    let mut random = SmallRng::seed_from_u64(options.seed);
    while outcome.snapshots < options.snapshots {
        let done = vm.saw("guest: done", options.every)?;
        ensure!(!done, "the guest ended by itself");
        let (taken, all) = (outcome.snapshots, options.snapshots);
        progress.now(Who::Taker, format!("{taken} of {all} snapshots, {} kills", outcome.kills));
        take_one(options, disk, (server, &mut vm), outcome, &mut random)?;
        deleter.check()?;
    }
    progress.now(Who::Taker, format!("all {} snapshots, {} kills", outcome.snapshots, outcome.kills));
    let start = Instant::now();
    while deleter.done() < options.deletes {
        ensure!(start.elapsed() < DELETES_MAX, "only {} deletes", deleter.done());
        ensure!(!vm.saw("guest: done", Duration::from_millis(500))?, "the guest ended by itself");
        deleter.check()?;
    }
    let deleted = deleter.end()?;
    (outcome.deletes, outcome.cut_short) = (deleted.names.len(), deleted.cut_short);
    progress.now(Who::Taker, "the guest verifies its files".to_owned());
    vm.say("stop")?;
    vm.wait_for("guest: done", LAST_ROUND_MAX)?;
    vm.wait_for_end(BOOT_MAX)?;
    outcome.rounds = vm.console().lines().filter(|line| line.starts_with("guest: round")).count();
    Ok(deleted.names)
}

fn name_of(number: usize) -> String {
    format!("s{number:05}")
}

/// Makes sure that the snapshots that are left are those that were taken and not deleted: no other was.
fn check_names(disk: &Disk, taken: usize, deleted: &[String]) -> Result<()> {
    let mut expected: BTreeSet<String> = (0..taken).map(name_of).collect();
    deleted.iter().for_each(|name| _ = expected.remove(name));
    let found: BTreeSet<String> = disk.names()?.into_iter().collect();
    let lost: Vec<&String> = expected.difference(&found).collect();
    let left: Vec<&String> = found.difference(&expected).collect();
    ensure!(lost.is_empty() && left.is_empty(), "lost: {lost:?}; there still: {left:?}");
    Ok(())
}

/// Takes the next snapshot, or kills the server meanwhile.
fn take_one(
    options: &Options,
    disk: &Disk,
    (server, vm): (&mut Server, &mut Vm),
    outcome: &mut Outcome,
    random: &mut SmallRng,
) -> Result<()> {
    let name = name_of(outcome.snapshots);
    if options.kill_every > 0 && random.random_range(0..options.kill_every) == 0 {
        let within = random.random_range(Duration::ZERO..KILL_WITHIN);
        outcome.snapshots += usize::from(killed(disk, (server, vm), &name, within)?);
        outcome.kills += 1;
    } else {
        disk.take(&name)?;
        outcome.snapshots += 1;
    }
    Ok(())
}

/// Kills the server while it takes a snapshot, and starts it again; returns whether the snapshot is there.
fn killed(disk: &Disk, (server, vm): (&mut Server, &mut Vm), name: &str, within: Duration) -> Result<bool> {
    let mut asked = disk.ask(&["create", "--name", name]).spawn()?;
    sleep(within);
    ensure!(!kill_and_serve(server, vm)?, "the guest ended by itself");
    asked.wait()?;
    Ok(disk.names()?.iter().any(|known| known == name))
}

/// Judges every file that is left.
fn after(
    options: &Options,
    guest: &Guest,
    disk: &Disk,
    outcome: &mut Outcome,
    progress: &Progress,
) -> Result<()> {
    let layers = disk.layers()?;
    for (number, layer) in layers.iter().enumerate() {
        progress.now(Who::Taker, format!("{number} of {} layers are checked", layers.len()));
        outcome.leaks += usize::from(judge::leaks(layer)?);
    }
    outcome.layers = layers.len();
    let dir = disk.path.parent().context("a directory")?;
    // The newest first: the disk itself, which the guest has left in order.
    for layer in layers.iter().step_by(options.check_every.max(1)) {
        progress.now(Who::Taker, format!("{} file systems are checked", outcome.recovered));
        judge::recovers(layer, dir)?;
        outcome.recovered += 1;
    }
    progress.now(Who::Taker, "the guest verifies its files on stock QEMU".to_owned());
    let mut stock = Vm::boot(guest, &Attach::Qcow2(disk.path.clone()), Task::Verify)?;
    stock.wait_for_end(BOOT_MAX).map(drop)
}
