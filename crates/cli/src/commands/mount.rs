//! `vmstrata mount`: a disk as a file, until it is unmounted.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use rustix::io::Errno;
use serde::Serialize;
use signal_hook::consts::TERM_SIGNALS;
use signal_hook::flag;
use signal_hook::iterator::Signals;
use vmstrata_disk::{Disk, OpenOptions, directory_of};
use vmstrata_export::fuse::{self, About, Detached, Directory, File, Mount, Node, Opened, Options};
use vmstrata_types::path_to_text;

use super::snapshot::resources;
use super::states::{explain, resolve};
use crate::args::{MountArgs, MountGuardArgs};
use crate::output::{print, print_json_line};
use crate::units::short_size;

/// The file in a directory.
const FILE_NAME: &str = "disk";
/// What a shell reports for a process that SIGTERM ended.
const EXIT_INSISTED: i32 = 143;

/// What is mounted, for scripts.
#[derive(Debug, Serialize)]
struct Report {
    disk: String,
    file: String,
    bytes: u64,
    writable: bool,
}

/// Serves the file until it is unmounted.
///
/// # Errors
/// A disk that cannot be opened, a place that cannot be mounted on, a disk that cannot be closed clean.
pub fn run(args: &MountArgs) -> Result<ExitCode> {
    let insists = Arc::<AtomicBool>::default();
    // The first asks; from then on the next one ends the process at once.
    for signal in TERM_SIGNALS {
        flag::register_conditional_shutdown(*signal, EXIT_INSISTED, Arc::clone(&insists))?;
        flag::register(*signal, Arc::clone(&insists))?;
    }
    let signals = Signals::new(TERM_SIGNALS).context("watching for signals")?;
    // Else it hides what is below it.
    fuse::take_away_dead(&args.place).with_context(|| args.place.display().to_string())?;
    let disk = open(args)?;
    refuse_among_layers(&disk, &args.place)?;
    let report = |file: &Path| Report {
        disk: path_to_text(&args.disk),
        file: path_to_text(file),
        bytes: disk.size(),
        writable: args.write,
    };
    let file: Arc<dyn File> = Arc::new(Whole::new(Arc::clone(&disk), args)?);
    let (root, name) = if args.place.is_dir() {
        (Node::Directory(Arc::new(Only(file))), Some(FILE_NAME))
    } else {
        (Node::File(file), None)
    };
    let guard = Some(PathBuf::from(super::OWN_PROGRAM));
    let options = Options { read_only: !args.write, allow_other: args.allow_other, guard };
    let mount = Arc::new(Mount::new(root, &args.place, &options)?);
    end_by_signal(&mount, signals)?;
    let file = name.map_or_else(|| mount.place().to_owned(), |name| mount.place().join(name));
    if args.json {
        print_json_line(&report(&file))?
    } else {
        print(&report(&file).text())?
    }
    mount.wait();
    mount.stop();
    disk.close().map_err(|error| explain(&error))?;
    Ok(ExitCode::SUCCESS)
}

fn open(args: &MountArgs) -> Result<Arc<Disk>> {
    let state = resolve(&args.disk, args.format, &args.backing)?;
    ensure!(
        !args.write || state.info.is_none(),
        "{}: a snapshot is never written: make a disk of it (`vmstrata snapshot clone`) and mount that",
        args.disk.display()
    );
    let options = state.open_options(OpenOptions {
        read_only: !args.write,
        force: args.force,
        unflushed: args.journal.unflushed(),
        allow_backing: args.backing.allow_backing.clone(),
        ..OpenOptions::default()
    });
    Disk::open(&state.path, &options, &resources(&args.journal)?).map_err(|error| explain(&error))
}

/// Images are looked for beside layers, and layers are opened by their names: a mount there would have its process wait for itself.
fn refuse_among_layers(disk: &Disk, place: &Path) -> Result<()> {
    let real = |path: &Path| path.canonicalize().with_context(|| path.display().to_string());
    let (place, is_dir) =
        if place.is_dir() { (real(place)?, true) } else { (real(&directory_of(place))?, false) };
    for layer in disk.layers() {
        let directory = real(&directory_of(&layer.path))?;
        ensure!(
            directory != place && !(is_dir && directory.starts_with(&place)),
            "{}: images of the disk are in {}: mount it elsewhere",
            place.display(),
            directory.display()
        );
    }
    Ok(())
}

/// Has the first signal take the mount out of sight, which ends it once no program uses it.
fn end_by_signal(mount: &Arc<Mount>, mut signals: Signals) -> Result<()> {
    let mount = Arc::downgrade(mount);
    let wait = move || {
        for _ in signals.forever() {
            let Some(mount) = mount.upgrade() else { return };
            let place = mount.place().display();
            match mount.detach() {
                Ok(Detached::Unused) => {}
                Ok(Detached::InUse) => eprintln!(
                    "vmstrata: {place}: programs have files of it open (`lsof` and `losetup -l` name them): ends once they are closed; a second signal ends at once"
                ),
                Err(error) => eprintln!("vmstrata: warning: {place}: cannot be unmounted: {error}"),
            }
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(())
}

/// Cleans up after a process that mounted, and ended or was killed.
///
/// # Errors
/// What is left.
pub fn guard(args: &MountGuardArgs) -> Result<ExitCode> {
    fuse::guard(io::stdin().lock(), &args.place, args.remove)
        .with_context(|| args.place.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// The disk as a file.
#[derive(Debug)]
struct Whole {
    disk: Arc<Disk>,
    /// Bytes that its layers take.
    allocated: u64,
    modified: SystemTime,
    writes: bool,
    place: PathBuf,
}

impl Whole {
    fn new(disk: Arc<Disk>, args: &MountArgs) -> Result<Self> {
        let (mut allocated, mut modified) = (0, SystemTime::UNIX_EPOCH);
        for layer in disk.layers() {
            let found = fs::metadata(&layer.path).with_context(|| layer.path.display().to_string())?;
            // st_blocks counts 512 bytes whatever the file system's block is.
            allocated += found.blocks() * 512;
            modified = found.modified()?;
        }
        Ok(Self { disk, allocated, modified, writes: args.write, place: args.place.clone() })
    }
}

impl File for Whole {
    fn id(&self) -> u64 {
        0
    }

    fn about(&self) -> About {
        About {
            size: self.disk.size(),
            allocated: self.allocated,
            modified: self.modified,
            is_writable: self.writes,
            // No other process can write it meanwhile.
            is_fixed: !self.writes,
        }
    }

    fn open(&self, writes: bool) -> io::Result<Opened> {
        if writes && !self.writes {
            return Err(Errno::ROFS.into());
        }
        let name = format!("the mount on {}", self.place.display());
        let writer = writes.then(|| self.disk.attach_writer(&name, true)).transpose();
        let writer = writer.map_err(|_| Errno::BUSY)?;
        Ok(Opened { disk: Arc::clone(&self.disk), writer, is_fixed: !self.writes, of: String::new() })
    }
}

/// A directory with the disk in it.
#[derive(Debug)]
struct Only(Arc<dyn File>);

impl Directory for Only {
    fn list(&self) -> io::Result<Vec<(OsString, Node)>> {
        Ok(vec![(FILE_NAME.into(), Node::File(Arc::clone(&self.0)))])
    }
}

impl Report {
    fn text(&self) -> String {
        let Self { disk, file, bytes, writable } = self;
        let how = if *writable { "for writing" } else { "read-only" };
        format!("{disk}: {file}, {}, {how}; `umount` ends it\n", short_size(*bytes))
    }
}
