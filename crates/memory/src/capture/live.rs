//! Live copy-on-write: QEMU lets the guest run on at once and saves each page before the guest changes it.
//!
//! ```text
//!   stop ─ disks ─ migrate (background-snapshot) ─ first page of the stream ─ cont ─ all other pages ─► StillRam
//! ```
//!
//! QEMU writes pages only once it tracks all writes, so the first page says that the guest may go on; QEMU lets it go by
//! itself. It tracks what its own process writes: a process that maps the guest's memory and writes to it, as the servers of
//! vhost-user devices do, goes unnoticed, and its writes would be in the snapshot. A guest that has such devices is refused,
//! and is captured by copying ([`super::Mode::Copy`]), which needs nobody's help.
//!
//! A guest whose writes are tracked waits at each until QEMU has written the page out. So the stream is read to its end
//! whatever happens, also after a cancel and by whoever is left of a killed process: one that breaks off leaves QEMU
//! waiting for its own write, and the guest with it.

use std::io::{self, BufReader, PipeReader};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::copy::StillRam;
use super::error::CaptureError;
use super::machine::{Backend, Machine};
use super::pause::{self, Pause, SET_CAPABILITIES, is_set, wait_migrated, with_capability};
use super::populate::populate;
use super::processor::processor;
use super::stream::{self, StreamPage};
use super::take::{Control, Disks, IGNORE_SHARED, Store, Taken, cancelled};
use crate::qmp::{Qmp, QmpError};

/// QEMU's name of what saves pages before they change.
pub(super) const BACKGROUND: &str = "background-snapshot";
/// How long QEMU may take from the request to the first page.
const FIRST_PAGE_MAX: Duration = Duration::from_secs(60);
/// How long QEMU may take for all pages.
const ALL_MAX: Duration = Duration::from_secs(3600);
/// How often QEMU is asked whether it failed.
const POLL: Duration = Duration::from_millis(5);
/// Bytes read at once.
const READ_BYTES: usize = 1 << 20;

/// Takes the guest behind `qmp`, which goes on while its memory is read; `store` gets the memory as it was.
///
/// # Errors
/// As [`super::take`]; [`CaptureError::Live`] for a guest that cannot be captured in this way.
pub(super) fn take_live(
    qmp: &mut Qmp,
    machine: &Machine,
    disks: &mut dyn Disks,
    store: &mut Store<'_>,
    control: Control<'_>,
) -> Result<Taken, CaptureError> {
    refuse_writers(qmp)?;
    if !pause::runs(qmp)? {
        return Err(CaptureError::Live { why: "it is paused".to_owned() });
    }
    if is_set(qmp, IGNORE_SHARED)? {
        let why = format!(
            "QEMU's migration capability {IGNORE_SHARED} is on, which leaves its memory out of what QEMU saves: \
             turn it off (QMP: {SET_CAPABILITIES})"
        );
        return Err(CaptureError::Live { why });
    }
    populate(&machine.open()?, control.cancel)?;
    let still = StillRam::blank(machine.layout.clone(), machine.backends.iter().map(|own| own.bytes).sum())?;
    let starts = starts(&machine.backends);
    let taken = with_capability(qmp, BACKGROUND, |qmp| copy(qmp, &starts, still, disks, control));
    let (still, taken) = taken.map_err(untracked)?;
    store(taken.moment(&still)).map_err(CaptureError::Store)?;
    Ok(taken)
}

/// What QEMU's refusal to track writes means, and what to do about it.
fn untracked(error: CaptureError) -> CaptureError {
    match error {
        CaptureError::Qmp(QmpError::Refused { command, words, .. }) if command == SET_CAPABILITIES => {
            CaptureError::Live {
                why: format!(
                    "QEMU cannot track writes to its memory ({words}), which takes a file on /dev/shm \
                     (mem-path=/dev/shm/NAME) or huge pages, Linux 5.19, and userfaultfd allowed to QEMU \
                     (root, or sysctl vm.unprivileged_userfaultfd=1)"
                ),
            }
        }
        other => other,
    }
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
    control: Control<'_>,
) -> Result<(StillRam, Taken), CaptureError> {
    let Control { cancel, channel } = control;
    let (first, is_first) = sync_channel(1);
    let (give, reader) = sync_channel(1);
    let (held, devices) = std::thread::scope(|scope| {
        // A capture that fails drops it, and the thread ends.
        let give = give;
        let still = &mut still;
        // Before QEMU tracks writes: from then on its stream must be read.
        let reading = Builder::new().name("read-live".into()).spawn_scoped(scope, move || {
            // None comes where the capture fails before there is one.
            reader
                .recv()
                .map_or_else(|_| Ok(Vec::new()), |reader| read(reader, starts, still, &first, cancel))
        });
        let reading = reading.map_err(CaptureError::Thread)?;
        let mut pause = Pause::begin(qmp)?;
        let disks = disks.snapshot().map_err(CaptureError::Disks)?;
        let processor = processor(pause.qmp());
        give.send(channel.migrate(pause.qmp())?).expect("it waits for one");
        let came = wait_first(pause.qmp(), &is_first);
        let held = came.and_then(|came| Ok((came, pause.end()?, disks, processor)));
        // A migration that failed has closed the pipe.
        Ok::<_, CaptureError>((held, reading.join().expect("reading does not panic")))
    })?;
    let (came, pause, disks, processor) = held?;
    // Why a stream broke off, QEMU knows.
    wait_migrated(qmp, Instant::now() + ALL_MAX, || Ok(()))?;
    let devices = devices?;
    if !came {
        return Err(CaptureError::Live { why: "QEMU's stream has nothing of its memory".to_owned() });
    }
    Ok((still, Taken { devices, disks, pause, ignore_shared: false, processor }))
}

/// Reads QEMU's stream to its end: pages to `still`, the rest is returned. Tells `first` of the first page.
fn read(
    reader: PipeReader,
    starts: &[(String, u64)],
    still: &mut StillRam,
    first: &SyncSender<()>,
    cancel: &AtomicBool,
) -> Result<Vec<u8>, CaptureError> {
    let wanted = |name: &str| {
        let name = name.strip_prefix("/objects/").unwrap_or(name);
        starts.iter().position(|(id, _)| id == name)
    };
    let mut put = |page: StreamPage<'_>| {
        // Whoever waits is told once, and may be gone.
        let _ = first.try_send(());
        let place = starts[page.block].1 + page.offset;
        still.put(place, page.bytes).ok_or_else(|| "a page past the end of memory".into())
    };
    let mut reader = BufReader::with_capacity(READ_BYTES, reader);
    let rest = stream::split(&mut reader, &wanted, &mut put).map_err(CaptureError::Stream);
    // Of a stream that is not understood, too.
    io::copy(&mut reader, &mut io::sink()).map_err(QmpError::from)?;
    cancelled(cancel)?;
    rest
}

/// Waits for the stream's first page, or for QEMU to fail; whether a page came before the stream's end.
fn wait_first(qmp: &mut Qmp, is_first: &Receiver<()>) -> Result<bool, CaptureError> {
    let deadline = Instant::now() + FIRST_PAGE_MAX;
    loop {
        match is_first.recv_timeout(POLL) {
            Ok(()) => return Ok(true),
            Err(RecvTimeoutError::Disconnected) => return Ok(false),
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => pause::refuse_failed(qmp)?,
            Err(RecvTimeoutError::Timeout) => return Err(CaptureError::State { what: "not begun in time" }),
        }
    }
}

/// Refuses a machine with devices whose other processes write its memory.
fn refuse_writers(qmp: &mut Qmp) -> Result<(), CaptureError> {
    let (devices, networks) = (qmp.monitor("info qtree")?, qmp.monitor("info network")?);
    let device = devices.lines().find_map(|line| {
        let device = line.trim_start().strip_prefix("dev: ")?;
        ["vhost-", "vfio-"].iter().any(|kind| device.starts_with(kind)).then_some(device)
    });
    let network = || networks.lines().find(|line| line.contains("type=vhost-")).map(str::trim);
    match device.or_else(network) {
        Some(writer) => Err(CaptureError::Live {
            why: format!(
                "{writer} writes its memory behind QEMU's back (disks can be served over NBD instead, with rw)"
            ),
        }),
        None => Ok(()),
    }
}
