//! Where objects live.
//!
//! An object is written once, and appears whole or not at all. It never changes, but another may take its place. What only some
//! kinds of repository do, [`Capabilities`] says.
//!
//! Invariant: an object that [`Repository::list`] names was complete and on stable storage before it got that name.

use std::fmt;
use std::io;

use crate::error::{Error, Result};
use crate::name::ObjectName;

/// Tells devices apart: repositories with the same number are lost together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u64);

#[cfg(any(feature = "hdfs", feature = "s3"))]
impl DeviceId {
    /// The device of all repositories at one place, which its text names.
    pub(crate) fn of_place(place: &str) -> Self {
        let hash = blake3::hash(place.as_bytes());
        Self(u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes have 8")))
    }
}

/// How a repository is to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// With others, to read: nothing is deleted meanwhile.
    Read,
    /// With others, to read and to write new objects.
    Write,
    /// Alone, to delete; waits.
    Alone,
    /// Alone, if nobody else holds it now.
    AloneOrNot,
}

/// Keeps a repository held until it is dropped; a killed process lets go.
pub type Held = Box<dyn Send + Sync>;

/// An object that is in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its name.
    pub name: ObjectName,
    /// Bytes of one copy.
    pub len: u64,
    /// Bytes that a copy takes of the device, as `du` counts them; its length where that is not known.
    pub allocated: u64,
    /// Copies that the repository keeps of it.
    pub copies: u8,
}

/// What writers left that did not come to finish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Unfinished objects.
    pub objects: usize,
    /// Bytes they took, as [`ObjectInfo::allocated`].
    pub bytes: u64,
}

impl std::ops::AddAssign for Swept {
    fn add_assign(&mut self, other: Self) {
        self.objects += other.objects;
        self.bytes += other.bytes;
    }
}

/// What a kind of repository does beyond what all do. What it does not do, it refuses by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// [`Repository::create_new`]: of several that make one object, one does.
    pub conditional_create: bool,
    /// [`Repository::rename`].
    pub rename: bool,
    /// [`NewObject::read_back`].
    pub read_back: bool,
    /// The same after [`NewObject::write_out`] already, of what was written until then.
    pub early_read_back: bool,
    /// The most copies that it keeps of an object, on devices of their own.
    pub max_copies: u8,
    /// A read of a part costs that part, not the whole object.
    pub ranged_reads: bool,
    /// [`Repository::free_bytes`].
    pub free_space: bool,
    /// [`Repository::hold`]; who writes an object and does not hold the repository may hold it with others from then on, until it is dropped.
    pub holds: bool,
}

/// A place for objects. What every kind must do, an object store with multi-part uploads and listing by prefix can do.
pub trait Repository: Send + Sync + fmt::Debug {
    /// What people call it, for messages.
    fn describe(&self) -> String;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// What its bytes lie on.
    fn device(&self) -> DeviceId;

    /// Bytes there is room for; [`u64::MAX`] without a limit.
    ///
    /// # Errors
    /// When it cannot be asked; `Unsupported` without [`Capabilities::free_space`].
    fn free_bytes(&self) -> Result<u64> {
        Err(unsupported(self, "asking for room"))
    }

    /// All objects whose names begin with `prefix`, in any order.
    ///
    /// # Errors
    /// When it cannot be read.
    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>>;

    /// Their names alone, which cost less where a file system is asked for each length.
    ///
    /// # Errors
    /// As [`Repository::list`].
    fn names(&self, prefix: &str) -> Result<Vec<ObjectName>> {
        Ok(self.list(prefix)?.into_iter().map(|object| object.name).collect())
    }

    /// Begins an object of which `copies` are to be kept. If another of that name is there when it is finished, `finish` fails
    /// with `AlreadyExists` and leaves that one alone.
    ///
    /// # Errors
    /// When it cannot be made; `InvalidInput` for a name that is not this repository's; `Unsupported` for more copies than
    /// it keeps, or without [`Capabilities::conditional_create`].
    fn create_new(&self, name: &ObjectName, _copies: u8) -> Result<Box<dyn NewObject>> {
        Err(Error { object: Some(name.clone()), ..unsupported(self, "creating") })
    }

    /// As [`Repository::create_new`], but one of that name is replaced, in one step.
    ///
    /// # Errors
    /// As there.
    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>>;

    /// Opens an object for reading.
    ///
    /// # Errors
    /// `NotFound`, and what the medium says.
    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>>;

    /// Deletes an object; one that is not there is deleted.
    ///
    /// # Errors
    /// When it may still be there.
    fn delete(&self, name: &ObjectName) -> Result<()>;

    /// Gives an object another name, durably and in one step; one that had that name is replaced.
    ///
    /// # Errors
    /// `NotFound`; when it may have either name; `Unsupported` without [`Capabilities::rename`].
    fn rename(&self, from: &ObjectName, _to: &ObjectName) -> Result<()> {
        Err(Error { object: Some(from.clone()), ..unsupported(self, "renaming") })
    }

    /// Removes what writers left that did not come to finish, or some of it. Returns what went. One that still writes may not be able to
    /// finish: hold the repository alone where that matters.
    ///
    /// # Errors
    /// When some may be left.
    fn sweep(&self) -> Result<Swept>;

    /// Holds the repository; `None` only for [`Hold::AloneOrNot`].
    ///
    /// # Errors
    /// When it cannot be held, by a repository that cannot be written for example; `Unsupported` without
    /// [`Capabilities::holds`].
    fn hold(&self, _how: Hold) -> Result<Option<Held>> {
        Err(unsupported(self, "holding"))
    }
}

fn unsupported(repository: &(impl Repository + ?Sized), action: &'static str) -> Error {
    let told = "this kind of repository cannot do that";
    Error::of(repository.describe(), action)(io::Error::new(io::ErrorKind::Unsupported, told))
}

impl Capabilities {
    /// Refuses more copies than the repository keeps.
    ///
    /// # Errors
    /// `Unsupported`, also for none.
    pub fn check_copies(self, copies: u8) -> io::Result<()> {
        if (1..=self.max_copies).contains(&copies) {
            return Ok(());
        }
        let told = format!("it keeps 1 to {} copies of an object, not {copies}", self.max_copies);
        Err(io::Error::new(io::ErrorKind::Unsupported, told))
    }
}

/// An object while it is written. Dropping it leaves nothing that is listed. After an error it can only be dropped.
pub trait NewObject: Send {
    /// Adds bytes at its end.
    ///
    /// # Errors
    /// When they were not, or not all, taken.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Brings the bytes so far to stable storage, where that is apart from writing them; more may follow.
    ///
    /// # Errors
    /// When they may not be there.
    fn write_out(&mut self) -> Result<()> {
        Ok(())
    }

    /// Brings all bytes to stable storage. No more are written then.
    ///
    /// # Errors
    /// When they may not be there.
    fn sync(&mut self) -> Result<()>;

    /// Opens what [`NewObject::sync`] brought to stable storage, or, with [`Capabilities::early_read_back`], [`NewObject::write_out`]: read from there,
    /// as far as that can be told.
    ///
    /// # Errors
    /// When it cannot be opened; `Unsupported` without [`Capabilities::read_back`].
    fn read_back(&self) -> Result<Box<dyn ObjectReader>>;

    /// Brings all bytes to stable storage, unless that was done, and gives the object its name, durably.
    ///
    /// # Errors
    /// `AlreadyExists` when it was to be new and is not: the one that is there is on stable storage then; else when it may or may not have its
    /// name.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// An object opened for reading, which may go on when it is deleted meanwhile.
pub trait ObjectReader: Send + Sync {
    /// Its bytes.
    fn len(&self) -> u64;

    /// Whether it has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `into` from `at` on.
    ///
    /// # Errors
    /// What the medium says; `UnexpectedEof` past the end.
    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()>;
}

/// Fills `into` from byte `at` of an object of `len` bytes, up to `most` bytes at a time.
///
/// # Errors
/// `UnexpectedEof` past the end; those of `read`.
#[cfg(any(feature = "hdfs", feature = "s3"))]
pub(crate) fn read_in_pieces(
    len: u64,
    (at, into): (u64, &mut [u8]),
    most: usize,
    read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let end = at.checked_add(into.len() as u64);
    if end.is_none_or(|end| end > len) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut pieces = into.chunks_mut(most).enumerate();
    pieces.try_for_each(|(number, piece)| read(at + (number * most) as u64, piece))
}
