//! All of the memory first, then the guest. QEMU starts meanwhile: it does not touch the memory before it has the devices.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use vmstrata_memory::capture::Captured;
use vmstrata_memory::restore::{BackendFile, Filled, fill};
use vmstrata_memory::vault::Snapshot;

use super::{Ending, Waiting};
use crate::args::VmRestoreArgs;

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

/// Restores the memory, starts the guest, and ends when its QEMU does.
pub(super) fn run(
    args: &VmRestoreArgs,
    snapshot: Snapshot,
    ending: &Ending,
    start: Instant,
) -> Result<ExitCode> {
    let captured = super::captured(&snapshot)?;
    let (files, open) = memory(args, &snapshot, &captured, ending)?;
    let qemu = Waiting::start(args, &snapshot, &captured, &files.0, ending)?;
    let filling = || -> Result<Filled> {
        Ok(fill(&snapshot, super::want(args), super::refiller(args, &snapshot)?.as_ref(), open)?)
    };
    let (qemu, filled) = std::thread::scope(|scope| {
        let filling = scope.spawn(filling);
        let qemu = qemu.ready();
        (qemu, filling.join())
    });
    let filled = filled.map_err(|_| anyhow!("what fills the memory has ended by a panic"))??;
    let qemu = qemu?.resume(args.paused)?;
    drop(files);
    super::told(&snapshot, filled, "restored", start.elapsed());
    drop(snapshot);
    Ok(super::exit_code(ending.wait(qemu)?))
}

/// Makes the files of the guest's memory, each with its backend's bytes, all zeros.
fn memory(
    args: &VmRestoreArgs,
    snapshot: &Snapshot,
    captured: &Captured,
    ending: &Ending,
) -> Result<(Files, Vec<(File, u64)>)> {
    let mut files = Files(Vec::new());
    let mut open = Vec::new();
    for backend in &captured.backends {
        let name = format!("{}-{}", super::stem(snapshot), super::file_name(backend));
        let path = args.memory_dir.join(name);
        ending.remove(path.clone());
        let file = create(&path)?;
        file.set_len(backend.bytes).with_context(|| path.display().to_string())?;
        open.push((file, backend.bytes));
        files.0.push(super::backend_file(backend, path, true));
    }
    Ok((files, open))
}

/// A new file for this user alone: it holds all that the guest knows.
pub(super) fn create(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path).with_context(|| path.display().to_string())
}
