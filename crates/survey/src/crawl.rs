//! Finding the images below some directories, with several threads.
//!
//! Each thread takes the newest task from one stack: a directory to open, an open directory to read a few entries of,
//! or a backing file that an image named. Every file is looked at once, whatever its number of names and of overlays.
//!
//! What is never opened: symbolic links met on the way (counted; a *backing name* may be one, and then the gate asks the
//! kernel where it leads), FIFOs, sockets and devices, kernel file systems such as /proc, directories met before, those
//! deeper than [`limits::DEPTH_MAX`], and every file that is, once pinned, not below a root or an allowed directory.

mod entry;
mod found;

use std::fs::{self, ReadDir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use parking_lot::{Condvar, Mutex};
use vmstrata_disk::merge::noted_in;
use vmstrata_disk::{Error, ErrorKind, Format, ImageHead, probe_file};
use vmstrata_store::{Access, FileId, Gate, GateError, on_threads};

pub use self::found::Omitted;
pub(crate) use self::found::{Found, LeftOut};
use crate::image::{Below, Fault, Image};
use crate::risk::RiskKind;
use crate::{Progress, SurveyError, SurveyOptions, limits};

/// Entries of a directory that a thread looks at before it lets others have the rest.
const BATCH: usize = 64;
/// Files between two calls for progress.
const PROGRESS_EVERY: u64 = 64;

enum Task {
    /// A directory to be opened, and how deep it lies.
    Directory(PathBuf, usize),
    /// A directory with entries left.
    Entries(Box<ReadDir>, usize),
    /// A file named by the user or by an image: one that counts whatever it looks like.
    Named(PathBuf),
}

#[derive(Default)]
struct State {
    tasks: Vec<Task>,
    /// Threads at work, which may find new tasks.
    busy: usize,
    found: Found,
}

struct Crawl<'a> {
    options: &'a SurveyOptions,
    gate: Gate,
    state: Mutex<State>,
    changed: Condvar,
}

/// Looks at everything below the roots; returns what was found, and the gate that it was opened through.
///
/// # Errors
/// A root or an allowed directory that does not resolve.
pub(crate) fn crawl(options: &SurveyOptions) -> Result<(Found, Gate), SurveyError> {
    let mut allowed = options.allow_backing.clone();
    let (mut tasks, mut roots) = (Vec::new(), Vec::new());
    for root in &options.roots {
        let canonical =
            root.canonicalize().map_err(|source| GateError::Open { path: root.clone(), source })?;
        roots.push(canonical.clone());
        if canonical.is_dir() {
            allowed.push(canonical.clone());
            tasks.push(Task::Directory(canonical, 0));
        } else {
            // As the engine does: what lies beside an image may be its backing file.
            allowed.extend(canonical.parent().map(Path::to_owned));
            tasks.push(Task::Named(canonical));
        }
    }
    let crawl = Crawl {
        options,
        gate: Gate::new(&allowed)?,
        state: Mutex::new(State { tasks, ..State::default() }),
        changed: Condvar::new(),
    };
    on_threads(options.threads.clamp(1, limits::THREADS_MAX), || crawl.work());
    let mut found = crawl.state.into_inner().found;
    found.roots = roots;
    found.put_in_order();
    Ok((found, crawl.gate))
}

impl Crawl<'_> {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop() {
                state.busy += 1;
                drop(state);
                self.run(task);
                state = self.state.lock();
                state.busy -= 1;
                self.changed.notify_all();
            } else if state.busy == 0 {
                return;
            } else {
                self.changed.wait(&mut state);
            }
        }
    }

    fn run(&self, task: Task) {
        match task {
            Task::Directory(path, depth) => self.open_directory(&path, depth),
            Task::Entries(entries, depth) => self.read_entries(entries, depth),
            Task::Named(path) => self.look_at(&path, true),
        }
    }

    fn push(&self, task: Task) {
        self.state.lock().tasks.push(task);
        self.changed.notify_one();
    }

    /// Notes something left out.
    fn leave_out(&self, what: LeftOut, path: &Path) {
        self.state.lock().found.leave_out(what, path);
    }

    fn open_directory(&self, path: &Path, depth: usize) {
        let open = || -> std::io::Result<Option<(FileId, ReadDir)>> {
            let metadata = fs::symlink_metadata(path)?;
            if !metadata.is_dir() || entry::is_of_the_kernel(path)? {
                return Ok(None);
            }
            let id = FileId { dev: metadata.dev(), ino: metadata.ino() };
            Ok(Some((id, fs::read_dir(path)?)))
        };
        match open() {
            Ok(Some((id, entries))) => {
                if self.state.lock().found.enter(id) {
                    self.push(Task::Entries(Box::new(entries), depth));
                }
            }
            Ok(None) => self.leave_out(LeftOut::Special, path),
            Err(_) => self.leave_out(LeftOut::Unreadable, path),
        }
    }

    fn read_entries(&self, mut entries: Box<ReadDir>, depth: usize) {
        let batch: Vec<_> = entries.by_ref().take(BATCH).collect();
        if batch.len() == BATCH {
            self.push(Task::Entries(entries, depth));
        }
        for item in batch {
            // An entry that cannot be read has no name to report.
            let Ok(item) = item else {
                self.leave_out(LeftOut::Unreadable, Path::new(""));
                continue;
            };
            let path = item.path();
            match item.file_type() {
                Ok(kind) if kind.is_dir() && depth >= limits::DEPTH_MAX => {
                    self.leave_out(LeftOut::TooDeep, &path)
                }
                Ok(kind) if kind.is_dir() => self.push(Task::Directory(path, depth + 1)),
                Ok(kind) if kind.is_file() => self.meet(&path),
                Ok(kind) if kind.is_symlink() => self.leave_out(LeftOut::Link, &path),
                Ok(_) => self.leave_out(LeftOut::Special, &path),
                Err(_) => self.leave_out(LeftOut::Unreadable, &path),
            }
        }
    }

    /// Looks at a regular file that was found on the way, unless it was looked at by another name.
    fn meet(&self, path: &Path) {
        self.count_file();
        noted_in(path).iter().for_each(|file| self.leave_out(LeftOut::LeftOver, file));
        match fs::symlink_metadata(path) {
            Ok(_) if entry::is_in_the_making(path) => self.leave_out(LeftOut::Unfinished, path),
            Ok(metadata) if self.state.lock().found.merge_name(entry::file_id(&metadata), path) => {}
            Ok(_) => self.look_at(path, false),
            Err(_) => self.leave_out(LeftOut::Unreadable, path),
        }
    }

    /// Looks at a file; `named` files are images whatever they look like.
    fn look_at(&self, path: &Path, named: bool) {
        let expected = entry::expected(path);
        match probe_file(path, &self.gate) {
            Ok(found) => {
                if self.state.lock().found.merge_name(found.identity.file, path) {
                    return;
                }
                if matches!(found.head, Ok(None)) && !named && expected.is_none() {
                    return;
                }
                let mut image = Image::new(path, found, |head| self.below(head));
                if expected == Some(Format::Qcow2) && image.qcow2.is_none() && image.fault.is_none() && !named
                {
                    let message =
                        format!("{}: named like a qcow2 image, but does not start like one", path.display());
                    image.fault = Some(Fault { kind: RiskKind::Corrupt, message });
                }
                self.state.lock().found.add(image);
            }
            Err(error) if named || expected.is_some() => self.add_unreadable(path, &error),
            Err(_) => self.leave_out(LeftOut::Unreadable, path),
        }
    }

    /// An image that cannot even be opened is known by its name and whatever `lstat` tells.
    fn add_unreadable(&self, path: &Path, error: &Error) {
        let Ok(metadata) = fs::symlink_metadata(path) else {
            // Gone since it was listed.
            return self.leave_out(LeftOut::Unreadable, path);
        };
        let id = FileId { dev: metadata.dev(), ino: metadata.ino() };
        self.state.lock().found.add(entry::unopened(id, path, &metadata, Fault::of(error)));
    }

    /// Finds the file that `head` names as its backing file, and sees to it that it is looked at.
    fn below(&self, head: &ImageHead) -> Option<Below> {
        let (path, format) = match &head.backing.as_ref()?.place {
            Ok((path, format)) => (path, *format),
            Err(error) => return Some(Below::Broken(Fault::of(error))),
        };
        let opened = self.gate.open(path, Access::ReadOnly).and_then(|file| {
            file.metadata().map_err(|source| GateError::Open { path: path.clone(), source })
        });
        let metadata = match opened {
            Ok(metadata) => metadata,
            Err(error) => return Some(Below::Broken(Fault::of(&Error::from(ErrorKind::from(error))))),
        };
        let id = entry::file_id(&metadata);
        if !self.state.lock().found.has(id) {
            // By the name that the walk would find it under.
            self.push(Task::Named(path.canonicalize().unwrap_or_else(|_| path.clone())));
        }
        Some(Below::File(id, format))
    }

    fn count_file(&self) {
        let progress = {
            let found = &mut self.state.lock().found;
            found.files += 1;
            Progress { files: found.files, images: found.images.len() as u64 }
        };
        if let (Some(report), 0) = (&self.options.progress, progress.files % PROGRESS_EVERY) {
            report(progress);
        }
    }
}
