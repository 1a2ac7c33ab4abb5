//! A tiered disk becomes an ordinary image again.
//!
//! ```text
//!   web.qcow2 ──► web.qcow2.tier/ID.qcow2 ...                    tiered: an overlay on the repository
//!                 web.qcow2.layers/ID.qcow2 ...                  link: each layer of the newest epoch gets a second name
//!   web.qcow2 ──► web.qcow2.layers/ID.qcow2 ...                  replace: an ordinary image, in one rename
//!                 web.qcow2.tier is renamed, and emptied         withdraw, empty
//!                 this host's copy is deleted                    forget
//! ```
//!
//! To flatten, all content is copied into a draft beside the path instead, which then takes its place.
//!
//! Invariants: the path always leads to a whole image with the guest's content. The repository and the copy are deleted only after the
//! path leads to neither, which the copy's record proves by the inode of what took the place. One step after another is taken; a process that begins
//! anew goes on where another one was killed.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::merge::{Direction, Merge, MergeOptions, Removal, all_of};
use vmstrata_disk::{AtomicFile, CreateOptions, Disk, Format, OpenOptions, Resources, create};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_store::FileId;
use vmstrata_types::ClusterBits;

use crate::attach::{check_own, is_detached, write_overlay};
use crate::copies::{cuts, holds, open_options};
use crate::error::{Error, Result};
use crate::group::beside;
use crate::head::{Epoch, Head, ObjectId, is_object_name};
use crate::look::newest;
use crate::pin::{Pin, Purpose};
use crate::place::{Copy, Place, make_private, sync_directory};
use crate::publisher::{Claim, Publisher};

/// Ends the name of the directory with the layers of an image that was a tiered disk.
const LAYERS: &str = ".layers";
/// Ends the name of a repository that is deleted, and of a copy.
const GONE: &str = ".detached";

/// See the module documentation.
#[derive(Debug)]
pub struct Detach {
    place: Place,
    /// Held until it is deleted.
    copy: Option<Copy>,
    open: OpenOptions,
    resources: Arc<Resources>,
    next: Step,
}

/// What comes next.
#[derive(Debug)]
enum Step {
    Link(Epoch),
    Draft(Epoch),
    Fill(Box<Merge>),
    ReplaceByDraft,
    ReplaceByOverlay(Epoch),
    Withdraw,
    Empty,
    Forget,
    End,
}

impl Detach {
    /// Makes sure that a disk can be detached: that this host publishes it, and has published all of it. Nobody else publishes it from
    /// then on.
    ///
    /// # Errors
    /// [`Error::Grouped`]; [`Error::NotAllPublished`]; [`Error::IsRead`]; [`Error::Shared`], unless it is flattened; [`Error::Held`] for a disk that is served; [`Error::Fenced`]; a disk that is not tiered, or not by this
    /// host; whatever host and repository report.
    pub fn begin(
        place: &Place,
        flatten: bool,
        open: &OpenOptions,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        if let Some(group) = place.group_name() {
            let what = "its disks are not detached; copy each with `qemu-img convert`, from its path";
            return Err(Error::Grouped { group: group.to_owned(), what });
        }
        let mut detach = Self {
            place: place.clone(),
            copy: None,
            open: open_options(place, open),
            resources: resources.clone(),
            next: Step::Empty,
        };
        if !place.local.exists() {
            let left = [beside(&place.repository, GONE), beside(&place.local, GONE)];
            return if left.iter().any(|left| left.exists()) { Ok(detach) } else { Err(detach.no_copy()) };
        }
        let copy = detach.copy.insert(Copy::hold(place)?);
        let Some(record) = copy.record().cloned() else { return Err(detach.no_copy()) };
        if is_detached(place, record.detaching)? {
            detach.next = Step::Withdraw;
            return Ok(detach);
        }
        let (Some(repository), Some(base)) = (place.open_repository()?, record.base) else {
            return Err(Error::NoHead { repository: place.repository.display().to_string() });
        };
        let publisher = Publisher::claim(repository, record.owner, Claim::Resume)?;
        let epoch = publisher.head().epoch.clone();
        if !holds(place, base, epoch.number)? {
            return Err(Error::OldCopy { copy: place.local.clone(), epoch: epoch.number });
        }
        refuse_readers(&**publisher.repository())?;
        detach.check_published(&epoch)?;
        check_own(place, &epoch)?;
        if !flatten {
            detach.check_names(&epoch)?;
        }
        detach.next = if flatten { Step::Draft(epoch) } else { Step::Link(epoch) };
        Ok(detach)
    }

    fn no_copy(&self) -> Error {
        Error::NoCopy { path: self.place.path.clone(), copy: self.place.local.clone() }
    }

    /// Refuses layers that another disk has, too: a tool that changes the image's would change that one's.
    fn check_names(&self, epoch: &Epoch) -> Result<()> {
        for object in epoch.objects() {
            let layer = self.place.layer(object.id);
            let about = fs::metadata(&layer).map_err(Error::of_file(&layer, "examine"))?;
            // An earlier try has given it a second one.
            let own = 1 + u64::from(is_same(&layer, &self.layers().join(object.id.layer_name().as_str())));
            if about.nlink() > own {
                return Err(Error::Shared { path: self.place.path.clone() });
            }
        }
        Ok(())
    }

    /// Refuses a copy that has what the epoch lacks.
    fn check_published(&self, epoch: &Epoch) -> Result<()> {
        // Takes up the journal of a killed server.
        let disk = Disk::open(&self.place.disk(), &self.open, &self.resources)?;
        let is_newer = disk.has_written() || disk.size() != self.place.state(epoch).size;
        disk.close()?;
        if is_newer || cuts(&self.place.disk(), &self.open)?.iter().any(|cut| cut.number > epoch.number) {
            return Err(Error::NotAllPublished { copy: self.place.local.clone(), epoch: epoch.number });
        }
        Ok(())
    }

    /// Takes the next step, and says whether there are more. All are taken in the end, by this or by another process.
    ///
    /// # Errors
    /// Whatever host and repository report; [`Error::Fenced`] if another host has taken the disk over meanwhile.
    pub fn step(&mut self) -> Result<bool> {
        self.next = match std::mem::replace(&mut self.next, Step::End) {
            Step::Link(epoch) => {
                self.link(&epoch)?;
                Step::ReplaceByOverlay(epoch)
            }
            Step::Draft(epoch) => self.draft(&epoch)?,
            Step::Fill(mut merge) => match merge.select() {
                Some(action) => {
                    merge.apply(action)?;
                    Step::Fill(merge)
                }
                None => Step::ReplaceByDraft,
            },
            Step::ReplaceByDraft => {
                let draft = self.draft_path();
                self.note(Some(&draft.metadata().map_err(Error::of_file(&draft, "examine"))?))?;
                fs::rename(&draft, &self.place.path)
                    .and_then(|()| sync_directory(self.directory()))
                    .map_err(Error::of_file(&self.place.path, "replace"))?;
                Step::Withdraw
            }
            Step::ReplaceByOverlay(epoch) => {
                self.replace_by_overlay(&epoch)?;
                Step::Withdraw
            }
            Step::Withdraw => {
                self.withdraw()?;
                Step::Empty
            }
            Step::Empty => {
                self.empty()?;
                Step::Forget
            }
            Step::Forget => {
                self.forget()?;
                Step::End
            }
            Step::End => return Ok(false),
        };
        Ok(true)
    }

    /// Takes all steps.
    ///
    /// # Errors
    /// As [`Detach::step`].
    pub fn run(mut self) -> Result<()> {
        while self.step()? {}
        Ok(())
    }

    /// The directory of the disk's path.
    fn directory(&self) -> &Path {
        self.place.path.parent().expect("it was found in a directory")
    }

    fn layers(&self) -> PathBuf {
        beside(&self.place.path, LAYERS)
    }

    fn draft_path(&self) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(self.place.path.file_name().unwrap_or_default());
        name.push(".detaching");
        self.directory().join(name)
    }

    fn note(&mut self, replacing: Option<&fs::Metadata>) -> Result<()> {
        let inode = replacing.map(|about| about.ino());
        self.copy.as_mut().expect("held until it is forgotten").change(|record| record.detaching = inode)
    }

    /// Gives the layers of an epoch names in a directory of their own.
    fn link(&mut self, epoch: &Epoch) -> Result<()> {
        let dir = self.layers();
        make_private(&dir).map_err(Error::of_file(&dir, "make the directory"))?;
        // Of an earlier try to flatten.
        match fs::remove_file(self.draft_path()) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::of_file(&self.draft_path(), "delete")(error));
            }
            _ => {}
        }
        for object in epoch.objects() {
            let name = object.id.layer_name();
            let (from, to) = (self.place.repository.join(name.as_str()), dir.join(name.as_str()));
            match fs::hard_link(&from, &to) {
                // An earlier process has done that.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && is_same(&from, &to) => {}
                linked => linked.map_err(Error::of_file(&to, "name the layer"))?,
            }
        }
        self.unlink(|id| epoch.objects().any(|object| object.id == id))?;
        sync_directory(&dir).map_err(Error::of_file(&dir, "flush"))
    }

    /// Takes second names of the repository's layers away that an earlier try has given, but for those to keep.
    fn unlink(&self, keeps: impl Fn(ObjectId) -> bool) -> Result<()> {
        let dir = self.layers();
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(Error::of_file(&dir, "list"))?,
        };
        for entry in entries {
            let path = entry.map_err(Error::of_file(&dir, "list"))?.path();
            let name = path.file_name().unwrap_or_default();
            let is_left = name.to_str().and_then(ObjectId::of).is_some_and(|id| !keeps(id));
            // Images may stand on others.
            if is_left && is_same(&path, &self.place.repository.join(name)) {
                fs::remove_file(&path)
                    .map_err(Error::of_file(&path, "delete what is left of an earlier try"))?;
            }
        }
        Ok(())
    }

    fn replace_by_overlay(&mut self, epoch: &Epoch) -> Result<()> {
        let dir = self.layers();
        let state = self.place.state(epoch);
        let newest = state.newest().layer_name();
        let below = Path::new(dir.file_name().expect("made of a file's name")).join(newest.as_str());
        let draft = AtomicFile::beside(&self.place.path)?;
        write_overlay(&draft, &below, state.size)
            .map_err(Error::of_file(&self.place.path, "make the image"))?;
        self.note(Some(&draft.file.metadata().map_err(Error::of_file(&self.place.path, "examine"))?))?;
        Ok(draft.publish(&self.place.path, true)?)
    }

    /// Begins an image that gets all of the content.
    fn draft(&mut self, epoch: &Epoch) -> Result<Step> {
        // The inode of one that is left may come again.
        self.note(None)?;
        self.unlink(|_| false)?;
        // Others may have files in it.
        let _ = fs::remove_dir(self.layers());
        let draft = self.draft_path();
        let state = self.place.state(epoch);
        let options = CreateOptions {
            size: Some(state.size),
            cluster_bits: ClusterBits::DEFAULT,
            backing: Some((self.place.layer(state.newest()), Format::Qcow2)),
            force: true,
            ..CreateOptions::default()
        };
        create(&draft, &options)?;
        let range = all_of(state.objects.len() + 1).expect("a disk that was published has a layer");
        let options = MergeOptions {
            open: self.open.clone(),
            removal: Removal::Nothing,
            beyond_own: true,
            direction: Direction::Stream,
            ..MergeOptions::default()
        };
        Ok(Step::Fill(Box::new(Merge::new(&draft, range, &options, &self.resources)?)))
    }

    /// Takes the repository away from other hosts, unless one of them has taken the disk over.
    fn withdraw(&mut self) -> Result<()> {
        let (from, to) = (&self.place.repository, beside(&self.place.repository, GONE));
        let moved = |from: &Path, to: &Path| {
            fs::rename(from, to)
                .and_then(|()| sync_directory(self.directory()))
                .map_err(Error::of_file(from, "withdraw the repository"))
        };
        if !from.exists() {
            return Ok(());
        }
        delete_repository(&to)?;
        moved(from, &to)?;
        let owner = self.copy.as_ref().and_then(|copy| copy.record()).map(|record| record.owner);
        let head: Option<Head> = newest(&DirectoryRepository::open(&to, is_object_name)?)?;
        match head {
            Some(head) if Some(head.owner) != owner => {
                moved(&to, from)?;
                Err(Error::Fenced { repository: from.display().to_string(), by: Box::new(head) })
            }
            _ => Ok(()),
        }
    }

    fn empty(&self) -> Result<()> {
        delete_repository(&beside(&self.place.repository, GONE))
    }

    fn forget(&mut self) -> Result<()> {
        let gone = beside(&self.place.local, GONE);
        let failed = |action| Error::of_file(&self.place.local, action);
        if gone.exists() {
            fs::remove_dir_all(&gone).map_err(failed("delete the copy"))?;
        }
        if self.copy.is_some() {
            fs::rename(&self.place.local, &gone)
                .and_then(|()| sync_directory(self.place.tier()))
                .and_then(|()| fs::remove_dir_all(&gone))
                .map_err(failed("delete the copy"))?;
            self.copy = None;
        }
        Ok(())
    }
}

/// Refuses a repository of whose states somebody reads one: a clone, for instance.
fn refuse_readers(repository: &dyn Repository) -> Result<()> {
    let reader = Pin::all(repository)?.into_iter().find_map(|pin| match pin.purpose {
        Purpose::Reader(who) => Some(who),
        Purpose::Copy { .. } | Purpose::Snapshot { .. } => None,
    });
    match reader {
        Some(who) => Err(Error::IsRead { repository: repository.describe(), who }),
        None => Ok(()),
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    FileId::at(one).is_some_and(|file| FileId::at(other) == Some(file))
}

/// Deletes a repository that nobody uses any more, but for files that are not its own.
fn delete_repository(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    let repository = DirectoryRepository::open(dir, is_object_name)?;
    repository.sweep()?;
    let names = repository.names("")?;
    let lock = vmstrata_repo::ObjectName::LOCK;
    for name in names.iter().map(|name| name.as_str()).chain([lock]) {
        match fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::of_file(dir, "delete the repository")(error));
            }
            _ => {}
        }
    }
    match fs::remove_dir(dir) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
            tracing::warn!(dir = %dir.display(), "stays: it has files that are not the repository's");
            Ok(())
        }
        removed => removed.map_err(Error::of_file(dir, "delete the repository")),
    }
}
