//! `vmstrata vm migrate`: a running guest moves to another host, with its tiered disks.
//!
//! ```text
//!   source                          repository                     target
//!   guest runs                      epochs ◄── publish ── follow ─►  disk stands by, QEMU waits
//!   QEMU ── memory in rounds; the rest once the guest is stopped ──────► QEMU: paused, has all memory
//!   hand over ──────────────────►   head N
//!                                   head N + 1 ◄─── take over ─────  disk is the target's        <- decides
//!   QEMU ends, disk is removed                                       guest runs
//! ```
//!
//! Triple-L 2.4.2, Algorithm 1, in another order: it copies the last of the disk between two parts of the memory's copy (`pause-before-switchover`
//! in QEMU). But a source QEMU whose stream breaks lets its guest run again by itself. So the disk goes last: only once both QEMUs have said that
//! the target has all of the memory, and neither runs the guest without a `cont`. From then on no failure of the wire or the source costs the guest.
//!
//! There is no journal but the newest head and the states of the two QEMUs: how it ends is in `migration`.

use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Map, Value, json};
use vmstrata_api::{SnapshotSpec, TakeOver, TierState};
use vmstrata_memory::qmp::{Qmp, QmpError};

use super::disks::ServedDisks;
use super::guard::{Guard, Undo};
use super::migration::{End, LOOK_EVERY, Migrated, Migration, Side, run_state, said, tier_of, wait_until};
use super::snapshot::cancel_on_signals;
use crate::args::VmMigrateArgs;
use crate::audit::{self, What};
use crate::commands::named::argument_for;
use crate::output::{Progress, answer};
use crate::units::short_size;

/// How often the disk is published and followed while memory is copied.
const ROUND: Duration = Duration::from_secs(1);
/// How long the target may take for what was sent, once the source has sent all.
const LOADING_MAX: Duration = Duration::from_secs(60);

/// The result as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Shown {
    guest: String,
    disk: String,
    runs_at: Side,
    #[serde(skip_serializing_if = "Option::is_none")]
    head: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// For how long the guest stood still, by QEMU's clock and ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_ms: Option<f64>,
    /// Of that, by QEMU for memory and devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    qemu_downtime_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// Why the guest does not run at the target; where it goes on, as far as that is known.
pub(super) fn run(args: &VmMigrateArgs) -> Result<ExitCode> {
    let cancel = cancel_on_signals()?;
    if args.recover {
        let migration = Migration::find(args)?;
        let side = migration.end()?;
        return show(args, &migration.shown(side));
    }
    let (migration, mut source, mut target) = Migration::plan(args)?;
    if args.dry_run {
        return answer(args.json, &migration.shown(Side::Source), || {
            format!("{}: can move with {}; nothing has moved\n", migration.guest, migration.disk)
        })
        .map(|()| ExitCode::SUCCESS);
    }
    let uri = args.uri.as_deref().context("--uri says where the target's QEMU listens")?;
    let mut guard = Guard::start(Stdio::null(), Stdio::inherit())?;
    let what = What::of("vm_migrate", [migration.disk.clone()]).object(migration.guest.clone());
    let moved = audit::change(what, |_| {
        guard.set(&[Undo::Migration(migration.clone())])?;
        let moved = migration.carry_out(args, uri, (&mut source, &mut target), &cancel);
        // A monitor serves one client at a time.
        drop((source, target));
        let failure = match moved {
            Ok(shown) => return migration.leave_source().map(|()| shown),
            Err(failure) => failure,
        };
        eprintln!("vmstrata: {failure:#}: finding out which host has the disk");
        match migration.end().with_context(|| format!("after: {failure:#}"))? {
            Side::Target => Ok(migration.shown(Side::Target)),
            Side::Source => Err(failure.context(format!("{} goes on at the source", migration.guest))),
        }
    });
    guard.set(&[])?;
    show(args, &moved?)
}

fn show(args: &VmMigrateArgs, shown: &Shown) -> Result<ExitCode> {
    answer(args.json, shown, || {
        let Shown { guest, disk, .. } = shown;
        match (shown.runs_at, shown.seconds, shown.pause_ms, shown.qemu_downtime_ms) {
            (Side::Target, Some(seconds), Some(pause), Some(qemu)) => format!(
                "{guest}: runs at the target, with {disk}; moved in {seconds:.1} s, the guest stood still for {pause:.0} ms, {qemu} ms of that by QEMU\n"
            ),
            (Side::Target, ..) => format!("{guest}: runs at the target, with {disk}\n"),
            (Side::Source, ..) => format!("{guest}: runs at the source, with {disk}\n"),
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The source and the target.
fn ends(args: &VmMigrateArgs) -> [End; 2] {
    let monitor = super::monitor(&args.guest, args.qmp.as_deref());
    [
        End { control: args.server.control.clone(), monitor },
        End { control: Some(args.to_control.clone()), monitor: args.to_qmp.clone() },
    ]
}

impl Migration {
    /// Of which nothing is known but what the command says.
    fn find(args: &VmMigrateArgs) -> Result<Self> {
        let [source, target] = ends(args);
        let [disk, ..] = &args.disks[..] else {
            bail!("name the disk with --disk: the guest may be gone that would tell");
        };
        let there = target.disk(disk).context("the target's server")?;
        let path = argument_for(&there.disk);
        let target_copy = tier_of(&there)?.owner.clone();
        let (guest, disk) = (args.guest.clone(), disk.clone());
        Ok(Self { guest, disk, path, source, target, target_copy, limits: Map::new() })
    }

    /// Checks whether the guest can move; returns its monitors, too.
    fn plan(args: &VmMigrateArgs) -> Result<(Self, Qmp, Qmp)> {
        let guest = &args.guest;
        let [source, target] = ends(args);
        let mut here = source.connect(guest).context("the source")?;
        let mut there = target.connect(guest).context("the target")?;
        check_machines(&mut here, &mut there)?;

        let served =
            ServedDisks::of_guest(source.client()?, &mut here, &args.disks, SnapshotSpec::default())?;
        let [disk, others @ ..] = served.names() else {
            bail!("no disk of {guest} is served by vmstrata: name it with --disk");
        };
        if args.disks.is_empty() {
            let left = served.others(&mut here)?;
            ensure!(left.is_empty(), "not served by vmstrata, and would stay: {}", left.join(", "));
        }
        let [own, far] = [&source, &target].map(|end| end.disk(disk));
        let (own, far) = (own.context("the source's server")?, far.context("the target's server")?);
        let (tier, standby) = (tier_of(&own).context("the source")?, tier_of(&far).context("the target")?);
        for other in others {
            let is_one = source.disk(other)?.disk.tier.is_some_and(|other| other.local == tier.local);
            ensure!(
                is_one,
                "{disk} and {other} cannot move at one instant: they are not of one group (the key group=NAME)"
            );
        }
        ensure!(tier.state == TierState::Publishing, "{disk} is not published by the source: {}", said(tier));
        ensure!(
            standby.state == TierState::Standby,
            "{disk} does not stand by at the target (the key standby): {}",
            said(standby)
        );
        ensure!(
            own.disk.size_bytes == far.disk.size_bytes,
            "{disk} has another size at the target: remove it there, and add it again"
        );
        let is_used = far.exports.iter().any(|export| export.connections.is_some_and(|count| count > 0));
        ensure!(is_used, "no QEMU is connected to {disk} at the target");
        let migration = Self {
            guest: guest.clone(),
            disk: disk.clone(),
            path: argument_for(&own.disk),
            target_copy: standby.owner.clone(),
            limits: limits_before(args, &mut here)?,
            source,
            target,
        };
        migration.round()?;
        Ok((migration, here, there))
    }

    fn shown(&self, runs_at: Side) -> Shown {
        Shown {
            guest: self.guest.clone(),
            disk: self.disk.clone(),
            runs_at,
            head: None,
            seconds: None,
            pause_ms: None,
            qemu_downtime_ms: None,
            memory_bytes: None,
        }
    }

    /// Publishes the disk at the source, and has the target follow.
    fn round(&self) -> Result<()> {
        let own = self.source.ask(&self.disk, "sync", &()).context("the source cannot publish")?;
        let far = self
            .target
            .ask(&self.disk, "follow", &())
            .context("the target does not see what is published")?;
        // Merges may have made another head meanwhile.
        ensure!(
            far.published_by == own.owner && far.epoch >= own.epoch,
            "the hosts see two repositories: {} has epoch {} of copy {}, {} has epoch {} of copy {}",
            own.repository,
            own.epoch,
            own.owner,
            far.repository,
            far.epoch,
            far.published_by
        );
        Ok(())
    }

    /// Moves the guest.
    fn carry_out(
        &self,
        args: &VmMigrateArgs,
        uri: &str,
        (source, target): (&mut Qmp, &mut Qmp),
        cancel: &AtomicBool,
    ) -> Result<Shown> {
        let begun = Instant::now();
        let progress = Progress::endless(args.json);
        // Before it has all: the guest then stays paused.
        target.tell("stop", json!({}))?;
        match target.tell("migrate-incoming", json!({ "uri": uri })) {
            Err(QmpError::Refused { words, .. }) if words.contains("already been started") => {}
            listens => listens.context("the target")?,
        }
        let limits = limits(args);
        if !limits.is_empty() {
            source.tell("migrate-set-parameters", Value::Object(limits))?;
        }
        source.tell("migrate", json!({ "uri": uri }))?;
        let sent = self.send(source, cancel, &progress)?;
        let completed = Instant::now();
        wait_until(LOADING_MAX, "the target does not load the guest's memory", || {
            let loaded = Migrated::of(target)?;
            let why = loaded.error_desc.unwrap_or_default();
            ensure!(loaded.status != "failed", "the target cannot load the guest: {why}");
            Ok(loaded.status == "completed" && run_state(target)?.status == "paused")
        })?;
        self.target.wait_for_qemu(&self.disk).context("the target")?;
        progress.show(|| "handing the disk over".to_owned());
        let offered = self.source.ask(&self.disk, "hand-over", &())?;
        let head = offered.head.clone();
        self.target.ask(&self.disk, "take-over", &TakeOver { head: Some(head.clone()) })?;
        // Its server may have been started again since.
        self.target.wait_for_qemu(&self.disk).context("the target")?;
        target.tell("cont", json!({}))?;
        let after = completed.elapsed().as_secs_f64() * 1000.0;
        Ok(Shown {
            head: Some(head),
            seconds: Some(begun.elapsed().as_secs_f64()),
            pause_ms: Some(sent.downtime.unwrap_or_default() as f64 + after),
            qemu_downtime_ms: sent.downtime,
            memory_bytes: sent.ram.map(|ram| ram.transferred),
            ..self.shown(Side::Target)
        })
    }

    /// Waits until the source has sent all of its memory; meanwhile epochs are published, so that little is left.
    fn send(&self, source: &mut Qmp, cancel: &AtomicBool, progress: &Progress) -> Result<Migrated> {
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let rounds = scope.spawn(|| {
                while !has_ended.load(Ordering::Acquire) {
                    // The hand-over tells what fails.
                    let _ = self.round();
                    std::thread::park_timeout(ROUND);
                }
            });
            let sent = self.until_sent(source, cancel, progress);
            has_ended.store(true, Ordering::Release);
            rounds.thread().unpark();
            sent
        })
    }

    fn until_sent(&self, source: &mut Qmp, cancel: &AtomicBool, progress: &Progress) -> Result<Migrated> {
        let mut is_stopped = false;
        loop {
            let now = Migrated::of(source)?;
            match &*now.status {
                "completed" => return Ok(now),
                "failed" | "cancelled" | "none" => {
                    bail!("QEMU gave up ({}): {}", now.status, now.error_desc.unwrap_or_default())
                }
                _ => {}
            }
            ensure!(!cancel.load(Ordering::Relaxed), "cancelled");
            if let Some(ram) = now.ram {
                progress.show(|| {
                    let [sent, left, total] = [ram.transferred, ram.remaining, ram.total].map(short_size);
                    format!("memory: {sent} sent, {left} of {total} left")
                });
            }
            if !is_stopped && !run_state(source)?.running {
                is_stopped = true;
                // Beside the last of the memory.
                self.source.ask(&self.disk, "sync", &())?;
            } else {
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }
}

/// Parameters of QEMU's.
fn limits(args: &VmMigrateArgs) -> Map<String, Value> {
    let bandwidth = args.bandwidth.map(|bytes| ("max-bandwidth", bytes));
    let downtime = args.downtime.map(|ms| ("downtime-limit", ms.into()));
    let limits = [bandwidth, downtime].into_iter().flatten();
    limits.map(|(name, value)| (name.to_owned(), value.into())).collect()
}

/// What these are now.
fn limits_before(args: &VmMigrateArgs, source: &mut Qmp) -> Result<Map<String, Value>> {
    let mut now: Map<String, Value> = source.ask("query-migrate-parameters", json!({}))?;
    let changed = limits(args);
    now.retain(|name, _| changed.contains_key(name));
    Ok(now)
}

/// Refuses two QEMUs between which a guest cannot move.
fn check_machines(source: &mut Qmp, target: &mut Qmp) -> Result<()> {
    let here = run_state(source)?;
    ensure!(here.running, "the guest does not run: QEMU says {}", here.status);
    let there = run_state(target)?;
    ensure!(
        there.status == "inmigrate",
        "the target's QEMU does not wait for a guest (-incoming defer): it is {}",
        there.status
    );
    let now = Migrated::of(source)?;
    ensure!(!now.is_under_way(), "the guest is being moved already, or saved");
    ensure!(now.blocked_reasons.is_empty(), "QEMU cannot move the guest: {}", now.blocked_reasons.join("; "));
    let [own, far] = [version(source)?, version(target)?];
    ensure!(far >= own, "QEMU {} at the target is older than {}", shown(&far), shown(&own));
    for (what, command, arguments, pointer) in [
        ("machine type", "qom-get", json!({ "path": "/machine", "property": "type" }), ""),
        ("memory", "query-memory-size-summary", json!({}), "/base-memory"),
        ("kind of processor", "query-cpus-fast", json!({}), "/0/qom-type"),
    ] {
        let of = |qmp: &mut Qmp| -> Result<Value> {
            let answer: Value = qmp.ask(command, arguments.clone())?;
            Ok(answer.pointer(pointer).cloned().unwrap_or_default())
        };
        let (own, far) = (of(source)?, of(target)?);
        ensure!(own == far, "another {what} at the target: {far}, not {own}");
    }
    let processors =
        |qmp: &mut Qmp| -> Result<usize> { Ok(qmp.ask::<Vec<Value>>("query-cpus-fast", json!({}))?.len()) };
    let (own, far) = (processors(source)?, processors(target)?);
    ensure!(own == far, "{far} processors at the target, and {own} here");
    Ok(())
}

fn version(qmp: &mut Qmp) -> Result<[u64; 3]> {
    let answer: Value = qmp.ask("query-version", json!({}))?;
    Ok(["major", "minor", "micro"].map(|part| answer["qemu"][part].as_u64().unwrap_or_default()))
}

fn shown([major, minor, micro]: &[u64; 3]) -> String {
    format!("{major}.{minor}.{micro}")
}
