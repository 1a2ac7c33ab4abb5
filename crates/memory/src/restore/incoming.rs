//! Handing a waiting QEMU the state of the guest's devices, and letting the guest go on.

use std::io::{Write, pipe};
use std::os::fd::AsFd;
use std::thread::Builder;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::json;

use super::error::RestoreError;
use crate::capture::{IGNORE_SHARED, set_capability};
use crate::qmp::{Qmp, QmpError};

/// How long QEMU may take to load the devices.
const LOAD_MAX: Duration = Duration::from_secs(120);
/// After what time QEMU is first asked how far it is: most guests' devices are loaded by then.
const FIRST_POLL: Duration = Duration::from_micros(250);
/// How often it is asked in the end.
const POLL: Duration = Duration::from_millis(8);
/// What QEMU calls the descriptor.
const NAME: &str = "vmstrata-state";

/// What a QEMU that was started with `-incoming defer` gets.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// The machine type the guest had.
    pub kind: &'a str,
    /// The stream of its devices.
    pub devices: &'a [u8],
    /// Whether the stream leaves memory out that is in files; see QEMU's capability `x-ignore-shared`.
    pub ignore_shared: bool,
}

/// QEMU's answer to `query-migrate`.
#[derive(Debug, Deserialize)]
struct Migration {
    status: Option<String>,
    #[serde(rename = "error-desc")]
    error: Option<String>,
}

/// Readies the QEMU behind `qmp` for what is coming. The guest's memory need not be in place yet.
///
/// # Errors
/// [`RestoreError::Kind`] for a machine of another type; what QEMU says.
pub fn ready(qmp: &mut Qmp, incoming: Incoming<'_>) -> Result<(), RestoreError> {
    let has: String = qmp.ask("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let has = has.trim_end_matches("-machine").to_owned();
    if has != incoming.kind {
        return Err(RestoreError::Kind { had: incoming.kind.to_owned(), has });
    }
    Ok(set_capability(qmp, IGNORE_SHARED, incoming.ignore_shared)?)
}

/// Loads the devices into a QEMU that is [`ready`], and whose memory is in place: they read it. `go_on` lets the guest run.
///
/// # Errors
/// [`RestoreError`]; QEMU must then be ended: it may have loaded a part.
pub fn resume(qmp: &mut Qmp, incoming: Incoming<'_>, go_on: bool) -> Result<(), RestoreError> {
    let deadline = Instant::now() + LOAD_MAX;
    let (reader, mut writer) = pipe().map_err(QmpError::from)?;
    qmp.give(NAME, reader.as_fd())?;
    drop(reader);
    std::thread::scope(|scope| {
        // A QEMU that stops reading is one that failed, and says why itself.
        let write = move || drop(writer.write_all(incoming.devices));
        Builder::new().name("devices".into()).spawn_scoped(scope, write).map_err(RestoreError::Thread)?;
        qmp.tell("migrate-incoming", json!({ "uri": format!("fd:{NAME}") }))?;
        wait_loaded(qmp, deadline)
    })?;
    if go_on {
        qmp.tell("cont", json!({}))?;
    }
    if incoming.ignore_shared {
        // Left on, it would keep the memory out of a later migration of the user's.
        set_capability(qmp, IGNORE_SHARED, false)?;
    }
    Ok(())
}

fn wait_loaded(qmp: &mut Qmp, deadline: Instant) -> Result<(), RestoreError> {
    let mut pause = FIRST_POLL;
    loop {
        std::thread::sleep(pause);
        pause = (2 * pause).min(POLL);
        let now: Migration = match qmp.ask("query-migrate", json!({})) {
            Ok(now) => now,
            // An incoming migration that fails ends QEMU.
            Err(QmpError::Closed) => {
                return Err(RestoreError::Incoming { words: "QEMU ended; its messages say why".to_owned() });
            }
            Err(error) => return Err(error.into()),
        };
        match now.status.as_deref() {
            Some("completed") => return Ok(()),
            Some("failed") => {
                let words = now.error.unwrap_or_else(|| "its messages say why".to_owned());
                return Err(RestoreError::Incoming { words });
            }
            _ if Instant::now() > deadline => {
                return Err(RestoreError::Incoming { words: "it does not end".to_owned() });
            }
            _ => {}
        }
    }
}
