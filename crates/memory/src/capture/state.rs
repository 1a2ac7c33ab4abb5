//! Receiving what QEMU writes of its devices, through a pipe that it is handed.

use std::io::{PipeReader, Read, pipe};
use std::os::fd::AsFd;
use std::thread::JoinHandle;

use serde_json::json;

use super::error::CaptureError;
use crate::qmp::{Qmp, QmpError};

/// Most bytes of devices' state: video memory is a part of it.
pub const STATE_BYTES_MAX: u64 = 1 << 30;
/// What QEMU calls the descriptor.
const NAME: &str = "vmstrata-state";

/// Has QEMU migrate into a pipe; returns the pipe's other end.
pub(super) fn migrate(qmp: &mut Qmp) -> Result<PipeReader, CaptureError> {
    let (reader, writer) = pipe().map_err(QmpError::from)?;
    qmp.give(NAME, writer.as_fd())?;
    // QEMU's copy is the only one from here on, so its end is the end of the stream.
    drop(writer);
    qmp.tell("migrate", json!({ "uri": format!("fd:{NAME}") }))?;
    Ok(reader)
}

/// Collects a stream on a thread of its own.
pub(super) fn collect(reader: PipeReader) -> JoinHandle<std::io::Result<Vec<u8>>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        reader.take(STATE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    })
}

/// What [`collect`] collected. The migration has ended, so there is nothing to wait for.
pub(super) fn collected(thread: JoinHandle<std::io::Result<Vec<u8>>>) -> Result<Vec<u8>, CaptureError> {
    let bytes = thread.join().expect("collecting does not panic").map_err(QmpError::from)?;
    match bytes.len() as u64 {
        0 => Err(CaptureError::State { what: "empty" }),
        len if len > STATE_BYTES_MAX => Err(CaptureError::State { what: "too long" }),
        _ => Ok(bytes),
    }
}
