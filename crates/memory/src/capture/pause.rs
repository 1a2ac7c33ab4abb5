//! A guest held still, which goes on whatever happens.
//!
//! A [`Pause`] that is dropped undoes itself: a migration under way is cancelled, because QEMU would stop the guest again
//! at its end, and the guest goes on if it ran before. (A killed process drops nothing: see [`super::Before`].)

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::error::CaptureError;
use crate::qmp::{Qmp, QmpError};

/// QEMU's command for capabilities.
pub(super) const SET_CAPABILITIES: &str = "migrate-set-capabilities";
/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(2);
/// How long a migration that was cancelled, or has ended, may take until nothing is left of it.
const END_MAX: Duration = Duration::from_secs(10);

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
    /// Whether the guest ran before.
    ran: bool,
    start: Instant,
    /// Whether nothing is left to undo.
    is_over: bool,
}

impl<'a> Pause<'a> {
    /// Stops the guest, unless it is stopped.
    pub(super) fn begin(qmp: &'a mut Qmp) -> Result<Self, CaptureError> {
        let ran = runs(qmp)?;
        let pause = Self { qmp, ran, start: Instant::now(), is_over: false };
        if ran {
            pause.qmp.tell("stop", json!({}))?;
        }
        Ok(pause)
    }

    /// QEMU.
    pub(super) fn qmp(&mut self) -> &mut Qmp {
        self.qmp
    }

    /// Lets the guest go on, if it ran before and QEMU has not done so by itself; returns for how long it was held. A
    /// migration that is under way goes on.
    pub(super) fn end(mut self) -> Result<Duration, CaptureError> {
        if self.ran {
            go_on(self.qmp)?;
        }
        self.is_over = true;
        Ok(self.start.elapsed())
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // A QEMU that is gone needs none of it.
        let _ = cancel(self.qmp).and_then(|()| if self.ran { go_on(self.qmp) } else { Ok(()) });
    }
}

/// Cancels a migration that is under way, and waits until nothing is left of it.
///
/// Not for one that tracks the writes of a guest that runs: QEMU 7.2 stops answering writes to tracked pages before it stops
/// tracking, and may wait for its own write in between. Such a migration ends by being read to its end.
pub(super) fn cancel(qmp: &mut Qmp) -> Result<(), QmpError> {
    if migration(qmp)?.is_under_way() {
        qmp.tell("migrate_cancel", json!({}))?;
    }
    wait_for_end(qmp, Instant::now() + END_MAX).map(drop)
}

/// Waits until a migration has ended and nothing is left of it; whether that came before the deadline.
///
/// QEMU cleans up a moment after the end, and then looks at capabilities again: one that was turned off too early would
/// leave the guest's memory tracked.
pub(super) fn wait_for_end(qmp: &mut Qmp, deadline: Instant) -> Result<bool, QmpError> {
    while migration(qmp)?.is_under_way() || is_kept(qmp)? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(POLL);
    }
    Ok(true)
}

/// Whether QEMU has something of a migration that could be yanked: until it has cleaned up.
fn is_kept(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let instances: Vec<Value> = qmp.ask("query-yank", json!({}))?;
    Ok(instances.iter().any(|instance| instance["type"] == "migration"))
}

/// Lets the guest run, unless it does.
pub(super) fn go_on(qmp: &mut Qmp) -> Result<(), QmpError> {
    let status: Status = qmp.ask("query-status", json!({}))?;
    if status.running { Ok(()) } else { qmp.tell("cont", json!({})) }
}

/// Whether the guest runs.
///
/// # Errors
/// When it neither runs nor is simply stopped; [`CaptureError::Saved`] when it was saved as it is.
pub(super) fn runs(qmp: &mut Qmp) -> Result<bool, CaptureError> {
    let status: Status = qmp.ask("query-status", json!({}))?;
    match status.status.as_str() {
        "running" | "paused" | "prelaunch" => Ok(status.running),
        "postmigrate" => Err(CaptureError::Saved),
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

/// A migration capability, set for as long as `run` takes and then what it was.
pub(super) fn with_capability<T>(
    qmp: &mut Qmp,
    name: &str,
    run: impl FnOnce(&mut Qmp) -> Result<T, CaptureError>,
) -> Result<T, CaptureError> {
    let before = is_set(qmp, name)?;
    set_capability(qmp, name, true)?;
    let done = run(qmp);
    if !before {
        // What is left on changes how a later migration of the user's works; a QEMU that is gone does not mind.
        let ended = wait_for_end(qmp, Instant::now() + END_MAX);
        let off = ended.and_then(|_| set_capability(qmp, name, false));
        if done.is_ok() {
            off?;
        }
    }
    done
}

/// Whether a migration capability is set.
pub(super) fn is_set(qmp: &mut Qmp, name: &str) -> Result<bool, QmpError> {
    let all: Vec<Value> = qmp.ask("query-migrate-capabilities", json!({}))?;
    Ok(all.iter().any(|one| one["capability"] == name && one["state"] == true))
}

/// Sets a migration capability.
pub(crate) fn set_capability(qmp: &mut Qmp, name: &str, state: bool) -> Result<(), QmpError> {
    let set = json!({ "capabilities": [{ "capability": name, "state": state }] });
    qmp.tell(SET_CAPABILITIES, set)
}
