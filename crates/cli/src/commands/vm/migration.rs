//! A migration that is under way, and its end: a guard or a user who comes later sees as much as the command that began it.
//!
//! Invariants: the source's guest goes on only after its server has the disk back, which makes a head; the target's only after a head of the
//! target. At most one of these is there.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use vmstrata_api::{DiskDetail, ExportSpec, ExportStatus, TierState, TierStatus, encode_segment};
use vmstrata_memory::qmp::{Qmp, QmpError};

use super::PATIENCE;
use crate::args::ControlArgs;
use crate::client::Client;
use crate::commands::tiered::published;

/// How often QEMU is looked at.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long a QEMU may take to give up, or to go on.
const ENDING_MAX: Duration = Duration::from_secs(30);
/// For how long it is tried to find out which host has the disk.
const DECIDING_MAX: Duration = Duration::from_secs(3600);
/// How soon again.
const AGAIN: Duration = Duration::from_millis(500);

/// A migration, as far as is needed to end it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Migration {
    pub(super) guest: String,
    /// What the servers call its disk, or the first of its disks.
    pub(super) disk: String,
    /// What leads to the disk's repository.
    pub(super) path: PathBuf,
    pub(super) source: End,
    pub(super) target: End,
    /// The target's copy of the disk, as heads name it.
    pub(super) target_copy: String,
    /// What the source's QEMU was limited to before, by QEMU's names.
    pub(super) limits: Map<String, Value>,
}

/// One of the two hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct End {
    /// Where its server answers.
    pub(super) control: Option<PathBuf>,
    /// The socket of QEMU's monitor.
    pub(super) monitor: PathBuf,
}

/// Where the guest goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Side {
    Source,
    Target,
}

/// QEMU's answer to `query-status`.
#[derive(Debug, Deserialize)]
pub(super) struct RunState {
    pub(super) running: bool,
    pub(super) status: String,
}

/// QEMU's answer to `query-migrate`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Migrated {
    #[serde(default)]
    pub(super) status: String,
    pub(super) error_desc: Option<String>,
    pub(super) downtime: Option<u64>,
    pub(super) ram: Option<Ram>,
    #[serde(default)]
    pub(super) blocked_reasons: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Ram {
    pub(super) transferred: u64,
    pub(super) remaining: u64,
    pub(super) total: u64,
}

impl Migrated {
    pub(super) fn of(qmp: &mut Qmp) -> Result<Self, QmpError> {
        qmp.ask("query-migrate", json!({}))
    }

    /// Whether QEMU is at it, so that it can be cancelled.
    pub(super) fn is_under_way(&self) -> bool {
        matches!(&*self.status, "setup" | "active" | "device" | "pre-switchover" | "wait-unplug")
    }
}

pub(super) fn run_state(qmp: &mut Qmp) -> Result<RunState, QmpError> {
    qmp.ask("query-status", json!({}))
}

impl End {
    pub(super) fn connect(&self, guest: &str) -> Result<Qmp> {
        super::connect(guest, &self.monitor)
    }

    pub(super) fn client(&self) -> Result<Client> {
        Client::new(&ControlArgs { control: self.control.clone() })
    }

    pub(super) fn disk(&self, disk: &str) -> Result<DiskDetail> {
        self.client()?.get(&format!("/v1/disks/{}", encode_segment(disk)))
    }

    pub(super) fn ask(&self, disk: &str, what: &str, body: &impl Serialize) -> Result<TierStatus> {
        self.client()?.post(&format!("/v1/disks/{}/tier/{what}", encode_segment(disk)), body)
    }

    /// Waits until QEMU knows that it is connected to the disk's vhost-user socket, if there is one: QEMU 7.2 lets a guest go on without, and the
    /// guest then waits for its disk for ever. A server that was started again is connected to within QEMU's `reconnect`.
    pub(super) fn wait_for_qemu(&self, disk: &str) -> Result<()> {
        let why = format!("QEMU does not connect to the socket of {disk}");
        wait_until(ENDING_MAX, &why, || {
            // The server may be about to start.
            let Ok(detail) = self.disk(disk) else { return Ok(false) };
            let waits = |export: &ExportStatus| {
                matches!(export.export, ExportSpec::VhostUser(_)) && !export.has_spoken
            };
            // An NBD client connects again when it has something to ask.
            Ok(!detail.exports.iter().any(waits))
        })
    }
}

pub(super) fn tier_of(detail: &DiskDetail) -> Result<&TierStatus> {
    let DiskDetail { disk, .. } = detail;
    let why = disk.open_error.as_deref().unwrap_or("it is not tiered (its key tier=DIR)");
    disk.tier.as_ref().with_context(|| format!("disk {}: {why}", disk.name))
}

impl Migration {
    /// Ends the migration, however far it came: the guest goes on where its disk is.
    ///
    /// # Errors
    /// What could not be done.
    pub(super) fn end(&self) -> Result<Side> {
        let side = self.decide()?;
        match side {
            Side::Source => self.stay()?,
            Side::Target => {
                self.go_on()?;
                self.leave_source()?;
            }
        }
        Ok(side)
    }

    /// Has the source take the disk back, unless the target has it.
    fn decide(&self) -> Result<Side> {
        let path = format!("/v1/disks/{}/tier/hand-over", encode_segment(&self.disk));
        let mut last = String::new();
        let deadline = Instant::now() + DECIDING_MAX;
        while Instant::now() < deadline {
            let back = self.source.client().and_then(|client| client.take_away::<TierStatus>(&path));
            let why = match back {
                Ok(status) if status.state != TierState::Fenced => return Ok(Side::Source),
                Ok(status) => said(&status),
                Err(error) => format!("{error:#}"),
            };
            if published(&self.path).is_ok_and(|(_, head)| head.owner.to_string() == self.target_copy) {
                return Ok(Side::Target);
            }
            if why != last {
                eprintln!(
                    "vmstrata: it is not known yet which host has {}, and tried again: {why}",
                    self.disk
                );
                last = why;
            }
            std::thread::sleep(AGAIN);
        }
        bail!(
            "which host has {} is not known: once the source's server and the repository answer, run the command with --recover",
            self.disk
        )
    }

    /// The guest goes on at the source.
    fn stay(&self) -> Result<()> {
        // It would stay paused for ever.
        if let Ok(mut target) = Qmp::connect(&self.target.monitor, PATIENCE) {
            let _ = target.tell("quit", json!({}));
        }
        let mut source = self
            .source
            .connect(&self.guest)
            .context("the source has the disk, and its QEMU is gone: start the guest there anew")?;
        let mut is_cancelled = false;
        wait_until(ENDING_MAX, "the source's QEMU does not end the migration", || {
            let now = Migrated::of(&mut source)?;
            if now.is_under_way() && !is_cancelled {
                source.tell("migrate_cancel", json!({}))?;
                is_cancelled = true;
            }
            Ok(!now.is_under_way() && now.status != "cancelling")
        })?;
        if !self.limits.is_empty() {
            source.tell("migrate-set-parameters", Value::Object(self.limits.clone()))?;
        }
        if !run_state(&mut source)?.running {
            self.source.wait_for_qemu(&self.disk)?;
            source.tell("cont", json!({}))?;
        }
        Ok(())
    }

    /// The guest goes on at the target.
    fn go_on(&self) -> Result<()> {
        let mut target = self.target.connect(&self.guest).context(
            "the target has the disk, and its QEMU is gone: start the guest there anew, with nothing to wait for",
        )?;
        let state = run_state(&mut target)?;
        if state.running {
            return Ok(());
        }
        let loaded = Migrated::of(&mut target)?.status == "completed";
        ensure!(
            loaded && state.status == "paused",
            "the target has the disk, and not the guest's memory (its QEMU is {}): end that QEMU, and start the guest there anew",
            state.status
        );
        self.target.wait_for_qemu(&self.disk)?;
        Ok(target.tell("cont", json!({}))?)
    }

    /// Ends what the guest has left at the source.
    pub(super) fn leave_source(&self) -> Result<()> {
        if let Ok(mut source) = Qmp::connect(&self.source.monitor, PATIENCE) {
            let _ = source.tell("quit", json!({}));
        }
        let removed =
            self.source.client()?.delete(&format!("/v1/disks/{}?force=true", encode_segment(&self.disk)));
        if let Err(error) = removed {
            let disk = &self.disk;
            eprintln!(
                "vmstrata: warning: the source's server still has {disk}, which it cannot write any more (vmstrata disk remove {disk}): {error:#}"
            );
        }
        Ok(())
    }
}

pub(super) fn said(tier: &TierStatus) -> String {
    crate::commands::tier::line(tier)
}

/// Waits until it holds.
pub(super) fn wait_until(
    patience: Duration,
    or: &str,
    mut holds: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + patience;
    while !holds()? {
        ensure!(Instant::now() < deadline, "{or} within {} s", patience.as_secs());
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
