//! The state that a disk stands on, of another disk which is tiered: another one of the same repository, and the pins that keep both.
//!
//! ```text
//!   golden.qcow2.tier/  ◄─ v1 ◄─ v2            each clone has a pin, by its path
//!                          ▲     ▲
//!                  desk0 ──┘ ·····             `BaseState` finds v2 by the name of v1's directory
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::directory_of;
use vmstrata_disk::snapshot::split_state;
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_store::FileId;
use vmstrata_types::path_to_text;

use crate::elsewhere::{DiskAddress, RepositoryAddress};
use crate::error::{Error, Result};
use crate::group::repository_of;
use crate::head::{PinId, is_object_name};
use crate::pin::{Pin, Purpose};
use crate::place::stand_in;
use crate::states::snapshots;

/// A snapshot of a tiered disk that a clone of another one of its snapshots can stand on.
#[derive(Debug)]
pub struct BaseState {
    repository: Arc<dyn Repository>,
    named: Pin,
    layer: PathBuf,
}

impl BaseState {
    /// The snapshot that people call `onto`, as `BASE@VERSION`: `BASE` is a path, or an address. `below` is the newest published layer that
    /// the disk stands on, by the name that it has for it.
    ///
    /// # Errors
    /// [`Error::NoState`]; [`Error::OtherBase`]; a repository that cannot be read.
    pub fn find(onto: &Path, below: &Path) -> Result<Self> {
        let other = |why: &str| Error::OtherBase { onto: path_to_text(onto), why: why.to_owned() };
        let (base, version) = split_state(onto).ok_or_else(|| other("say BASE@VERSION"))?;
        let directory = directory_of(below);
        let address = base.to_str().filter(|text| DiskAddress::is_address(text));
        let (repository, disk, is_same) = match address.map(DiskAddress::parse).transpose()? {
            Some(DiskAddress { repository, disk }) => {
                let name = stand_in(Path::new(""), &repository.place());
                (repository.open()?, disk, directory.file_name() == name.file_name())
            }
            None => {
                let base = base.canonicalize().map_err(Error::of_file(base, "find"))?;
                let name = base.file_name().map(|name| name.to_string_lossy().into_owned());
                let its = repository_of(&base);
                let is_same = FileId::at(&its).is_some_and(|its| FileId::at(&directory) == Some(its));
                (repository_in(&its)?, name, is_same)
            }
        };
        if !is_same {
            return Err(other(&format!("the disk stands on {}, of another base", below.display())));
        }
        let found = snapshots(&*repository)?.into_iter().find(|(info, _)| info.name == version);
        let (_, named) = found.ok_or_else(|| {
            let why = format!("no snapshot '{version}'");
            Error::NoState { repository: repository.describe(), why }
        })?;
        let state = match (&disk, &named.epoch.disks[..]) {
            (None, [only]) => Some(only),
            (None, _) => None,
            // A path that was published alone may have another name by now.
            (Some(disk), _) if address.is_none() => named.epoch.disk(disk),
            (Some(disk), disks) => disks.iter().find(|state| state.name == *disk),
        };
        let state = state.ok_or_else(|| other("name one of its disks"))?;
        let layer = directory.join(state.newest().layer_name().as_str());
        Ok(Self { repository, named, layer })
    }

    /// The same for a disk that has its base's layers in a repository of its own.
    ///
    /// # Errors
    /// As [`BaseState::find`]; a base whose layers are no files.
    pub fn find_shared(onto: &Path) -> Result<Self> {
        let other = |why: &str| Error::OtherBase { onto: path_to_text(onto), why: why.to_owned() };
        let (base, _) = split_state(onto).ok_or_else(|| other("say BASE@VERSION"))?;
        if base.to_str().is_some_and(DiskAddress::is_address) {
            return Err(other("a tiered disk shares the layers of a base in a directory alone"));
        }
        let base = base.canonicalize().map_err(Error::of_file(base, "find"))?;
        Self::find(onto, &repository_of(&base).join("any"))
    }

    /// Its newest layer, by the name that the disk has for it, or its base.
    pub fn layer(&self) -> &Path {
        &self.layer
    }

    /// Has its layers kept for the disk at `disk`, by a pin of that id.
    ///
    /// # Errors
    /// As [`Pin::again`].
    pub fn keep_for(&self, disk: &Path, id: PinId) -> Result<Pin> {
        self.named.again_as(&*self.repository, &clone_reader(disk), id)
    }

    /// Lets go of what [`BaseState::keep_for`] made.
    ///
    /// # Errors
    /// As [`Pin::release`].
    pub fn release(&self, pin: &Pin) -> Result<()> {
        pin.release(&*self.repository)
    }
}

/// Why a state is kept that the clone at `disk` stands on.
pub fn clone_reader(disk: &Path) -> Purpose {
    let path = std::path::absolute(disk).unwrap_or_else(|_| disk.to_owned());
    Purpose::reader(&format!("clone {}", path_to_text(&path)))
}

/// Releases those of the pins for the clone at `disk`, which may have been made on another host, that are to `go`. The clone stands on the
/// published layer `below`, whose repository is at `address`, or its directory.
///
/// # Errors
/// A repository that cannot be read or written.
pub fn release_clone(
    disk: &Path,
    (below, address): (&Path, Option<&RepositoryAddress>),
    goes: impl Fn(&Pin) -> bool,
) -> Result<()> {
    let repository = match address {
        Some(address) => address.open()?,
        None => repository_in(&directory_of(below))?,
    };
    let of = |purpose: &Purpose| match purpose {
        Purpose::Reader(who) => who.rsplit_once(" at ").map(|(of, _)| of.to_owned()),
        _ => None,
    };
    let own = of(&clone_reader(disk));
    let pins = Pin::all(&*repository)?.into_iter();
    let mut own = pins.filter(|pin| own.is_some() && of(&pin.purpose) == own && goes(pin));
    own.try_for_each(|pin| pin.release(&*repository))
}

fn repository_in(directory: &Path) -> Result<Arc<dyn Repository>> {
    Ok(Arc::new(DirectoryRepository::open(directory, is_object_name)?))
}
