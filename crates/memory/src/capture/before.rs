//! What a capture changes of a QEMU, for the guard that puts it back when the capturing process is killed.

use std::time::{Duration, Instant};

use super::error::CaptureError;
use super::live;
use super::pause::{self, cancel, go_on, wait_for_end};
use super::take::{IGNORE_SHARED, Mode};
use crate::qmp::{Qmp, QmpError};

/// How long QEMU may take to come to the end of what it was asked for.
const END_MAX: Duration = Duration::from_secs(3600);

/// How a QEMU was before a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Before {
    /// Whether the guest ran.
    pub ran: bool,
    /// The migration capability that the capture turns on, and that was off.
    pub capability: Option<String>,
}

impl Before {
    /// Asks a QEMU that is about to be captured.
    ///
    /// # Errors
    /// As a capture, for a guest that can be in none.
    pub fn of(qmp: &mut Qmp, mode: Mode) -> Result<Self, CaptureError> {
        let name = if mode == Mode::Live { live::BACKGROUND } else { IGNORE_SHARED };
        let capability = (!pause::is_set(qmp, name)?).then(|| name.to_owned());
        Ok(Self { ran: pause::runs(qmp)?, capability })
    }

    /// Puts it back after the process that captured is gone. Meanwhile somebody has to read the [`super::Channel`] to its
    /// end: a guest whose writes are tracked waits for its pages to be read.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn put_back(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        if !wait_for_end(qmp, Instant::now() + END_MAX)? {
            cancel(qmp)?;
        }
        if self.ran {
            go_on(qmp)?;
        }
        match &self.capability {
            Some(name) => pause::set_capability(qmp, name, false),
            None => Ok(()),
        }
    }
}
