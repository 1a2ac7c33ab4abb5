//! Ending in good order: what a restore made is of no use without its guest, and goes with it.
//!
//! A [`Guard`] knows each step before it is made. As long as the guest does not run, the guard kills QEMU and removes what there
//! is, whether this process fails, gets a signal or is killed. Later a signal is passed on to QEMU, and this process ends because
//! QEMU did.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use vmstrata_disk::snapshot::now_ns;

use super::super::guard::{Guard, MARK, Undo};

#[derive(Default)]
struct State {
    /// QEMU, from its start to its end.
    qemu: Option<Pid>,
    /// Whether its guest runs.
    begun: bool,
    /// In the order in which it was done.
    undo: Vec<Undo>,
    /// From the first step to undo on.
    guard: Option<Guard>,
    /// Signals that QEMU got.
    passed: u32,
}

impl State {
    fn told(&mut self) {
        let Some(qemu) = self.qemu.filter(|_| self.begun) else {
            drop(self.guard.take());
            eprintln!("vmstrata: error: told to end before the guest ran");
            std::process::exit(1);
        };
        self.passed += 1;
        // QEMU may be stuck in what the first signal has it do, such as writing to a disk that does not answer.
        let signal = if self.passed == 1 { Signal::TERM } else { Signal::KILL };
        let _ = kill_process(qemu, signal);
    }

    /// Tells the guard of a change.
    fn set(&mut self) -> Result<()> {
        let guard = match &mut self.guard {
            Some(guard) => guard,
            none => none.insert(Guard::start(Stdio::null(), Stdio::inherit())?),
        };
        guard.set(&self.undo)
    }
}

/// Watches over the end of this process. Dropped, it undoes what is left to undo.
pub(super) struct Ending(Arc<Mutex<State>>);

impl Ending {
    /// Begins to watch for signals.
    pub(super) fn watch() -> Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("watching for signals")?;
        let state = Arc::new(Mutex::new(State::default()));
        let of_thread = Arc::clone(&state);
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || signals.forever().for_each(|_| lock(&of_thread).told()))
            .context("starting the thread that watches for signals")?;
        Ok(Self(state))
    }

    /// Has `undo` carried out unless the guest runs. To be called before the step itself.
    pub(super) fn undo(&self, undo: Undo) -> Result<()> {
        let mut state = lock(&self.0);
        state.undo.push(undo);
        state.set()
    }

    /// Takes the newest step back, which was not made, or puts `instead` in its place.
    pub(super) fn change(&self, instead: Option<Undo>) -> Result<()> {
        let mut state = lock(&self.0);
        state.undo.pop();
        state.undo.extend(instead);
        state.set()
    }

    /// Starts QEMU.
    pub(super) fn start(&self, command: &mut Command) -> Result<Child> {
        let mark = format!("{}-{}", std::process::id(), now_ns());
        self.undo(Undo::Kill(mark.clone()))?;
        // Held, so that a signal comes before QEMU is started or finds it.
        let mut state = lock(&self.0);
        let child = command.env(MARK, mark).spawn()?;
        state.qemu = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(child)
    }

    /// The guest runs: signals are QEMU's from now on, and only what `goes` is to be undone.
    pub(super) fn begun(&self, goes: impl Fn(&Undo) -> bool) -> Result<()> {
        let mut state = lock(&self.0);
        state.begun = true;
        state.undo.retain(goes);
        state.set()
    }

    /// Undoes what is left to undo.
    pub(super) fn finish(&self) {
        let guard = lock(&self.0).guard.take();
        drop(guard);
    }

    /// Waits until QEMU has ended.
    pub(super) fn wait(&self, mut qemu: Child) -> io::Result<ExitStatus> {
        let pid = lock(&self.0).qemu;
        if let Some(pid) = pid {
            // Its process id is kept until no signal can be sent to it any more.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
        }
        lock(&self.0).qemu = None;
        qemu.wait()
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.finish();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
