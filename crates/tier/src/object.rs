//! Objects on their way into a repository.

use vmstrata_repo::{NewObject, ObjectName, Repository};
use vmstrata_store::Planted;

use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};

/// Bytes read back at a time.
const PIECE: usize = 1 << 20;

/// An object that is being shipped, from front to back.
pub struct Shipment {
    repository: String,
    name: ObjectName,
    object: Box<dyn NewObject>,
    hash: blake3::Hasher,
}

impl Shipment {
    pub(crate) fn begin(repository: &dyn Repository, name: ObjectName) -> Result<Self> {
        let object = repository.create_new(&name, 1)?;
        Ok(Self { repository: repository.describe(), name, object, hash: blake3::Hasher::new() })
    }

    /// Adds bytes at its end.
    ///
    /// # Errors
    /// What the repository reports; the object is then not shipped.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
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

/// Ships a layer whose bytes `write` puts. When this returns, it is complete.
///
/// # Errors
/// What `write` or the repository report; [`Error::Corrupt`]. No head must name the layer then; an object of that name may be left over.
pub fn ship(repository: &dyn Repository, write: impl FnOnce(&mut Shipment) -> Result<()>) -> Result<Object> {
    // Drawn for each attempt: a late end of an earlier one can then do no harm.
    let id = ObjectId::draw();
    let mut shipment = Shipment::begin(repository, id.layer_name())?;
    write(&mut shipment)?;
    let (bytes, blake3) = shipment.finish()?;
    Ok(Object { id, bytes, blake3 })
}
