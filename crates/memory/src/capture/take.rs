//! One capture from beginning to end: the guest held, its disks, devices and memory taken, the guest let go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::copy::StillRam;
use super::error::CaptureError;
use super::live::take_live;
use super::machine::Machine;
use super::pause::{Pause, wait_migrated, with_capability};
use super::processor::processor;
use super::state::{self, Channel};
use crate::BoxError;
use crate::introspect::Processor;
use crate::qmp::Qmp;
use crate::ram::Ram;
use crate::vault::DiskState;

/// How long QEMU may take to save its devices.
const DEVICES_MAX: Duration = Duration::from_secs(60);
/// Leaves memory that others can read out of the stream of the devices.
pub(crate) const IGNORE_SHARED: &str = "x-ignore-shared";

/// What is done while the guest is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Memory is copied to this process's memory; storing it comes after the pause.
    #[default]
    Copy,
    /// Memory is stored: needs no memory on the host, for a pause as long as storing takes.
    Stop,
    /// QEMU copies each page before the guest changes it: the shortest pause, for guests without vhost-user devices.
    Live,
}

/// The guest's disks, snapshotted at the instant in which its memory is taken.
pub trait Disks {
    /// Takes a snapshot of all of them; the guest is held.
    ///
    /// # Errors
    /// Whatever the server of the disks says; the capture then fails.
    fn snapshot(&mut self) -> Result<Vec<DiskState>, BoxError>;

    /// Deletes it again, if there is one, because the capture failed.
    fn undo(&mut self);
}

/// What a caller has in hand while a capture goes on.
#[derive(Debug)]
pub struct Control<'a> {
    /// Set when the caller gives up.
    pub cancel: &'a AtomicBool,
    /// What QEMU writes into; a process that outlives this one may hold its second reader.
    pub channel: Channel,
}

/// A capture that is complete.
#[derive(Clone, Debug)]
pub struct Taken {
    /// QEMU's stream of the guest's devices.
    pub devices: Vec<u8>,
    /// The disks at the same instant.
    pub disks: Vec<DiskState>,
    /// For how long the guest was held.
    pub pause: Duration,
    /// Whether the devices' stream leaves out memory that is in files; else it says of it only that it is there.
    pub ignore_shared: bool,
    /// The guest's first processor at that instant, if it is known.
    pub processor: Option<Processor>,
}

/// A guest at the one instant of a capture.
#[derive(Clone, Copy)]
pub struct Moment<'a> {
    /// Its memory.
    pub ram: &'a dyn Ram,
    /// Its first processor, if that is known.
    pub processor: Option<Processor>,
    /// Its disks.
    pub disks: &'a [DiskState],
}

impl Taken {
    /// The guest at the instant of this capture, with its memory as it was.
    pub(super) fn moment<'a>(&'a self, ram: &'a dyn Ram) -> Moment<'a> {
        Moment { ram, processor: self.processor, disks: &self.disks }
    }
}

/// Gets what is to be stored, after the pause or in it.
pub type Store<'a> = dyn FnMut(Moment<'_>) -> Result<(), BoxError> + 'a;

/// Takes the guest behind `qmp`, which is `machine`. `store` gets the memory as it was at the one instant.
///
/// The guest goes on after the pause, or at any failure. Undoing the snapshot of the disks is left to the caller, for whom
/// more may fail.
///
/// # Errors
/// Whatever failed first; `control.cancel` ends a capture with [`CaptureError::Cancelled`].
pub fn take(
    qmp: &mut Qmp,
    machine: &Machine,
    mode: Mode,
    disks: &mut dyn Disks,
    store: &mut Store<'_>,
    control: Control<'_>,
) -> Result<Taken, CaptureError> {
    let Control { cancel, channel } = control;
    if mode == Mode::Live {
        return take_live(qmp, machine, disks, store, Control { cancel, channel });
    }
    let ram = machine.open()?;
    let mut copy = (mode == Mode::Copy).then(|| StillRam::prepare(&ram)).transpose()?;
    let held = |pause: &mut Pause<'_>| -> Result<_, CaptureError> {
        let disks = disks.snapshot().map_err(CaptureError::Disks)?;
        let processor = processor(pause.qmp());
        let devices = devices(pause.qmp(), channel, cancel)?;
        match &mut copy {
            Some(copy) => copy.fill(&ram)?,
            None => {
                store(Moment { ram: &ram, processor, disks: &disks }).map_err(CaptureError::Store)?;
            }
        }
        cancelled(cancel)?;
        Ok((devices, disks, processor))
    };
    let taken = with_capability(qmp, IGNORE_SHARED, |qmp| {
        let mut pause = Pause::begin(qmp)?;
        let (devices, disks, processor) = held(&mut pause)?;
        Ok(Taken { devices, disks, pause: pause.end()?, ignore_shared: true, processor })
    })?;
    if let Some(copy) = &copy {
        store(taken.moment(copy)).map_err(CaptureError::Store)?;
    }
    Ok(taken)
}

/// The state of the devices of a guest that is held.
fn devices(qmp: &mut Qmp, channel: Channel, cancel: &AtomicBool) -> Result<Vec<u8>, CaptureError> {
    let reader = channel.migrate(qmp)?;
    let collecting = state::collect(reader)?;
    wait_migrated(qmp, Instant::now() + DEVICES_MAX, || cancelled(cancel))?;
    state::collected(collecting)
}

pub(super) fn cancelled(cancel: &AtomicBool) -> Result<(), CaptureError> {
    if cancel.load(Ordering::Relaxed) { Err(CaptureError::Cancelled) } else { Ok(()) }
}
