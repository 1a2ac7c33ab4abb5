//! `vmstrata serve`: opens disks, opens doors to them, says so, and ends cleanly when told to.
//!
//! ```text
//!   signals ─► limits ─► Resources ─► Disk ... ─► doors (vhost-user, NBD) ─► ready report, notify
//!                                                   │ SIGTERM
//!   exit code ◄─ close every disk ◄─ doors drained ◄┘
//! ```
//!
//! Invariant: a disk that was opened is closed, whatever fails after it; only a crash or a second signal leaves
//! one open, and then its journal replays.

mod doors;
mod limits;
mod notify;
mod ready;
mod runtime_dir;
mod shutdown;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};

use self::doors::Doors;
use self::shutdown::Shutdown;
use crate::args::{EXIT_USAGE, ResourceArgs, ServeArgs};
use crate::disk_spec::check_together;
use crate::output::counted;

/// Fewer workers than this and one slow flush would hold up everything that may block.
const WORKERS_MIN: usize = 2;

/// An open disk and what it is called.
#[derive(Debug)]
struct Served {
    name: String,
    disk: Arc<Disk>,
}

/// Serves until a signal.
///
/// # Errors
/// When a disk or door cannot be opened, or a disk cannot be closed clean.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    if let Err(error) = check_together(&args.disks, &args.vhost_user, &args.nbd) {
        eprintln!("vmstrata: error: {error:#}\n\nFor more information, try 'vmstrata serve --help'.");
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    let mut shutdown = Shutdown::new()?;
    let resources = Resources::new(resource_options(&args.resources)?);
    let mut disks = Vec::new();
    let served = open_disks(args, &resources, &mut disks).and_then(|()| serve(args, &disks, &mut shutdown));
    let closed = close_disks(&disks);
    served.and(closed)?;
    tracing::info!("ended clean");
    Ok(ExitCode::SUCCESS)
}

fn resource_options(args: &ResourceArgs) -> Result<ResourceOptions> {
    let open_files = limits::raise_open_files();
    let processors = std::thread::available_parallelism().map_or(WORKERS_MIN, usize::from);
    Ok(ResourceOptions {
        metadata_cache_bytes: args.metadata_cache,
        max_open_files: args
            .max_open_files
            .map_or_else(|| limits::layer_files(open_files), |files| files as usize),
        workers: args.workers.map_or(processors.max(WORKERS_MIN), |workers| workers as usize),
        journal_dir: Some(runtime_dir::prepare(args.runtime_dir.as_deref())?),
    })
}

/// Opens every disk into `disks`, which on an error holds those that were opened before it.
fn open_disks(args: &ServeArgs, resources: &Arc<Resources>, disks: &mut Vec<Served>) -> Result<()> {
    for spec in &args.disks {
        let options = OpenOptions {
            read_only: spec.read_only,
            cache: spec.cache,
            allow_backing: args.backing.allow_backing.clone(),
            format: spec.format,
        };
        let disk = Disk::open(&spec.path, &options, resources)?;
        let layers = counted(disk.layers().len() as u64, "layer");
        tracing::info!(disk = spec.name, path = %spec.path.display(), bytes = disk.size(), "opened: {layers}");
        disks.push(Served { name: spec.name.clone(), disk });
    }
    Ok(())
}

fn serve(args: &ServeArgs, disks: &[Served], shutdown: &mut Shutdown) -> Result<()> {
    let doors = Doors::open(args, disks)?;
    if let Err(error) = ready::Report::new(args, disks, &doors).print(args.json) {
        // Serving is the job; a reader that went away is no reason to refuse it.
        tracing::warn!("cannot print the ready report: {error}");
    }
    notify::ready(args.ready_fd, &counted(disks.len() as u64, "disk"))?;
    let signal = shutdown.wait();
    tracing::info!("{signal}: finishing what is in flight; a second signal ends at once");
    notify::stopping();
    doors.close()
}

fn close_disks(disks: &[Served]) -> Result<()> {
    let failures = disks.iter().filter_map(|Served { name, disk }| {
        let error = disk.close().err()?;
        tracing::error!(disk = name, "cannot be closed clean: {error}");
        Some(format!("disk '{name}' could not be closed clean: {error}"))
    });
    let failures: Vec<String> = failures.collect();
    if failures.is_empty() { Ok(()) } else { bail!(failures.join("; ")) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vmstrata_disk::{CreateOptions, LocalFiles, Opened, Opener, Role, create};
    use vmstrata_store::{FaultPlan, FaultStore, Gate, OperationKind, StoreId};
    use vmstrata_types::{GuestOffset, GuestRange};

    use super::*;

    /// Opens files whose operations may be made to fail.
    #[derive(Debug)]
    struct Faulty(Arc<FaultPlan>);

    impl Opener for Faulty {
        fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
            let opened = LocalFiles.open(path, role, gate)?;
            let store = Arc::new(FaultStore::new(opened.store, &self.0, StoreId::default()));
            Ok(Opened { store, ..opened })
        }
    }

    fn open(path: &Path, resources: &Arc<Resources>) -> Served {
        let size = Some(1 << 20);
        create(path, &CreateOptions { size, ..CreateOptions::default() }).unwrap();
        let disk = Disk::open(path, &OpenOptions::default(), resources).unwrap();
        disk.write_zeroes(GuestRange::new(GuestOffset::ZERO, 65536), false).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        Served { name, disk }
    }

    #[test]
    fn a_disk_that_cannot_be_closed_clean_is_an_error_and_the_others_are_closed_all_the_same() {
        const EIO: i32 = 5;
        let dir = tempfile::tempdir().unwrap();
        let plan = FaultPlan::new();
        let broken = Resources::with_opener(ResourceOptions::default(), Arc::new(Faulty(Arc::clone(&plan))));
        let sound = Resources::new(ResourceOptions::default());
        let disks =
            [open(&dir.path().join("bad.qcow2"), &broken), open(&dir.path().join("good.qcow2"), &sound)];
        plan.fail_from(Some(OperationKind::Flush), 0, EIO);
        let error = close_disks(&disks).unwrap_err().to_string();
        assert!(error.contains("disk 'bad' could not be closed clean"), "{error}");
        assert!(!error.contains("good"), "{error}");
        assert!(disks[1].disk.flush().is_err(), "the sound disk is still open");
    }
}
