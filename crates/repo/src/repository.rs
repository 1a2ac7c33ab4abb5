//! Where objects live.
//!
//! An object is written once, and appears whole or not at all. It never changes, but another may take its place. A directory
//! keeps one copy; a repository that replicates by itself (HDFS) is told how many copies to keep.
//!
//! Invariant: an object that [`Repository::list`] names was complete and on stable storage before it got that name.

use std::fmt;

use crate::error::Result;
use crate::name::ObjectName;

/// Tells devices apart: repositories with the same number are lost together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u64);

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

/// What writers left that did not come to publish.
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

/// A place for objects.
pub trait Repository: Send + Sync + fmt::Debug {
    /// What people call it, for messages.
    fn describe(&self) -> String;

    /// What its bytes lie on.
    fn device(&self) -> DeviceId;

    /// The most copies it keeps of an object, on devices of their own.
    fn max_copies(&self) -> u8 {
        1
    }

    /// Bytes there is room for.
    ///
    /// # Errors
    /// When it cannot be asked.
    fn free_bytes(&self) -> Result<u64>;

    /// All objects, in any order.
    ///
    /// # Errors
    /// When it cannot be read.
    fn list(&self) -> Result<Vec<ObjectInfo>>;

    /// Begins an object of which `copies` (up to [`Repository::max_copies`]) are to be kept; only while the repository is held.
    /// One of that name is replaced when the new one is published.
    ///
    /// # Errors
    /// When it cannot be made.
    fn create(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>>;

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

    /// Removes what writers left that did not come to publish; only while held alone. Returns what went.
    ///
    /// # Errors
    /// When some may be left.
    fn sweep(&self) -> Result<Swept>;

    /// Holds the repository; `None` only for [`Hold::AloneOrNot`].
    ///
    /// # Errors
    /// When it cannot be held, by a repository that cannot be written for example.
    fn hold(&self, how: Hold) -> Result<Option<Held>>;
}

/// An object while it is written. Dropping it leaves nothing that is listed.
pub trait NewObject: Send {
    /// Adds bytes at its end.
    ///
    /// # Errors
    /// When they were not, or not all, taken: the object is then of no use.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Brings all bytes to stable storage.
    ///
    /// # Errors
    /// When they may not be there.
    fn sync(&mut self) -> Result<()>;

    /// Opens what a [`NewObject::sync`] that succeeded brought to stable storage: read from there, as far as that can be told.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn read_back(&self) -> Result<Box<dyn ObjectReader>>;

    /// Gives it its name, durably; an object that had it is replaced in one step. Called after a [`NewObject::sync`] that
    /// succeeded.
    ///
    /// # Errors
    /// When it may not have its name.
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
