//! Objects on their way into a repository.

use vmstrata_repo::{NewObject, ObjectName, ObjectReader, Repository};
use vmstrata_store::Planted;

use crate::companion::{Companion, Packer};
use crate::digests::{Digester, Digests};
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
    digester: Digester,
    tables: Packer,
    stored: u64,
}

impl Shipment {
    pub(crate) fn begin(repository: &dyn Repository, name: ObjectName) -> Result<Self> {
        let object = repository.create_new(&name, 1)?;
        let (repository, digester, tables) = (repository.describe(), Digester::default(), Packer::default());
        Ok(Self { repository, name, object, digester, tables, stored: 0 })
    }

    /// Adds bytes at its end.
    ///
    /// # Errors
    /// What the repository reports; the object is then not shipped.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.digester.update(bytes);
        self.stored += stored_bytes(bytes);
        Ok(self.object.write(bytes)?)
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
        if !Planted::Unverified.is_there() && read(&*self.object.read_back()?)?.0 != digests {
            return Err(Error::Corrupt { repository: self.repository, name: self.name });
        }
        match self.object.finish() {
            Err(_) if Planted::TrustedFinish.is_there() => {}
            finished => finished?,
        }
        Ok(digests)
    }
}

/// Reads all of an object: its digests, and how many of its bytes are not blocks of zeros.
fn read(object: &dyn ObjectReader) -> Result<(Digests, u64)> {
    let (mut digester, mut stored, mut piece) = (Digester::default(), 0, vec![0; PIECE]);
    for at in (0..object.len()).step_by(PIECE) {
        let piece = &mut piece[..(object.len() - at).min(PIECE as u64) as usize];
        object.read_at(at, piece)?;
        digester.update(piece);
        stored += stored_bytes(piece);
    }
    Ok((digester.finish(), stored))
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
    let shipped = shipment.finish().and_then(|digests| {
        ship_companion(repository, digests.object(id, stored, zeros), digests, tables)
    });
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
    let (digests, stored) = read(&*repository.open(&id.layer_name())?)?;
    ship_companion(repository, digests.object(id, stored, 0), digests, Vec::new())
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
