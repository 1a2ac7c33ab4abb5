//! Objects on their way into a repository.
//!
//! ```text
//!   written    ████████████████████████░░░░     the wire carries both ways at once
//!   read back  ████████████████░░░░░░░░░░░░     a stretch behind, by a thread of its own
//! ```
//!
//! What is shipped is read back, and compared with the digests of what was written, before it gets its name: a large object stretch by
//! stretch while it is written, the rest at its end.

use std::ops::Range;
use std::thread::{self, JoinHandle};

use vmstrata_repo::{NewObject, ObjectName, ObjectReader, Repository};
use vmstrata_store::Planted;

use crate::companion::{Companion, Packer};
use crate::digests::{CHUNK, Digester, Digests, proves};
use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};

/// Copies of each object, where the repository keeps several.
const COPIES: u8 = 3;
/// Bytes read back at a time.
const PIECE: u64 = 1 << 20;
/// Bytes after which what was written until then is read back, if the repository can do that.
const STRETCH: u64 = 16 << 20;
/// Chunks of a piece.
const PIECE_CHUNKS: usize = (PIECE / CHUNK) as usize;
/// Blocks of zeros take no room where the repository is a directory.
const BLOCK: usize = 4096;

/// Bytes that are not blocks of zeros.
pub(crate) fn stored_bytes(bytes: &[u8]) -> u64 {
    let stored = bytes.chunks(BLOCK).filter(|block| block.iter().any(|byte| *byte != 0));
    stored.map(|block| block.len() as u64).sum()
}

/// An object that is being shipped, from front to back.
pub struct Shipment {
    repository: String,
    name: ObjectName,
    object: Box<dyn NewObject>,
    digester: Digester,
    tables: Packer,
    stored: u64,
    /// What of it is read back; `None` where the repository cannot do so before its end.
    early: Option<Early>,
}

/// What is read back of an object that is still written.
#[derive(Default)]
struct Early {
    /// Chunks that were read back, or are.
    chunks: usize,
    /// Reads the last of them; whether they are right.
    reads: Option<JoinHandle<Result<bool>>>,
}

impl Early {
    /// Waits for what is read; whether it is right.
    fn join(&mut self) -> Result<bool> {
        self.reads.take().map_or(Ok(true), |reads| reads.join().expect("does not panic"))
    }
}

impl Shipment {
    pub(crate) fn begin(repository: &dyn Repository, name: ObjectName) -> Result<Self> {
        let copies = COPIES.min(repository.capabilities().max_copies);
        let object = repository.create_new(&name, copies)?;
        let (digester, tables) = (Digester::default(), Packer::default());
        let early = repository.capabilities().early_read_back.then(Early::default);
        Ok(Self { repository: repository.describe(), name, object, digester, tables, stored: 0, early })
    }

    /// Adds bytes at its end.
    ///
    /// # Errors
    /// What the repository reports; the object is then not shipped.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.digester.update(bytes);
        self.stored += stored_bytes(bytes);
        self.object.write(bytes)?;
        self.read_early()
    }

    /// Has a thread read back what was written, if that is a stretch.
    fn read_early(&mut self) -> Result<()> {
        let written = self.digester.complete();
        let Some(early) = self.early.as_mut().filter(|early| is_due(written.len() - early.chunks)) else {
            return Ok(());
        };
        if !early.join()? {
            return Err(self.corrupt());
        }
        self.object.write_out()?;
        let (reader, first, wanted) =
            (self.object.read_back()?, early.chunks, written[early.chunks..].to_vec());
        early.chunks = written.len();
        let is_right = move |chunk: usize, bytes: &[u8]| proves(&wanted[chunk - first], chunk, bytes);
        let chunks = first..early.chunks;
        let end = early.chunks as u64 * CHUNK;
        let read = move || Ok(reader.len() >= end && are_right(&*reader, chunks, is_right)?);
        let reads = thread::Builder::new().name("read-back".to_owned()).spawn(read);
        // Without a thread, it is read at the end.
        match reads {
            Ok(reads) => early.reads = Some(reads),
            Err(_) => early.chunks = first,
        }
        Ok(())
    }

    fn corrupt(&self) -> Error {
        Error::Corrupt { repository: self.repository.clone(), name: self.name.clone() }
    }

    /// Adds bytes at its end that its companion has as well. They come before all others, whole chunks together.
    ///
    /// # Errors
    /// As [`Shipment::put`].
    pub(crate) fn put_tables(&mut self, bytes: &[u8]) -> Result<()> {
        self.tables.update(bytes);
        self.put(bytes)
    }

    /// Gives the object its name, once the repository has all of it on stable storage and gives it back as it was written.
    pub(crate) fn finish(mut self) -> Result<Digests> {
        self.object.sync()?;
        let digests = std::mem::take(&mut self.digester).finish();
        let mut early = self.early.take().unwrap_or_default();
        let mut is_read = || {
            Ok::<_, Error>(
                early.join()? && is_right_from(early.chunks, &*self.object.read_back()?, &digests)?,
            )
        };
        if !Planted::Unverified.is_there() && !is_read()? {
            return Err(self.corrupt());
        }
        match self.object.finish() {
            Err(_) if Planted::TrustedFinish.is_there() => {}
            finished => finished?,
        }
        Ok(digests)
    }
}

/// Whether so many chunks are a stretch.
fn is_due(chunks: usize) -> bool {
    chunks as u64 * CHUNK >= STRETCH && !Planted::Unverified.is_there()
}

/// Reads an object from a chunk on; whether it has these digests.
pub(crate) fn is_right_from(first: usize, object: &dyn ObjectReader, digests: &Digests) -> Result<bool> {
    let chunks = object.len().div_ceil(CHUNK) as usize;
    Ok(object.len() == digests.bytes()
        && are_right(object, first..chunks, |chunk, bytes| digests.prove(chunk, bytes))?)
}

/// Reads chunks of an object; whether all of them are right.
fn are_right(
    object: &dyn ObjectReader,
    chunks: Range<usize>,
    is_right: impl Fn(usize, &[u8]) -> bool,
) -> Result<bool> {
    let mut piece = vec![0; PIECE as usize];
    for first in chunks.clone().step_by(PIECE_CHUNKS) {
        let at = first as u64 * CHUNK;
        let end = (chunks.end as u64 * CHUNK).min(at + PIECE).min(object.len());
        let piece = &mut piece[..(end - at) as usize];
        object.read_at(at, piece)?;
        if !piece.chunks(CHUNK as usize).zip(first..).all(|(bytes, chunk)| is_right(chunk, bytes)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A file that has the name of a layer, on its way to be one that heads can name: it is read, from front to back.
pub(crate) struct Adoption {
    id: ObjectId,
    object: Box<dyn ObjectReader>,
    at: u64,
    digester: Digester,
    /// Bytes that are not blocks of zeros.
    stored: u64,
}

impl Adoption {
    /// The file of this name.
    ///
    /// # Errors
    /// What the repository reports.
    pub(crate) fn begin(repository: &dyn Repository, id: ObjectId) -> Result<Self> {
        let object = repository.open(&id.layer_name())?;
        Ok(Self { id, object, at: 0, digester: Digester::default(), stored: 0 })
    }

    /// Bytes that are left to be read.
    pub(crate) fn left(&self) -> u64 {
        self.object.len() - self.at
    }

    /// Reads so many bytes more, at most; the next piece is at the same place after an error.
    ///
    /// # Errors
    /// What the repository reports.
    pub(crate) fn read(&mut self, most: u64) -> Result<u64> {
        let mut piece = vec![0; self.left().min(PIECE).min(most) as usize];
        self.object.read_at(self.at, &mut piece)?;
        self.digester.update(&piece);
        self.stored += stored_bytes(&piece);
        self.at += piece.len() as u64;
        Ok(piece.len() as u64)
    }

    /// Ships the companion of what was read.
    ///
    /// # Errors
    /// What the repository reports; [`Error::Corrupt`]. It can be tried again.
    pub(crate) fn finish(&self, repository: &dyn Repository) -> Result<Object> {
        assert_eq!(self.left(), 0, "all is read first");
        let digests = self.digester.clone().finish();
        // Of an earlier try.
        repository.delete(&self.id.companion_name())?;
        ship_companion(repository, digests.object(self.id, self.stored, 0), digests, Vec::new())
    }
}

/// Ships a layer whose bytes `write` puts, and which says of so much of the disk that it is zeros, and its companion. When this
/// returns, both are complete.
///
/// # Errors
/// What `write` or the repository report; [`Error::Corrupt`]. No head must name the layer then; an object of that name may be left over.
pub fn ship(
    repository: &dyn Repository,
    zeros: u64,
    write: impl FnOnce(&mut Shipment) -> Result<()>,
) -> Result<Object> {
    // Drawn for each attempt: a late end of an earlier one can then do no harm.
    let id = ObjectId::draw();
    let mut shipment = Shipment::begin(repository, id.layer_name())?;
    write(&mut shipment)?;
    let (stored, tables) = (shipment.stored, std::mem::take(&mut shipment.tables).finish());
    let shipped = shipment
        .finish()
        .and_then(|digests| ship_companion(repository, digests.object(id, stored, zeros), digests, tables));
    if shipped.is_err() {
        // They may be there; what comes later still, the next claim finds.
        let _ = remove(repository, id);
    }
    shipped
}

/// Makes a file that has the name of a layer already one that heads can name: reads it, and ships its companion.
///
/// # Errors
/// What the repository reports; [`Error::Corrupt`].
pub fn adopt(repository: &dyn Repository, id: ObjectId) -> Result<Object> {
    let mut adoption = Adoption::begin(repository, id)?;
    while adoption.left() > 0 {
        adoption.read(PIECE)?;
    }
    adoption.finish(repository)
}

/// Deletes a layer, and its companion.
pub(crate) fn remove(repository: &dyn Repository, id: ObjectId) -> vmstrata_repo::Result<()> {
    repository.delete(&id.layer_name())?;
    repository.delete(&id.companion_name())
}

fn ship_companion(
    repository: &dyn Repository,
    object: Object,
    digests: Digests,
    tables: Vec<Vec<u8>>,
) -> Result<Object> {
    let mut shipment = Shipment::begin(repository, object.id.companion_name())?;
    shipment.put(&Companion::new(digests, tables).encode())?;
    shipment.finish()?;
    Ok(object)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use vmstrata_repo::{Capabilities, DeviceId, DirectoryRepository, ObjectInfo, Result as Answer, Swept};

    use super::*;
    use crate::head::is_object_name;

    /// A repository that keeps one byte of each object wrong.
    #[derive(Debug)]
    struct Lying {
        inner: DirectoryRepository,
        at: u64,
    }

    struct LyingObject {
        inner: Box<dyn NewObject>,
        at: u64,
    }

    struct LyingReader {
        inner: Box<dyn ObjectReader>,
        at: u64,
    }

    impl Repository for Lying {
        fn describe(&self) -> String {
            self.inner.describe()
        }

        fn capabilities(&self) -> Capabilities {
            self.inner.capabilities()
        }

        fn device(&self) -> DeviceId {
            self.inner.device()
        }

        fn list(&self, prefix: &str) -> Answer<Vec<ObjectInfo>> {
            self.inner.list(prefix)
        }

        fn create_new(&self, name: &ObjectName, copies: u8) -> Answer<Box<dyn NewObject>> {
            Ok(Box::new(LyingObject { inner: self.inner.create_new(name, copies)?, at: self.at }))
        }

        fn replace(&self, name: &ObjectName, copies: u8) -> Answer<Box<dyn NewObject>> {
            self.inner.replace(name, copies)
        }

        fn open(&self, name: &ObjectName) -> Answer<Box<dyn ObjectReader>> {
            self.inner.open(name)
        }

        fn delete(&self, name: &ObjectName) -> Answer<()> {
            self.inner.delete(name)
        }

        fn sweep(&self) -> Answer<Swept> {
            self.inner.sweep()
        }
    }

    impl NewObject for LyingObject {
        fn write(&mut self, bytes: &[u8]) -> Answer<()> {
            self.inner.write(bytes)
        }

        fn write_out(&mut self) -> Answer<()> {
            self.inner.write_out()
        }

        fn sync(&mut self) -> Answer<()> {
            self.inner.sync()
        }

        fn read_back(&self) -> Answer<Box<dyn ObjectReader>> {
            Ok(Box::new(LyingReader { inner: self.inner.read_back()?, at: self.at }))
        }

        fn finish(self: Box<Self>) -> Answer<()> {
            self.inner.finish()
        }
    }

    impl ObjectReader for LyingReader {
        fn len(&self) -> u64 {
            self.inner.len()
        }

        fn read_at(&self, at: u64, into: &mut [u8]) -> Answer<()> {
            self.inner.read_at(at, into)?;
            if let Some(byte) = self.at.checked_sub(at).and_then(|place| into.get_mut(place as usize)) {
                *byte ^= 1;
            }
            Ok(())
        }
    }

    #[test]
    fn a_byte_that_the_repository_keeps_wrong_is_found_wherever_it_is() {
        let private = fs::Permissions::from_mode(0o700);
        let dir = tempfile::Builder::new().permissions(private).tempdir().unwrap();
        let len = 2 * STRETCH + 3 * CHUNK + 1;
        let ship_at = |at: u64| {
            let inner = DirectoryRepository::open(dir.path(), is_object_name).unwrap();
            ship(&Lying { inner, at }, 0, |shipment| {
                (0..len)
                    .step_by(777_777)
                    .try_for_each(|at| shipment.put(&vec![7; (len - at).min(777_777) as usize]))
            })
        };
        for at in [0, STRETCH - 1, STRETCH, 2 * STRETCH - 1, 2 * STRETCH + CHUNK, len - 1] {
            let refused = ship_at(at).unwrap_err();
            assert!(matches!(refused, Error::Corrupt { .. }), "byte {at}: {refused}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left of them");
        assert_eq!(ship_at(len).unwrap().bytes, len);
    }
}
