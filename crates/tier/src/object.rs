//! Objects on their way into a repository.

use vmstrata_repo::{NewObject, ObjectName, Repository};
use vmstrata_store::Planted;

use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};

/// Bytes read back at a time.
const PIECE: usize = 1 << 20;
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
    hash: blake3::Hasher,
    stored: u64,
}

impl Shipment {
    pub(crate) fn begin(repository: &dyn Repository, name: ObjectName) -> Result<Self> {
        let object = repository.create_new(&name, 1)?;
        Ok(Self { repository: repository.describe(), name, object, hash: blake3::Hasher::new(), stored: 0 })
    }

    /// Adds bytes at its end.
    ///
    /// # Errors
    /// What the repository reports; the object is then not shipped.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.stored += stored_bytes(bytes);
        Ok(self.object.write(bytes)?)
    }

    /// Gives the object its name, once the repository has all of it on stable storage and gives it back as it was written.
    /// Returns length and hash.
    pub(crate) fn finish(mut self) -> Result<(u64, blake3::Hash)> {
        self.object.sync()?;
        let sum = (self.hash.count(), self.hash.finalize());
        if !Planted::Unverified.is_there() && self.read_back()? != sum {
            return Err(Error::Corrupt { repository: self.repository, name: self.name });
        }
        match self.object.finish() {
            Err(_) if Planted::TrustedFinish.is_there() => {}
            finished => finished?,
        }
        Ok(sum)
    }

    fn read_back(&self) -> Result<(u64, blake3::Hash)> {
        let reader = self.object.read_back()?;
        let (mut hash, mut piece) = (blake3::Hasher::new(), vec![0; PIECE]);
        for at in (0..reader.len()).step_by(PIECE) {
            let piece = &mut piece[..(reader.len() - at).min(PIECE as u64) as usize];
            reader.read_at(at, piece)?;
            hash.update(piece);
        }
        Ok((hash.count(), hash.finalize()))
    }
}

/// Ships a layer whose bytes `write` puts, and which says of so much of the disk that it is zeros. When this returns, it is complete.
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
    let stored = shipment.stored;
    match shipment.finish() {
        Ok((bytes, blake3)) => Ok(Object { id, bytes, blake3, stored, zeros }),
        Err(error) => {
            // It may be there; what comes later still, the next claim finds.
            let _ = repository.delete(&id.layer_name());
            Err(error)
        }
    }
}
