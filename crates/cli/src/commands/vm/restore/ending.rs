//! Ending in good order when told to: files are removed, and QEMU ends too.
//!
//! Before the guest runs, a signal ends a QEMU that waits for it, removes what was made so far, and ends this process. After
//! that it is passed on: QEMU ends as it does when it gets the signal itself, and this process ends because QEMU did.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// What a signal is to do.
#[derive(Default)]
struct State {
    /// QEMU, from its start to its end.
    qemu: Option<Pid>,
    /// Whether its guest runs.
    begun: bool,
    /// Removes what is of no use without it.
    undo: Vec<Box<dyn Fn() + Send>>,
    /// Signals that QEMU got.
    passed: u32,
}

impl State {
    fn told(&mut self) {
        let Some(qemu) = self.qemu.filter(|_| self.begun) else {
            self.qemu.into_iter().for_each(end);
            self.undo.iter().for_each(|undo| undo());
            eprintln!("vmstrata: error: told to end before the guest ran");
            std::process::exit(1);
        };
        self.passed += 1;
        // QEMU may be stuck in what the first signal has it do, such as writing to a disk that does not answer.
        let signal = if self.passed == 1 { Signal::TERM } else { Signal::KILL };
        let _ = kill_process(qemu, signal);
    }
}

/// Kills a child and waits until it is gone.
fn end(child: Pid) {
    let _ = kill_process(child, Signal::KILL);
    wait_for(child, WaitIdOptions::EXITED);
}

/// Waits for a child's end; it is reaped unless `options` say otherwise.
fn wait_for(child: Pid, options: WaitIdOptions) {
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(child), options) {}
}

/// Watches for signals that end this process.
pub(super) struct Ending(Arc<Mutex<State>>);

impl Ending {
    /// Begins to watch.
    pub(super) fn watch() -> Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("watching for signals")?;
        let state = Arc::new(Mutex::new(State::default()));
        let of_thread = Arc::clone(&state);
        std::thread::spawn(move || signals.forever().for_each(|_| lock(&of_thread).told()));
        Ok(Self(state))
    }

    /// Has `undo` called if this process is to end before the guest runs. To be called before there is something to undo.
    pub(super) fn undo(&self, undo: impl Fn() + Send + 'static) {
        lock(&self.0).undo.push(Box::new(undo));
    }

    /// Has a file removed if this process is to end before the guest runs. To be called before the file is made.
    pub(super) fn remove(&self, file: PathBuf) {
        // One that was not made yet, or is gone, is as it should be.
        self.undo(move || drop(std::fs::remove_file(&file)));
    }

    /// Starts QEMU.
    pub(super) fn start(&self, command: &mut Command) -> io::Result<Child> {
        // Held, so that a signal comes before QEMU is started or finds it.
        let mut state = lock(&self.0);
        let child = command.spawn()?;
        state.qemu = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(child)
    }

    /// Signals are QEMU's from now on: its guest runs.
    pub(super) fn begun(&self) {
        lock(&self.0).begun = true;
    }

    /// Whether its guest runs, or ran.
    pub(super) fn has_begun(&self) -> bool {
        lock(&self.0).begun
    }

    /// Waits until QEMU has ended.
    pub(super) fn wait(&self, mut qemu: Child) -> io::Result<ExitStatus> {
        let pid = lock(&self.0).qemu;
        if let Some(pid) = pid {
            // Its process id is kept until no signal can be sent to it any more.
            wait_for(pid, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        }
        lock(&self.0).qemu = None;
        qemu.wait()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
