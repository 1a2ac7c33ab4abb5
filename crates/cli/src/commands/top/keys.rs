//! The keys that are pressed while a screen is watched: not shown, and read one by one.

use std::io::{IsTerminal, Stdin, stdin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// The terminal that keys come from, in a mode in which it neither shows them nor waits for the end of a line. Dropping it brings
/// the old mode back.
#[derive(Debug)]
pub(super) struct Keys {
    terminal: Stdin,
    before: Termios,
}

impl Keys {
    /// `None` where standard input is no terminal.
    pub(super) fn listen() -> Option<Self> {
        let terminal = stdin();
        let before = terminal.is_terminal().then(|| tcgetattr(&terminal).ok())??;
        let mut quiet = before.clone();
        // Ctrl-C stays a signal.
        quiet.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
        tcsetattr(&terminal, OptionalActions::Now, &quiet).ok()?;
        Some(Self { terminal, before })
    }

    /// Waits for `time`, or until `q` is pressed or a signal sets `stop`; whether it was one of these.
    pub(super) fn is_quit_pressed(keys: Option<&Self>, time: Duration, stop: &AtomicBool) -> bool {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if stop.load(Ordering::Relaxed) || left.is_zero() {
                return stop.load(Ordering::Relaxed);
            }
            let timeout =
                Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
            let mut watched: Vec<PollFd<'_>> =
                keys.iter().map(|keys| PollFd::new(&keys.terminal, PollFlags::IN)).collect();
            // A signal ends the wait, too.
            let Ok(ready) = poll(&mut watched, Some(&timeout)) else { continue };
            let mut key = [0];
            if let (1, Some(keys)) = (ready, keys) {
                match rustix::io::read(&keys.terminal, &mut key) {
                    Ok(1) if !key[0].eq_ignore_ascii_case(&b'q') => {}
                    _ => return true,
                }
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // A terminal that is gone has no mode.
        let _ = tcsetattr(&self.terminal, OptionalActions::Now, &self.before);
    }
}
