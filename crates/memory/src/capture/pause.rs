//! A guest held still, which goes on whatever happens.
//!
//! A [`Pause`] that is dropped undoes itself: a migration under way is cancelled, because QEMU would stop the guest again
//! at its end, and the guest goes on if it ran before. (A killed process drops nothing: see the resume guard of
//! `vmstrata vm snapshot`.)

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::error::CaptureError;
use crate::qmp::{Qmp, QmpError};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(2);
/// How long a cancelled migration may take to end.
const CANCEL_MAX: Duration = Duration::from_secs(10);

/// QEMU's answer to `query-status`.
#[derive(Debug, Deserialize)]
struct Status {
    running: bool,
    status: String,
}

/// QEMU's answer to `query-migrate`.
#[derive(Debug, Deserialize)]
struct Migration {
    status: Option<String>,
    #[serde(rename = "error-desc")]
    error: Option<String>,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Pause<'a> {
    qmp: &'a mut Qmp,
    /// Whether the guest ran, and still has to be let go.
    resume: bool,
    start: Instant,
}

impl<'a> Pause<'a> {
    /// Stops the guest, unless it is stopped.
    pub(super) fn begin(qmp: &'a mut Qmp) -> Result<Self, CaptureError> {
        let resume = runs(qmp)?;
        let start = Instant::now();
        let pause = Self { qmp, resume, start };
        if resume {
            pause.qmp.tell("stop", json!({}))?;
        }
        Ok(pause)
    }

    /// QEMU.
    pub(super) fn qmp(&mut self) -> &mut Qmp {
        self.qmp
    }

    /// Lets the guest go on, if it ran before; returns for how long it was held.
    pub(super) fn end(mut self) -> Result<Duration, CaptureError> {
        if self.resume {
            self.qmp.tell("cont", json!({}))?;
            self.resume = false;
        }
        Ok(self.start.elapsed())
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        // A QEMU that is gone needs none of it.
        let _ = resume(self.qmp, self.resume);
    }
}

/// Cancels a migration that is under way, and lets the guest go on if it is to.
///
/// # Errors
/// When QEMU does not answer any more.
pub fn resume(qmp: &mut Qmp, go_on: bool) -> Result<(), QmpError> {
    if migration(qmp)?.is_under_way() {
        qmp.tell("migrate_cancel", json!({}))?;
        let deadline = Instant::now() + CANCEL_MAX;
        while migration(qmp)?.is_under_way() && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
    }
    let status: Status = qmp.ask("query-status", json!({}))?;
    if go_on && !status.running { qmp.tell("cont", json!({})) } else { Ok(()) }
}

/// Whether the guest runs.
///
/// # Errors
/// When it neither runs nor is simply stopped.
pub(super) fn runs(qmp: &mut Qmp) -> Result<bool, CaptureError> {
    let status: Status = qmp.ask("query-status", json!({}))?;
    match status.status.as_str() {
        "running" | "paused" | "postmigrate" | "prelaunch" => Ok(status.running),
        _ => Err(CaptureError::Status { status: status.status }),
    }
}

/// Waits until a migration has ended well.
pub(super) fn wait_migrated(
    qmp: &mut Qmp,
    deadline: Instant,
    check: impl Fn() -> Result<(), CaptureError>,
) -> Result<(), CaptureError> {
    loop {
        check()?;
        let now = migration(qmp)?;
        match now.status.as_deref() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled" | "cancelling") => {
                return Err(now.failure());
            }
            _ if Instant::now() > deadline => {
                return Err(CaptureError::State { what: "not complete in time" });
            }
            _ => std::thread::sleep(POLL),
        }
    }
}

/// Fails if the migration has.
pub(super) fn refuse_failed(qmp: &mut Qmp) -> Result<(), CaptureError> {
    let now = migration(qmp)?;
    if now.is_under_way() || now.status.as_deref() == Some("completed") { Ok(()) } else { Err(now.failure()) }
}

fn migration(qmp: &mut Qmp) -> Result<Migration, QmpError> {
    qmp.ask("query-migrate", json!({}))
}

impl Migration {
    fn failure(self) -> CaptureError {
        CaptureError::Migration { words: self.error.unwrap_or_else(|| "it gives no reason".to_owned()) }
    }

    fn is_under_way(&self) -> bool {
        let ended = [None, Some("none"), Some("completed"), Some("failed"), Some("cancelled")];
        !ended.contains(&self.status.as_deref())
    }
}

/// A migration capability, set for as long as this lives and then what it was.
pub(super) fn with_capability<T>(
    qmp: &mut Qmp,
    name: &str,
    run: impl FnOnce(&mut Qmp) -> Result<T, CaptureError>,
) -> Result<T, CaptureError> {
    let all: Vec<Value> = qmp.ask("query-migrate-capabilities", json!({}))?;
    let is_set = |one: &Value| one["capability"] == name && one["state"] == true;
    let before = all.iter().any(is_set);
    set_capability(qmp, name, true)?;
    let done = run(qmp);
    if !before {
        // What is left on changes how a later migration of the user's works; a QEMU that is gone does not mind.
        let off = set_capability(qmp, name, false);
        if done.is_ok() {
            off?;
        }
    }
    done
}

/// Sets a migration capability.
pub(crate) fn set_capability(qmp: &mut Qmp, name: &str, state: bool) -> Result<(), QmpError> {
    let set = json!({ "capabilities": [{ "capability": name, "state": state }] });
    qmp.tell("migrate-set-capabilities", set)
}
