//! A disk goes back from a flat copy to where its history is.
//!
//! ```text
//!   before   /a: base ◄── mon ◄── m1                          flat: the disk, for as long as the note in /a says so
//!   copy     /a: base ◄── mon ◄── m1 ◄── .web.qcow2.back      what the disk reads otherwise than m1
//!   switch   /a: base ◄── mon ◄── m1 ◄── web                  it gets the disk's name, which is the switch
//! ```
//!
//! What was killed before the switch is begun again from the start: what differs from `m1` is what was written since the disk left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rustix::fs::Advice;
use vmstrata_disk::snapshot::{MOVE_LABEL, SnapshotInfo, frozen_path, list};
use vmstrata_disk::{Disk, Format, OpenOptions, Watch, directory_of, make_overlay};
use vmstrata_store::{Segment, Store, total_len};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use super::copy::{Copy, How};
use super::{FlatMove, Way};
use crate::copy::{Unreadable, allocated, flush_directory};
use crate::error::{Error, Result};
use crate::follow::Order;
use crate::journal::{draft_of_return, forget_moved, left_flat, note_return};
use crate::moving::{absolute, new_state, remove_if_there};

/// For how long the chain's files may be in use by this process once it was closed.
const IN_USE_MAX: Duration = Duration::from_millis(500);

/// How a disk goes back from a flat copy.
#[derive(Clone, Debug)]
pub struct BackOptions {
    /// The path that it had.
    pub to: PathBuf,
    /// How it is opened.
    pub open: OpenOptions,
    /// As in [`crate::MoveOptions`].
    pub skip_unreadable: bool,
    /// In which order the disk is read, in each pass.
    pub order: Order,
}

/// Whether the disk at `flat` came there from the path `to`, and may go back.
pub fn is_way_back(flat: &Path, to: &Path) -> bool {
    left_flat(to).is_ok_and(|left| left.is_some_and(|left| left.to == flat))
}

impl FlatMove {
    /// Begins to bring a disk in use back from its flat copy to its old path, and to its history.
    ///
    /// # Errors
    /// A disk that did not come from there, or has another size by now; something at its old path; a history that cannot be read.
    pub fn begin_back(disk: &Arc<Disk>, options: &BackOptions) -> Result<Self> {
        let from = disk.path().to_owned();
        let to = absolute(&options.to)?;
        let refused = |why: &str| Error::refused(&from, &to, why);
        if to.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: to });
        }
        let left = left_flat(&to)?.filter(|left| left.to == from);
        let Some(name) = left.and_then(|left| left.left) else {
            return Err(refused("it did not leave its history there"));
        };
        let below = frozen_path(&to, &name, Format::Qcow2).ok_or_else(|| refused("that names no file"))?;
        let open = OpenOptions { format: Some(Format::Qcow2), read_only: false, ..options.open.clone() };
        let watch = disk.watch()?;
        let draft = draft_of_return(&to);
        remove_if_there(&draft)?;
        let info = SnapshotInfo { name, ..new_state() };
        make_overlay(&draft, &below, (&info, open.subclusters))?;
        let mut way = Return {
            disk: Arc::clone(disk),
            from,
            to,
            open,
            draft,
            chain: Arc::default(),
            watch,
            froze: Vec::new(),
        };
        let chain = disk.open_beside(&way.draft, &way.open)?;
        if chain.size() != disk.size() {
            return Err(way.refused("its size has changed since it left"));
        }
        way.chain = Arc::new(Chain(RwLock::new(Some(chain))));
        tracing::info!(disk = %way.from.display(), to = %way.to.display(), "goes back from a flat copy");
        let store: Arc<dyn Store> = Arc::clone(&way.chain) as _;
        let (copy, ends) =
            (Copy::new(&store, &way.draft, options.skip_unreadable), (way.from.clone(), way.to.clone()));
        let how = How { compares: true, zeroes: true };
        Ok(Self::new(
            (disk, ends.0, ends.1),
            Box::new(way),
            copy,
            (how, options.order, options.skip_unreadable),
        ))
    }
}

/// A chain that is written to as if it were a file, until it is closed.
#[derive(Debug, Default)]
struct Chain(RwLock<Option<Arc<Disk>>>);

impl Chain {
    fn with<T>(&self, work: impl FnOnce(&Disk) -> vmstrata_disk::Result<T>) -> io::Result<T> {
        let chain = self.0.read();
        let disk = chain.as_ref().ok_or_else(|| io::Error::other("it is closed"))?;
        work(disk).map_err(io::Error::other)
    }

    /// Closes it, and gives its files up.
    fn close(&self) -> Result<()> {
        let Some(disk) = self.0.write().take() else { return Ok(()) };
        disk.close()?;
        let (path, began) = (disk.path().to_owned(), Instant::now());
        let mut disk = Some(disk);
        // Its maintenance may be looking at it.
        while let Some(shared) = disk.take() {
            disk = Arc::try_unwrap(shared).err();
            if disk.is_some() && began.elapsed() > IN_USE_MAX {
                let busy = io::Error::from(io::ErrorKind::ResourceBusy);
                return Err(Error::of_file(&path, "give up its files")(busy));
            }
        }
        Ok(())
    }
}

impl Store for Chain {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.with(|disk| disk.read(GuestOffset::new(at.get()), segments)).map(|()| total_len(segments))
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        self.with(|disk| disk.write(GuestOffset::new(at.get()), segments))
    }

    fn flush(&self) -> io::Result<()> {
        let path = self.with(|disk| disk.flush().map(|()| disk.path().to_owned()))?;
        // What is read back comes from storage then.
        let file = File::open(path)?;
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        Ok(())
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.with(|disk| disk.write_zeroes(GuestRange::new(GuestOffset::new(at.get()), len), true))
    }

    fn len(&self) -> io::Result<u64> {
        self.with(|disk| Ok(disk.size()))
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        let start = GuestOffset::new(at.get());
        let found = self.with(|disk| disk.extents(GuestRange::new(start, disk.size() - start.get()), 1))?;
        let first = found.first().ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((!first.kind.reads_zero(), HostOffset::new(first.range.end().get())))
    }
}

/// See the module documentation.
#[derive(Debug)]
struct Return {
    disk: Arc<Disk>,
    from: PathBuf,
    to: PathBuf,
    /// How the chain is opened.
    open: OpenOptions,
    /// What the chain's active image is called until it is the disk.
    draft: PathBuf,
    chain: Arc<Chain>,
    watch: Watch,
    /// States that are there for the sake of a move, once the disk is back.
    froze: Vec<String>,
}

/// A chain that did not become the disk is of no use.
impl Drop for Return {
    fn drop(&mut self) {
        let removed = self.chain.close().and_then(|()| remove_if_there(&self.draft));
        if let Err(error) = removed {
            tracing::warn!(%error, "the next try removes it");
        }
    }
}

impl Way for Return {
    fn all(&mut self) -> Result<(Arc<Disk>, u64)> {
        self.watch.take();
        let is_file = fs::metadata(&self.from).is_ok_and(|about| about.is_file());
        let bytes = if is_file { allocated(&self.from) } else { self.disk.size() };
        Ok((Arc::clone(&self.disk), bytes))
    }

    fn left(&self) -> Result<u64> {
        Ok(self.watch.bytes())
    }

    fn again(&mut self, _: &Disk) -> Result<(Arc<Disk>, Vec<GuestRange>)> {
        if !self.watch.is_on() {
            return Err(self.refused("its layers have changed since the move began: begin again"));
        }
        Ok((Arc::clone(&self.disk), self.watch.take()))
    }

    fn switch(&mut self, _: &Disk, skips: bool) -> Result<Option<Vec<Unreadable>>> {
        let store: Arc<dyn Store> = Arc::clone(&self.chain) as _;
        let copy = Copy::new(&store, &self.draft, skips);
        drop(store);
        let is_file = fs::symlink_metadata(&self.from).is_ok_and(|about| about.is_file());
        if is_file {
            // From the switch on: its raw file does not go.
            note_return(&self.from, &self.to, None)?;
        }
        let (chain, disk) = (Arc::clone(&self.chain), Arc::clone(&self.disk));
        let mut unreadable = Vec::new();
        let switched = self.watch.enter_chain((&self.to, &self.open), |left| {
            unreadable = copy.take_last(disk, left)?;
            chain.close()?;
            fs::rename(&self.draft, &self.to).map_err(Error::of_file(&self.to, "name the disk"))?;
            flush_directory(&directory_of(&self.to))
        });
        if switched.is_err() && is_file && self.to.symlink_metadata().is_err() {
            forget_moved(&self.from);
        }
        switched?;
        if is_file {
            let copy = fs::metadata(&self.from).map_err(Error::of_file(&self.from, "examine the flat copy"));
            if let Err(error) = copy.and_then(|copy| note_return(&self.from, &self.to, Some(&copy))) {
                tracing::warn!(%error, "remove the note beside the flat copy with it: `.NAME.moved`");
            }
        }
        forget_moved(&self.to);
        self.froze = made_for_moves(&self.to, &self.open).unwrap_or_default();
        Ok(Some(unreadable))
    }

    fn froze(&self) -> Vec<String> {
        self.froze.clone()
    }

    fn is_flat(&self) -> bool {
        false
    }
}

impl Return {
    fn refused(&self, why: &str) -> Error {
        Error::refused(&self.from, &self.to, why)
    }
}

/// Names of the disk's own states that are there for the sake of a move.
fn made_for_moves(disk: &Path, open: &OpenOptions) -> Result<Vec<String>> {
    let is_made = |info: &SnapshotInfo| info.labels.iter().any(|(label, _)| label == MOVE_LABEL);
    let states = list(disk, open)?;
    let own = states.iter().filter(|state| state.is_own()).filter_map(|state| state.info.as_ref());
    Ok(own.filter(|info| is_made(info)).map(|info| info.name.clone()).collect())
}
