//! Waiting for a child process to serve.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long to wait before it is asked again.
const PAUSE: Duration = Duration::from_micros(200);

/// Asks a child process until it answers.
///
/// # Errors
/// A child that has ended, or did not answer in time, with what it `said`.
pub(crate) fn wait_for_answer<T>(
    child: &mut Child,
    who: &str,
    within: Duration,
    said: impl Fn() -> String,
    mut ask: impl FnMut() -> Result<T>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let error = match ask() {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        if let Some(status) = child.try_wait()? {
            bail!("{who} ended with {status}: {}", said());
        }
        if start.elapsed() > within {
            return Err(error.context(format!("{who} does not answer: {}", said())));
        }
        std::thread::sleep(PAUSE);
    }
}
