//! The guest first, then its memory.

use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use vmstrata_memory::PAGE_BITS;
use vmstrata_memory::capture::Captured;
use vmstrata_memory::restore::BackendFile;
use vmstrata_memory::restore::lazy::{Lazily, LazyMemory, Left, MemoryFile, Mounted, prepare};
use vmstrata_memory::vault::{Snapshot, Vault};

use super::{Ending, Undo, Waiting};
use crate::args::VmRestoreArgs;
use crate::output::percent;
use crate::units::short_size;

/// How often is said how far the background is.
const TELL: Duration = Duration::from_secs(30);
/// When pages that could not be read are tried again in the background.
const AGAIN: Duration = Duration::from_secs(5);
/// `f_type` of huge pages' file system (linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Starts the guest, serves its memory, and ends when its QEMU does.
pub(super) fn run(
    args: &VmRestoreArgs,
    vault: &Arc<Vault>,
    snapshot: Snapshot,
    ending: &Ending,
    start: Instant,
) -> Result<ExitCode> {
    let captured = super::captured(&snapshot)?;
    let title = snapshot.info().title();
    let snapshot = Arc::new(snapshot);
    let (cache_time, patience) = (args.lazy.cache_time, args.lazy.page_patience);
    // Disks that may have changed have what the guest reads, not what its memory has of them.
    let lazily = Lazily { want: super::want(args), cache_time, refill_later: !args.force, patience };
    let local = local_file(&args.memory_dir, &super::stem(&snapshot), ending)?;
    let (memory, filled) = {
        let refiller = super::refiller(args, &snapshot)?;
        prepare(Arc::clone(vault), Arc::clone(&snapshot), refiller, local, lazily)?
    };
    let memory = Arc::new(memory);
    let dir = args.memory_dir.join(super::stem(&snapshot));
    ending.undo(Undo::Detach(dir.clone()))?;
    let files = backends(args, &snapshot, &captured, &dir);
    let mut mounted = mount(&memory, &files, &dir)?;
    let qemu = Waiting::start(args, &snapshot, &captured, &files, ending)?.ready()?;
    // It cannot go on without this process, which has its memory.
    let goes = |undo: &Undo| matches!(undo, Undo::Kill(_) | Undo::Detach(_));
    let qemu = qemu.resume(args.paused, goes)?;
    mounted.detach().with_context(|| dir.display().to_string())?;
    super::told(&snapshot, filled, "restored lazily", start.elapsed());
    tell_left(&title, memory.left());
    drop(snapshot);
    let stop = AtomicBool::new(false);
    let status = std::thread::scope(|scope| -> Result<_> {
        let work = || fill(&memory, &title, args.lazy.fill_rate, &stop);
        let filling = std::thread::Builder::new().name("fill".into()).spawn_scoped(scope, work);
        if let Err(error) = filling {
            eprintln!("vmstrata: warning: {title}: only what the guest touches is read: no thread: {error}");
        }
        let status = ending.wait(qemu);
        stop.store(true, Ordering::Relaxed);
        Ok(status?)
    })?;
    tell_left(&title, memory.left());
    Ok(super::exit_code(status))
}

/// A file that goes when this process does: it comes to hold all that the guest knows.
fn local_file(dir: &Path, stem: &str, ending: &Ending) -> Result<File> {
    let kind = rustix::fs::statfs(dir).with_context(|| dir.display().to_string())?.f_type;
    if kind == HUGETLBFS_MAGIC {
        bail!(
            "{}: huge pages cannot be restored lazily: leave out --lazy, or name another --memory-dir",
            dir.display()
        );
    }
    let path = dir.join(format!("{stem}.pages"));
    ending.undo(Undo::Remove(path.clone()))?;
    let file = super::eager::create(&path)?;
    fs::remove_file(&path).with_context(|| path.display().to_string())?;
    Ok(file)
}

fn mount(memory: &Arc<LazyMemory>, files: &[BackendFile], dir: &Path) -> Result<Mounted> {
    let file = |file: &BackendFile| {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        MemoryFile { name, bytes: file.bytes }
    };
    Mounted::new(Arc::clone(memory), files.iter().map(file).collect(), dir).with_context(|| {
        format!(
            "{}: cannot be mounted: --lazy needs /dev/fuse, and fusermount3 (package fuse3) unless root",
            dir.display()
        )
    })
}

/// Where QEMU is to find its memory. Servers of devices and later snapshots must see what the guest writes; otherwise it writes
/// to memory of its own, and nothing has to be written back.
fn backends(args: &VmRestoreArgs, snapshot: &Snapshot, captured: &Captured, dir: &Path) -> Vec<BackendFile> {
    let share = args.lazy.shared || args.qemu.iter().any(|word| word.contains("vhost-user"));
    // Names that nothing else of QEMU's has: a snapshot of the restored guest finds the file by it.
    let path = |backend| dir.join(format!("{}-{}", super::stem(snapshot), super::file_name(backend)));
    let file = |backend| super::backend_file(backend, path(backend), share);
    captured.backends.iter().map(file).collect()
}

/// Reads what the guest did not ask for, until all is here.
fn fill(memory: &LazyMemory, title: &str, rate: Option<u64>, stop: &AtomicBool) {
    let (start, mut told) = (Instant::now(), Instant::now());
    if rate == Some(0) {
        return;
    }
    let mut tell = |left: Left| {
        if told.elapsed() > TELL {
            told = Instant::now();
            tell_left(title, left);
        }
    };
    while !memory.fill(rate, stop, &mut tell) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        eprintln!("vmstrata: warning: {title}: {} pages cannot be read now", memory.left().lost);
        let again = Instant::now() + AGAIN;
        while Instant::now() < again {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let took = start.elapsed().as_secs_f64();
    eprintln!(
        "vmstrata: {title}: all of its memory is here after {took:.1} s; the vault is no longer needed"
    );
}

fn tell_left(title: &str, left: Left) {
    let size = |pages: u64| short_size(pages << PAGE_BITS);
    let read = left.of - left.pages;
    let share = percent(read, left.of);
    eprintln!("vmstrata: {title}: {} of {} read ({share:.0} %)", size(read), size(left.of));
}
