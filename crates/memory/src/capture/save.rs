//! From a running guest to a snapshot in the vault.
//!
//! ```text
//!   begin (vault) ─► take: stop ─ disks ─ devices ─ copy ─ cont ─► introspection ─► pages by class ─► finish
//! ```
//!
//! Nothing is listed before `finish`; if it does not come to that, the guest runs on and the snapshot of its disks is
//! deleted again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::CaptureError;
use super::machine::Machine;
use super::take::{Control, Disks, Mode, Moment, take};
use crate::BoxError;
use crate::address::{Frame, PAGE_BYTES, Physical};
use crate::class::{ClassMap, PageClass};
use crate::disk::{OpenDisk, open_all};
use crate::hide::Hiding;
use crate::introspect::{Introspection, Processor};
use crate::qmp::Qmp;
use crate::ram::{Block, Ram};
use crate::refill::{Found, find};
use crate::vault::{Closing, DiskState, NewSnapshot, Policy, Saved, Vault, Writer};

/// The vault's name of the stream of devices.
pub const DEVICES: &str = "devices";
/// The vault's name of what [`Captured`] says.
pub const CAPTURED: &str = "capture";
/// Pages read at once.
const CHUNK_PAGES: usize = 256;

/// What finds out what a kernel uses its pages for: [`Introspection::of`], mostly.
pub type Introspect = fn(&dyn Ram, Option<Processor>) -> Introspection;

/// A snapshot to take.
#[derive(Clone, Debug)]
pub struct Request {
    /// What the guest is called.
    pub guest: String,
    /// What the snapshot is to be called.
    pub name: String,
    /// The instant, in ns since 1970, as the caller's clock says.
    pub taken_ns: u64,
    /// Keys and values.
    pub labels: Vec<(String, String)>,
    /// How it is to be kept.
    pub policy: Policy,
    /// What is done while the guest is held.
    pub mode: Mode,
    /// Finds out what the guest's kernel uses its pages for; without it, all are critical.
    pub introspect: Option<Introspect>,
    /// Opens the snapshot's disks: clean pages that are on them are not stored, but read from there; without it, all are
    /// stored.
    pub refill: Option<Arc<dyn OpenDisk>>,
}

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Report {
    /// What the vault says of it.
    pub saved: Saved,
    /// For how long the guest was held.
    pub pause: Duration,
    /// How long all of it took.
    pub took: Duration,
    /// The disks at that instant.
    pub disks: Vec<DiskState>,
    /// The guest's kernel, or why every page counts as critical.
    pub kernel: Result<String, String>,
}

/// What is kept of how a snapshot was taken: what it takes to start the guest again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Captured {
    /// The machine type, such as `pc-q35-7.2`.
    pub machine: String,
    /// The memory backends, in the order of their bytes.
    pub backends: Vec<CapturedBackend>,
    /// Whether the devices' stream leaves memory out that is in files.
    pub ignore_shared: bool,
}

/// A memory backend of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedBackend {
    /// QEMU's id of the object.
    pub id: String,
    /// Bytes.
    pub bytes: u64,
}

/// Takes a snapshot of the guest behind `qmp` into `vault`.
///
/// # Errors
/// [`CaptureError`]; the guest then runs on, nothing is listed, and the disks have no snapshot more.
pub fn snapshot(
    qmp: &mut Qmp,
    vault: &Arc<Vault>,
    request: &Request,
    disks: &mut dyn Disks,
    control: Control<'_>,
) -> Result<Report, CaptureError> {
    let done = attempt(qmp, vault, request, disks, control);
    if done.is_err() {
        disks.undo();
    }
    done
}

fn attempt(
    qmp: &mut Qmp,
    vault: &Arc<Vault>,
    request: &Request,
    disks: &mut dyn Disks,
    control: Control<'_>,
) -> Result<Report, CaptureError> {
    let (start, cancel) = (Instant::now(), control.cancel);
    let machine = Machine::inspect(qmp)?;
    let mut writer = vault.begin(request.of(&machine)).map_err(stored)?;
    let (mut hiding, mut kernel) = (Hiding::default(), Err("it was not asked".to_owned()));
    let mut store = |Moment { ram, processor, disks }: Moment<'_>| {
        let mut known = Known::default();
        match request.introspect.map(|introspect| introspect(ram, processor)) {
            Some(Introspection::Read { release, pages }) => {
                if let Some(open) = request.refill.as_deref() {
                    known.on_disk = find(ram, &pages, &open_all(open, disks));
                }
                (known.classes, hiding, kernel) = (pages.classes, pages.hiding, Ok(release));
            }
            Some(Introspection::Unreadable(why)) => kernel = Err(why.to_string()),
            None => {}
        }
        write(ram, &known, &mut writer, cancel)
    };
    let taken = take(qmp, &machine, request.mode, disks, &mut store, control)?;
    let captured = Captured::of(&machine, taken.ignore_shared).encode()?;
    let blobs = BTreeMap::from([(DEVICES.to_owned(), taken.devices), (CAPTURED.to_owned(), captured)]);
    let closing = Closing {
        taken_ns: request.taken_ns,
        labels: request.labels.clone(),
        disks: taken.disks.clone(),
        hiding,
        blobs,
    };
    if cancel.load(Ordering::Relaxed) {
        return Err(CaptureError::Cancelled);
    }
    let saved = writer.finish(closing).map_err(stored)?;
    Ok(Report { saved, pause: taken.pause, took: start.elapsed(), disks: taken.disks, kernel })
}

impl Request {
    fn of(&self, machine: &Machine) -> NewSnapshot {
        NewSnapshot {
            guest: self.guest.clone(),
            name: self.name.clone(),
            layout: machine.layout.clone(),
            policy: self.policy.clone(),
        }
    }
}

fn stored(error: crate::vault::VaultError) -> CaptureError {
    CaptureError::Store(error.into())
}

impl Captured {
    fn encode(&self) -> Result<Vec<u8>, CaptureError> {
        serde_json::to_vec(self).map_err(|error| CaptureError::Store(error.into()))
    }

    fn of(machine: &Machine, ignore_shared: bool) -> Self {
        let backend =
            |backend: &super::Backend| CapturedBackend { id: backend.id.clone(), bytes: backend.bytes };
        Self {
            machine: machine.kind.clone(),
            backends: machine.backends.iter().map(backend).collect(),
            ignore_shared,
        }
    }
}

/// What is known of a guest's pages: of those that nothing is known of, that they are critical.
#[derive(Default)]
struct Known {
    classes: ClassMap,
    on_disk: Found,
}

/// Gives every page to the vault, by what is known of it.
fn write(ram: &dyn Ram, known: &Known, writer: &mut Writer, cancel: &AtomicBool) -> Result<(), BoxError> {
    let mut bytes = vec![[0; PAGE_BYTES]; CHUNK_PAGES];
    for block in ram.layout().blocks() {
        for at in (0..block.len).step_by(CHUNK_PAGES * PAGE_BYTES) {
            if cancel.load(Ordering::Relaxed) {
                return Err(CaptureError::Cancelled.into());
            }
            write_chunk(ram, (block, at), known, &mut bytes, writer)?;
        }
    }
    Ok(())
}

/// Gives the pages of a chunk of a block; nothing is read of a chunk in which all pages are free.
fn write_chunk(
    ram: &dyn Ram,
    (block, at): (&Block, u64),
    known: &Known,
    bytes: &mut [[u8; PAGE_BYTES]],
    writer: &mut Writer,
) -> Result<(), BoxError> {
    let start = Physical::new(block.start.get() + at);
    let pages = usize::try_from((block.len - at) / PAGE_BYTES as u64).unwrap_or(usize::MAX).min(bytes.len());
    let first = Frame::of(start).get();
    let frames = || (first..).map(Frame::new).zip(0..pages);
    let buffer = bytes[..pages].as_flattened_mut();
    let is_read = frames().any(|(frame, _)| known.classes.get(frame) != PageClass::Free);
    let bytes = if is_read { ram.view(start, buffer)? } else { buffer }.as_chunks().0;
    for (frame, index) in frames() {
        let class = known.classes.get(frame);
        match known.on_disk.get(frame).filter(|_| class == PageClass::Clean) {
            Some(refill) => writer.refill(frame, refill.clone())?,
            None => writer.page(frame, class, &bytes[index])?,
        }
    }
    Ok(())
}
