//! Live copy-on-write: QEMU lets the guest run on at once and saves each page before the guest changes it.
//!
//! ```text
//!   stop ─ disks ─ migrate (background-snapshot) ─ first page of the stream ─ cont ─ all other pages ─► StillRam
//! ```
//!
//! QEMU writes pages only once it tracks all writes, so the first page says that the guest may go on. It tracks what its
//! own process writes: a process that maps the guest's memory and writes to it, as the servers of vhost-user devices do,
//! goes unnoticed, and its writes would be in the snapshot. A guest that has such devices is refused, and is captured by
//! copying ([`super::Mode::Copy`]), which needs nobody's help.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::copy::StillRam;
use super::error::{BoxError, CaptureError};
use super::machine::{Backend, Machine};
use super::pause::{self, Pause, wait_migrated, with_capability};
use super::state;
use super::stream::{self, StreamPage};
use super::take::{Disks, Taken};
use crate::qmp::{Qmp, QmpError};
use crate::ram::Ram;

/// QEMU's name of what saves pages before they change.
const BACKGROUND: &str = "background-snapshot";
/// How long QEMU may take from the request to the first page.
const FIRST_PAGE_MAX: Duration = Duration::from_secs(60);
/// How long QEMU may take for all pages.
const ALL_MAX: Duration = Duration::from_secs(3600);
/// How often QEMU is asked whether it failed.
const POLL: Duration = Duration::from_millis(5);
/// Bytes per second that no machine reaches: QEMU's default would make the copy take many times as long.
const UNLIMITED: u64 = 1 << 40;

/// Takes the guest behind `qmp`, which goes on while its memory is read; `store` gets the memory as it was.
///
/// # Errors
/// As [`super::take`]; [`CaptureError::Live`] for a guest that cannot be captured in this way.
pub(super) fn take_live(
    qmp: &mut Qmp,
    machine: &Machine,
    disks: &mut dyn Disks,
    store: &mut dyn FnMut(&dyn Ram) -> Result<(), BoxError>,
    cancel: &AtomicBool,
) -> Result<Taken, CaptureError> {
    refuse_writers(qmp)?;
    if !pause::runs(qmp)? {
        return Err(CaptureError::Live { why: "it is paused" });
    }
    let still = StillRam::blank(machine.layout.clone(), machine.backends.iter().map(|own| own.bytes).sum())?;
    let starts = starts(&machine.backends);
    let (still, taken) = with_capability(qmp, BACKGROUND, |qmp| {
        unlimited(qmp, |qmp| copy(qmp, &starts, still, disks, cancel))
    })?;
    store(&still).map_err(CaptureError::Store)?;
    Ok(taken)
}

/// The stream's names of the backends, with where each begins among all.
fn starts(backends: &[Backend]) -> Vec<(String, u64)> {
    let place = |before: &mut u64, own: &Backend| {
        let start = *before;
        *before += own.bytes;
        Some((own.id.clone(), start))
    };
    backends.iter().scan(0, place).collect()
}

/// From the pause to the last page.
fn copy(
    qmp: &mut Qmp,
    starts: &[(String, u64)],
    mut still: StillRam,
    disks: &mut dyn Disks,
    cancel: &AtomicBool,
) -> Result<(StillRam, Taken), CaptureError> {
    let mut pause = Pause::begin(qmp)?;
    let disks = disks.snapshot().map_err(CaptureError::Disks)?;
    let reader = state::migrate(pause.qmp())?;
    let (first, is_first) = sync_channel(1);
    let wanted = |name: &str| {
        let name = name.strip_prefix("/objects/").unwrap_or(name);
        starts.iter().position(|(id, _)| id == name)
    };
    let devices = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            stream::split(
                std::io::BufReader::with_capacity(1 << 20, reader),
                &wanted,
                &mut |page: StreamPage<'_>| {
                    // Whoever waits is told once, and may be gone.
                    let _ = first.try_send(());
                    if cancel.load(Ordering::Relaxed) {
                        return Err(CaptureError::Cancelled.into());
                    }
                    let place = starts[page.block].1 + page.offset;
                    still.put(place, page.bytes).ok_or_else(|| "a page past the end of memory".into())
                },
            )
        });
        let going = wait_first(pause.qmp(), &is_first).and_then(|()| pause.end());
        // A reader that failed has closed the pipe, so QEMU fails too, and the other way round.
        let split = reading.join().expect("reading does not panic");
        Ok::<_, CaptureError>((going?, split.map_err(CaptureError::Stream)?))
    });
    let (held, devices) = devices?;
    wait_migrated(qmp, Instant::now() + ALL_MAX, || Ok(()))?;
    Ok((still, Taken { devices, disks, pause: held, ignore_shared: false }))
}

/// Waits for the stream's first page, or for QEMU to fail.
fn wait_first(qmp: &mut Qmp, is_first: &Receiver<()>) -> Result<(), CaptureError> {
    let deadline = Instant::now() + FIRST_PAGE_MAX;
    loop {
        match is_first.recv_timeout(POLL) {
            Ok(()) => return Ok(()),
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => pause::refuse_failed(qmp)?,
            Err(_) => return Err(CaptureError::State { what: "not begun in time" }),
        }
    }
}

/// Refuses a machine with devices whose other processes write its memory.
fn refuse_writers(qmp: &mut Qmp) -> Result<(), CaptureError> {
    let devices = qmp.monitor("info qtree")?;
    let writes = |line: &str| {
        let device = line.trim_start().strip_prefix("dev: ")?;
        (device.starts_with("vhost-") || device.starts_with("vfio-")).then_some(())
    };
    match devices.lines().find_map(writes) {
        Some(()) => Err(CaptureError::Live {
            why: "a vhost-user or vfio device writes its memory behind QEMU's back",
        }),
        None => Ok(()),
    }
}

/// Lets QEMU migrate as fast as it can, for as long as `run` takes.
fn unlimited<T>(
    qmp: &mut Qmp,
    run: impl FnOnce(&mut Qmp) -> Result<T, CaptureError>,
) -> Result<T, CaptureError> {
    let parameters: Value = qmp.ask("query-migrate-parameters", json!({}))?;
    set_bandwidth(qmp, &json!(UNLIMITED))?;
    let done = run(qmp);
    let before = set_bandwidth(qmp, &parameters["max-bandwidth"]);
    if done.is_ok() {
        before?;
    }
    done
}

fn set_bandwidth(qmp: &mut Qmp, bytes_per_second: &Value) -> Result<(), QmpError> {
    qmp.tell("migrate-set-parameters", json!({ "max-bandwidth": bytes_per_second }))
}
