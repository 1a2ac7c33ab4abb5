//! Ending on SIGTERM and SIGINT: the first asks, the second insists.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::TERM_SIGNALS;
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::error::Error;

/// What a shell reports for a process that SIGTERM ended; used when the second signal cuts the ending short.
const EXIT_INSISTED: i32 = 143;

/// Whether someone has asked for the end, by a signal or a request.
static ASKED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Ends this process as a signal from outside does, once: a request never insists, as a second signal does.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn ask() -> Result<(), Error> {
    static REQUESTED: AtomicBool = AtomicBool::new(false);
    if REQUESTED.swap(true, Ordering::AcqRel) || ASKED.load(Ordering::Acquire) {
        return Ok(());
    }
    kill_process(getpid(), Signal::TERM)
        .map_err(|errno| Error::System { action: "end the server", source: errno.into() })
}

/// Waits for the first signal; from then on the next one ends the process at once.
#[derive(Debug)]
pub(crate) struct Shutdown {
    signals: Signals,
}

impl Shutdown {
    /// Takes over the terminating signals. Call before anything is opened, so that none of them finds half a server.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub(crate) fn new() -> io::Result<Self> {
        for signal in TERM_SIGNALS {
            // Order matters: the handler that exits must see the flag as it was before this signal.
            flag::register_conditional_shutdown(*signal, EXIT_INSISTED, Arc::clone(&ASKED))?;
            flag::register(*signal, Arc::clone(&ASKED))?;
        }
        Ok(Self { signals: Signals::new(TERM_SIGNALS)? })
    }

    /// Sleeps until the first signal and returns its name.
    pub(crate) fn wait(&mut self) -> &'static str {
        let signal = self.signals.forever().next();
        signal.and_then(signal_hook::low_level::signal_name).unwrap_or("signal")
    }
}
