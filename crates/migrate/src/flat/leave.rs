//! A disk leaves its chain for a flat copy.
//!
//! What takes the writes is frozen before each pass. The layers above a state say what was written since; so a pass copies the state that was
//! frozen for it, never a later one.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_disk::snapshot::{SnapshotInfo, frozen_path, note_left};
use vmstrata_disk::{
    Disk, FlatHome, Format, LayerInfo, OpenOptions, Opened, Opener as _, Role, directory_of, own_clusters,
};
use vmstrata_nbd::{Files, Uri};
use vmstrata_store::{FileId, Gate, Store};
use vmstrata_types::GuestRange;

use super::copy::{Copy, How};
use super::{FlatMove, Way, bytes_of};
use crate::copy::{Unreadable, allocated, flush_directory};
use crate::error::{Error, Result};
use crate::follow::Order;
use crate::journal::{Flat, Sending, forget_moved, note_flat};
use crate::moving::{absolute, new_state, undo_half_switch};

/// How a disk moves to a flat copy.
#[derive(Clone, Debug)]
pub struct FlatOptions {
    /// The target.
    pub to: PathBuf,
    /// How the disk is opened.
    pub open: OpenOptions,
    /// A device or an export may have something on it, which is lost.
    pub overwrite: bool,
    /// As in [`crate::MoveOptions`].
    pub skip_unreadable: bool,
    /// In which order the disk is read, in each pass.
    pub order: Order,
}

impl FlatMove {
    /// Begins to move a disk in use, or goes on with that.
    ///
    /// # Errors
    /// A disk that cannot be moved; a target that is too small, in use, or may have something on it.
    pub fn begin(disk: &Arc<Disk>, options: &FlatOptions) -> Result<Self> {
        let from = absolute(disk.path())?;
        let to = if Uri::is_meant(&options.to) { options.to.clone() } else { absolute(&options.to)? };
        let refused = |why: &str| Error::refused(&from, &to, why);
        if disk.is_read_only() {
            return Err(refused("it is read-only"));
        }
        if disk.format() == Format::Raw {
            return Err(refused("it is flat already: take a snapshot of it with --convert-raw first"));
        }
        if disk.layers().iter().any(|layer| vmstrata_disk::is_published(&layer.path)) {
            return Err(refused("it is a tiered disk: `vmstrata tier detach` makes it an ordinary one"));
        }
        let size = disk.size();
        let note = Sending::find(&from)?;
        let is_begun = note.as_ref().is_some_and(|note| note.to == to);
        let is_new = !Uri::is_meant(&to) && to.symlink_metadata().is_err();
        let is_file = is_new || fs::metadata(&to).is_ok_and(|about| about.is_file());
        if !is_new && !is_begun {
            if is_file {
                return Err(Error::Exists { path: to });
            }
            if !options.overwrite {
                return Err(refused("everything on it would be overwritten: say so with --yes"));
            }
        }
        undo_half_switch(disk, &from)?;
        if is_new {
            let made = fs::File::options().write(true).create_new(true).open(&to).and_then(|file| {
                vmstrata_disk::copy_access(&from, &file).map_err(io::Error::other)?;
                file.set_len(size)?;
                file.sync_all()
            });
            made.map_err(Error::of_file(&to, "make the copy"))?;
            flush_directory(&directory_of(&to))?;
        }
        let cache = Role::Active(options.open.cache);
        let target = Files::new(Arc::clone(&options.open.opener)).open(&to, cache, &Gate::unrestricted())?;
        let len = target.store.len().map_err(Error::of_file(&to, "find its size"))?;
        if len < size {
            return Err(Error::NoRoom { to, free: len, needed: size });
        }
        if len > size && is_file {
            return Err(Error::Exists { path: to });
        }
        let note = match note {
            Some(note) if is_begun => note,
            _ => Sending::begin(&from, &to)?,
        };
        tracing::info!(disk = %from.display(), to = %to.display(), goes_on = is_begun, "moves to a flat copy");
        let store = Arc::clone(&target.store);
        let (copy, skips) = (Copy::new(&store, &to, options.skip_unreadable), options.skip_unreadable);
        let way = Leave {
            disk: Arc::clone(disk),
            from: from.clone(),
            to: to.clone(),
            open: options.open.clone(),
            store,
            target: Some(target),
            note,
        };
        let how = How { compares: is_begun && !is_new, zeroes: !is_new };
        Ok(Self::new((disk, from, to), Box::new(way), copy, (how, options.order, skips)))
    }
}

/// See the module documentation.
#[derive(Debug)]
struct Leave {
    disk: Arc<Disk>,
    from: PathBuf,
    to: PathBuf,
    open: OpenOptions,
    store: Arc<dyn Store>,
    /// The target, until it is the disk's.
    target: Option<Opened>,
    note: Sending,
}

impl Way for Leave {
    fn all(&mut self) -> Result<(Arc<Disk>, u64)> {
        self.freeze()?;
        let state = self.newest_state()?;
        let bytes = state.layers().iter().map(|layer| allocated(&layer.path)).sum();
        Ok((state, bytes))
    }

    fn left(&self) -> Result<u64> {
        Ok(bytes_of(&self.disk.own_ranges()?))
    }

    fn again(&mut self, state: &Disk) -> Result<(Arc<Disk>, Vec<GuestRange>)> {
        self.freeze()?;
        let next = self.newest_state()?;
        // Others may have taken snapshots, too.
        let mut layers: Vec<PathBuf> = next.layers().into_iter().map(|layer| layer.path).collect();
        let file = FileId::at(state.path());
        let at = layers.iter().position(|layer| FileId::at(layer) == file);
        layers.drain(..=at.ok_or_else(|| self.refused("its layers were merged meanwhile: begin again"))?);
        Ok((next, ranges_of(&layers)?))
    }

    fn switch(&mut self, state: &Disk, skips: bool) -> Result<Option<Vec<Unreadable>>> {
        let Some(target) = self.target.take() else { return Err(self.refused("begin again")) };
        let identity = target.identity;
        let mut newest_first: Vec<PathBuf> =
            self.disk.layers().into_iter().rev().map(|layer| layer.path).collect();
        let SnapshotInfo { name, .. } = new_state();
        let left = frozen_path(&self.from, &name, Format::Qcow2).expect("it names a file");
        newest_first[0].clone_from(&left);
        let options = OpenOptions { format: Some(Format::Raw), ..self.open.clone() };
        let home = FlatHome { path: self.to.clone(), options, copy: target };
        let (disk, copy) = (Arc::clone(&self.disk), Copy::new(&self.store, &self.to, skips));
        let mut unreadable = Vec::new();
        // While the old path is there, the note says nothing.
        note_flat(&self.from, Flat { to: self.to.clone(), left: Some(name) })?;
        let switched = self.disk.leave_chain(home, || {
            if newest_frozen(disk.layers()).as_deref() != Some(state.path()) {
                return Err(Error::Changed { layer: self.from.clone() });
            }
            let last = disk.own_ranges()?;
            unreadable = copy.take_last(disk, last)?;
            // Else it would speak of the next disk that has the name.
            self.note.remove()?;
            fs::rename(&self.from, &left).map_err(Error::of_file(&self.from, "rename what the disk was"))?;
            flush_directory(&directory_of(&self.from))
        });
        if switched.is_err() && self.from.symlink_metadata().is_ok() {
            forget_moved(&self.from);
        }
        if let Err(Error::Changed { .. }) = switched {
            // A snapshot was taken meanwhile: its layer must be copied, too.
            self.target = Some(Opened { store: Arc::clone(&self.store), identity });
            return Ok(None);
        }
        switched?;
        if !Uri::is_meant(&self.to) {
            // Of a disk that went back from there.
            forget_moved(&self.to);
        }
        note_left(&self.from, &newest_first);
        Ok(Some(unreadable))
    }

    fn froze(&self) -> Vec<String> {
        self.note.froze.clone()
    }

    fn is_flat(&self) -> bool {
        true
    }
}

impl Leave {
    fn refused(&self, why: &str) -> Error {
        Error::refused(&self.from, &self.to, why)
    }

    /// The state below what takes the writes. Its tables are in its files.
    fn newest_state(&self) -> Result<Arc<Disk>> {
        let (_, layers) = self.disk.whole_layers();
        let newest = newest_frozen(layers).ok_or_else(|| self.refused("it has no frozen layer"))?;
        Ok(self.disk.open_state(&newest)?)
    }

    /// Freezes what takes the writes.
    fn freeze(&mut self) -> Result<()> {
        let info = new_state();
        self.note.add_froze(&info.name)?;
        self.disk.snapshot(&info)?;
        Ok(())
    }
}

/// What some layers have, each byte once: what is written twice does not read as the first time.
fn ranges_of(layers: &[PathBuf]) -> Result<Vec<GuestRange>> {
    let mut own = Vec::new();
    for layer in layers {
        own_clusters(layer, &Gate::unrestricted(), |cluster| own.push(cluster.range))?;
    }
    own.sort_by_key(|range| range.start);
    let mut ranges: Vec<GuestRange> = Vec::new();
    for range in own {
        match ranges.last_mut() {
            Some(last) if range.start <= last.end() => {
                last.len = last.len.max(range.end() - last.start);
            }
            _ => ranges.push(range),
        }
    }
    Ok(ranges)
}

/// The layer below the one that takes the writes.
fn newest_frozen(layers: Vec<LayerInfo>) -> Option<PathBuf> {
    layers.into_iter().rev().nth(1).map(|layer| layer.path)
}
