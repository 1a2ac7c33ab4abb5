//! `vmstrata vm restore`: a guest started from a snapshot.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use vmstrata_memory::capture::{CAPTURED, Captured, DEVICES};
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::restore::{BackendFile, Filled, Incoming, fill, restart, resume};
use vmstrata_memory::vault::{Snapshot, Want, Which};

use crate::args::VmRestoreArgs;
use crate::units::short_size;

/// How long QEMU may take until its monitor answers.
const START_MAX: Duration = Duration::from_secs(30);
/// How often the monitor's socket is looked for.
const POLL: Duration = Duration::from_millis(5);

/// Files that are removed when this is dropped: QEMU has them open by then, or never will.
struct Files(Vec<BackendFile>);

impl Drop for Files {
    fn drop(&mut self) {
        for file in &self.0 {
            // One that is gone already is as it should be.
            let _ = fs::remove_file(&file.path);
        }
    }
}

/// Starts the guest, and ends when its QEMU does.
///
/// # Errors
/// When the snapshot cannot be read, or QEMU does not take it.
pub(super) fn run(args: &VmRestoreArgs) -> Result<ExitCode> {
    let start = Instant::now();
    let vault = super::store::open(&args.vault)?;
    let which: Which = args.snapshot.parse()?;
    let snapshot = vault.snapshot(&which)?;
    let captured = captured(&snapshot)?;
    let devices = snapshot.blob(DEVICES).context("the snapshot has no devices")?;
    let monitor = super::monitor(&snapshot.info().guest, args.qmp.as_deref());
    let (files, filled) = memory(args, &snapshot, &captured)?;
    for problem in snapshot.problems() {
        eprintln!("vmstrata: warning: {problem}");
    }
    let (program, rest) = args.qemu.split_first().context("QEMU's command line")?;
    let arguments = restart(rest, &files.0, &monitor)?;
    // What a killed QEMU left behind would be taken for the new one's.
    let _ = fs::remove_file(&monitor);
    let mut qemu = Command::new(program).args(&arguments).spawn().with_context(|| program.clone())?;
    let incoming = Incoming { kind: &captured.machine, devices, ignore_shared: captured.ignore_shared };
    let begun = started(&mut qemu, &monitor)
        .and_then(|mut qmp| resume(&mut qmp, incoming, !args.paused).map_err(|error| anyhow!(error)));
    drop(files);
    if let Err(error) = begun {
        // It holds a part of a guest, which must not run.
        let _ = qemu.kill();
        let _ = qemu.wait();
        return Err(error);
    }
    told(&snapshot, filled, start.elapsed());
    drop(snapshot);
    let status = qemu.wait()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn captured(snapshot: &Snapshot) -> Result<Captured> {
    let bytes = snapshot.blob(CAPTURED).context("the snapshot does not say how its guest is started")?;
    serde_json::from_slice(bytes).context("the snapshot was taken by another version")
}

/// Makes the files of the guest's memory.
fn memory(args: &VmRestoreArgs, snapshot: &Snapshot, captured: &Captured) -> Result<(Files, Filled)> {
    let (id, pid) = (snapshot.info().id, std::process::id());
    let path =
        |backend: &str| args.memory_dir.join(format!("vmstrata-{id}-{pid}-{}", backend.replace('/', "_")));
    let mut files = Files(Vec::new());
    let mut open = Vec::new();
    for backend in &captured.backends {
        let path = path(&backend.id);
        open.push((create(&path)?, backend.bytes));
        files.0.push(BackendFile { id: backend.id.clone(), bytes: backend.bytes, path, share: true });
    }
    let sum: u64 = captured.backends.iter().map(|backend| backend.bytes).sum();
    ensure!(sum == snapshot.info().layout.bytes(), "the snapshot's memory is not that of its machine");
    let want = if args.no_cache { Want::Critical } else { Want::All };
    Ok((files, fill(snapshot, want, open)?))
}

/// A new file for this user alone: it holds all that the guest knows.
fn create(path: &PathBuf) -> Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path).with_context(|| path.display().to_string())
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

fn told(snapshot: &Snapshot, filled: Filled, took: Duration) {
    let info = snapshot.info();
    let memory = short_size(info.layout.bytes());
    let hidden = match filled.hidden {
        0 => String::new(),
        count => format!(", {count} pages of cache to be read again"),
    };
    eprintln!("vmstrata: {}: {memory} restored in {:.1} s{hidden}", info.title(), took.as_secs_f64());
}
