//! `vmstrata vm restore`: a guest started from a snapshot.

mod disks;
mod eager;
mod ending;
mod lazy;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmstrata_memory::capture::{CAPTURED, Captured, CapturedBackend, DEVICES};
use vmstrata_memory::disk::open_all;
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::refill::Refiller;
use vmstrata_memory::restore::{BackendFile, Filled, Incoming, RestoreError, ready, restart, resume};
use vmstrata_memory::vault::{Snapshot, Vault, Want, Which};

use super::guard::Undo;
use super::states::{States, moved};
use crate::args::VmRestoreArgs;
use crate::audit::{self, What};
use crate::units::short_size;
use disks::GuestDisks;
use ending::Ending;

/// How long QEMU may take until its monitor answers.
const START_MAX: Duration = Duration::from_secs(30);
/// How often the monitor's socket is looked for.
const POLL: Duration = Duration::from_millis(1);

/// Starts the guest, and ends when its QEMU does.
///
/// # Errors
/// When the snapshot cannot be read, or QEMU does not take it.
pub(super) fn run(args: &VmRestoreArgs) -> Result<ExitCode> {
    let start = Instant::now();
    let vault = super::store::open(&args.vault)?;
    let which: Which = args.snapshot.parse()?;
    let done = restore(args, &vault, &which, start);
    // What is lost may be replaced by something older.
    done.map_err(|error| match error.downcast::<RestoreError>() {
        Ok(error) if error.is_loss() => {
            eprintln!(
                "vmstrata: {} cannot be restored: looking for an older snapshot that is whole",
                args.snapshot
            );
            error.with_older(&vault, &which).into()
        }
        Ok(error) => error.into(),
        Err(error) => error,
    })
}

fn restore(args: &VmRestoreArgs, vault: &Arc<Vault>, which: &Which, start: Instant) -> Result<ExitCode> {
    let snapshot = vault.snapshot(which).map_err(RestoreError::from)?;
    for problem in snapshot.problems() {
        eprintln!("vmstrata: warning: {problem}");
    }
    // A guest that is restored lazily would meet the loss only when it touches the page.
    snapshot.check_present().map_err(RestoreError::from)?;
    let ending = Ending::watch()?;
    let disks = GuestDisks::find(args, snapshot.info())?;
    let qemu = match &args.clone_disks {
        Some(dir) => {
            let what = What::of("vm_restore", []).object(snapshot.info().title());
            audit::change(what, |what| {
                let (qemu, clones) = disks.clone_all(dir.as_deref(), &ending)?;
                what.disks = clones;
                Ok(qemu)
            })?
        }
        None => {
            disks.check()?;
            args.qemu.clone()
        }
    };
    let args = VmRestoreArgs { qemu, backing: disks.backing()?, ..args.clone() };
    drop(disks);
    if args.lazy.lazy {
        lazy::run(&args, vault, snapshot, &ending, start)
    } else {
        eager::run(&args, snapshot, &ending, start)
    }
}

/// What the snapshot says of the machine.
fn captured(snapshot: &Snapshot) -> Result<Captured> {
    let bytes = snapshot.blob(CAPTURED).context("the snapshot does not say how its guest is started")?;
    let captured: Captured =
        serde_json::from_slice(bytes).context("the snapshot was taken by another version")?;
    let sum: u64 = captured.backends.iter().map(|backend| backend.bytes).sum();
    ensure!(sum == snapshot.info().layout.bytes(), "the snapshot's memory is not that of its machine");
    Ok(captured)
}

fn want(args: &VmRestoreArgs) -> Want {
    if args.no_cache { Want::Critical } else { Want::All }
}

/// What reads pages of cache from the disks, unless there are none to be read.
fn refiller<'a>(args: &VmRestoreArgs, snapshot: &'a Snapshot) -> Result<Option<Refiller<'a>>> {
    let states = moved(&snapshot.info().disks, &args.disks)?;
    if args.no_cache || args.no_refill {
        return Ok(None);
    }
    let table = snapshot.refill()?;
    if table.is_empty() {
        return Ok(None);
    }
    Ok(Some(Refiller::new(table, open_all(&States::new(&args.backing, &args.server)?, &states))))
}

/// What files of this restore are called.
fn stem(snapshot: &Snapshot) -> String {
    format!("vmstrata-{}-{}", snapshot.info().id, std::process::id())
}

/// The file that is to be `backend`.
fn backend_file(backend: &CapturedBackend, path: PathBuf, share: bool) -> BackendFile {
    BackendFile { id: backend.id.clone(), bytes: backend.bytes, path, share }
}

/// The id of a backend as a name of a file.
fn file_name(backend: &CapturedBackend) -> String {
    backend.id.replace('/', "_")
}

/// A QEMU that was started on a snapshot's memory and waits for the guest's devices. One that does not get them is ended: it
/// would have a part of a guest, which must not run.
struct Waiting<'a> {
    /// `None` once its guest runs.
    qemu: Option<Child>,
    monitor: PathBuf,
    incoming: Incoming<'a>,
    ending: &'a Ending,
}

impl<'a> Waiting<'a> {
    /// Starts it on `files`. Until the devices are loaded it neither reads nor writes them.
    fn start(
        args: &VmRestoreArgs,
        snapshot: &'a Snapshot,
        captured: &'a Captured,
        files: &[BackendFile],
        ending: &'a Ending,
    ) -> Result<Self> {
        let devices = snapshot.blob(DEVICES).context("the snapshot has no devices")?;
        let incoming = Incoming { kind: &captured.machine, devices, ignore_shared: captured.ignore_shared };
        let monitor = super::monitor(&snapshot.info().guest, args.qmp.as_deref());
        let (program, rest) = args.qemu.split_first().context("QEMU's command line")?;
        let arguments = restart(rest, files, &monitor)?;
        // What a killed QEMU left behind would be taken for the new one's.
        let _ = fs::remove_file(&monitor);
        let mut command = Command::new(program);
        let qemu = ending.start(command.args(&arguments)).with_context(|| program.clone())?;
        Ok(Self { qemu: Some(qemu), monitor, incoming, ending })
    }

    /// Waits until it can be given the devices. Its memory need not be in place yet.
    fn ready(mut self) -> Result<Ready<'a>> {
        let mut qmp = started(self.qemu.as_mut().expect("not resumed yet"), &self.monitor)?;
        ready(&mut qmp, self.incoming)?;
        Ok(Ready { waiting: self, qmp })
    }
}

/// A QEMU that can be given the devices.
struct Ready<'a> {
    waiting: Waiting<'a>,
    qmp: Qmp,
}

impl Ready<'_> {
    /// Gives it the devices, and lets the guest go on unless it is to stay `paused`. Its memory is in place. Then only what
    /// `goes` is to be undone.
    fn resume(mut self, paused: bool, goes: impl Fn(&Undo) -> bool) -> Result<Child> {
        resume(&mut self.qmp, self.waiting.incoming, !paused)?;
        self.waiting.ending.begun(goes)?;
        Ok(self.waiting.qemu.take().expect("not resumed yet"))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(mut qemu) = self.qemu.take() {
            let _ = qemu.kill();
            let _ = self.ending.wait(qemu);
        }
    }
}

/// Waits until QEMU's monitor answers.
fn started(qemu: &mut Child, monitor: &Path) -> Result<Qmp> {
    let deadline = Instant::now() + START_MAX;
    loop {
        if let Ok(qmp) = Qmp::connect(monitor, super::PATIENCE) {
            return Ok(qmp);
        }
        if let Some(status) = qemu.try_wait()? {
            bail!("QEMU did not start: {status}");
        }
        ensure!(Instant::now() < deadline, "{}: QEMU's monitor does not answer", monitor.display());
        std::thread::sleep(POLL);
    }
}

/// What is said when the guest runs; `how` is `restored`, for example.
fn told(snapshot: &Snapshot, filled: Filled, how: &str, took: Duration) {
    let info = snapshot.info();
    let memory = short_size(info.layout.bytes());
    let refilled = match filled.refilled {
        0 => String::new(),
        count => format!(", {count} pages of cache from its disks"),
    };
    let hidden = match filled.hidden {
        0 => String::new(),
        count => format!(", {count} pages of cache to be read again"),
    };
    eprintln!("vmstrata: {}: {memory} {how} in {:.1} s{refilled}{hidden}", info.title(), took.as_secs_f64());
}

/// QEMU's, as far as an exit code can be passed on.
fn exit_code(status: ExitStatus) -> ExitCode {
    status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}
