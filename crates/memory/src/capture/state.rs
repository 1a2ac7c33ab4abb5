//! Receiving what QEMU writes of its devices, through a pipe that it is handed.

use std::io::{self, PipeReader, PipeWriter, Read, pipe};
use std::os::fd::AsFd;
use std::thread::{Builder, JoinHandle};

use serde_json::json;

use super::error::CaptureError;
use crate::qmp::{Qmp, QmpError};

/// Most bytes of devices' state: video memory is a part of it.
pub const STATE_BYTES_MAX: u64 = 1 << 30;
/// What QEMU calls the descriptor.
const NAME: &str = "vmstrata-state";

/// The pipe that QEMU writes a guest's state into.
#[derive(Debug)]
pub struct Channel {
    reader: PipeReader,
    writer: PipeWriter,
}

impl Channel {
    /// A pipe that nobody uses yet.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = pipe()?;
        Ok(Self { reader, writer })
    }

    /// A second reading end, for a process that reads on when this one is killed: see [`super::Before`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn second_reader(&self) -> io::Result<PipeReader> {
        self.reader.try_clone()
    }

    /// Has QEMU migrate into the pipe; returns the pipe's other end.
    pub(super) fn migrate(self, qmp: &mut Qmp) -> Result<PipeReader, CaptureError> {
        qmp.give(NAME, self.writer.as_fd())?;
        // QEMU's copy is the only one from here on, so its end is the end of the stream.
        drop(self.writer);
        qmp.tell("migrate", json!({ "uri": format!("fd:{NAME}") }))?;
        Ok(self.reader)
    }
}

/// Collects a stream on a thread of its own.
///
/// # Errors
/// [`CaptureError::Thread`].
pub(super) fn collect(reader: PipeReader) -> Result<JoinHandle<io::Result<Vec<u8>>>, CaptureError> {
    let work = move || {
        let mut bytes = Vec::new();
        reader.take(STATE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    Builder::new().name("devices".into()).spawn(work).map_err(CaptureError::Thread)
}

/// What [`collect`] collected. The migration has ended, so there is nothing to wait for.
pub(super) fn collected(thread: JoinHandle<io::Result<Vec<u8>>>) -> Result<Vec<u8>, CaptureError> {
    let bytes = thread.join().expect("collecting does not panic").map_err(QmpError::from)?;
    match bytes.len() as u64 {
        0 => Err(CaptureError::State { what: "empty" }),
        len if len > STATE_BYTES_MAX => Err(CaptureError::State { what: "too long" }),
        _ => Ok(bytes),
    }
}
