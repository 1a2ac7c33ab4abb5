//! All of the memory first, then the guest. QEMU starts meanwhile: it does not touch the memory before it has the devices.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use vmstrata_memory::capture::Captured;
use vmstrata_memory::restore::{BackendFile, Filled, fill};
use vmstrata_memory::vault::Snapshot;

use super::{Ending, Undo, Waiting};
use crate::args::VmRestoreArgs;

/// Restores the memory, starts the guest, and ends when its QEMU does.
pub(super) fn run(
    args: &VmRestoreArgs,
    snapshot: Snapshot,
    ending: &Ending,
    start: Instant,
) -> Result<ExitCode> {
    let captured = super::captured(&snapshot)?;
    let (files, open) = memory(args, &snapshot, &captured, ending)?;
    let qemu = Waiting::start(args, &snapshot, &captured, &files, ending)?;
    let filling = || -> Result<Filled> {
        Ok(fill(&snapshot, super::want(args), super::refiller(args, &snapshot)?.as_ref(), open)?)
    };
    let (qemu, filled) = std::thread::scope(|scope| -> Result<_> {
        let filling = std::thread::Builder::new().name("fill".into()).spawn_scoped(scope, filling);
        let filling = filling.context("starting the thread that fills the memory")?;
        let qemu = qemu.ready();
        Ok((qemu, filling.join()))
    })?;
    let filled = filled.map_err(|_| anyhow!("what fills the memory has ended by a panic"))??;
    // QEMU has the files open. It goes on without this process.
    let qemu = qemu?.resume(args.paused, |undo| matches!(undo, Undo::Remove(_)))?;
    ending.finish();
    super::told(&snapshot, filled, "restored", start.elapsed());
    drop(snapshot);
    Ok(super::exit_code(ending.wait(qemu)?))
}

/// Files, each with its bytes.
type OpenFiles = Vec<(File, u64)>;

/// Makes the files of the guest's memory, each with its backend's bytes, all zeros.
fn memory(
    args: &VmRestoreArgs,
    snapshot: &Snapshot,
    captured: &Captured,
    ending: &Ending,
) -> Result<(Vec<BackendFile>, OpenFiles)> {
    let mut files = Vec::new();
    let mut open = Vec::new();
    for backend in &captured.backends {
        let name = format!("{}-{}", super::stem(snapshot), super::file_name(backend));
        let path = args.memory_dir.join(name);
        ending.undo(Undo::Remove(path.clone()))?;
        let file = create(&path)?;
        file.set_len(backend.bytes).with_context(|| path.display().to_string())?;
        open.push((file, backend.bytes));
        files.push(super::backend_file(backend, path, true));
    }
    Ok((files, open))
}

/// A new file for this user alone: it holds all that the guest knows.
pub(super) fn create(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path).with_context(|| path.display().to_string())
}
