//! Writing an object of pages anew, from whichever copies have its pages.
//!
//! Extents keep their numbers and pages their places, so metadata that refers to them stays as it is. The new copies are on
//! stable storage and read back before one of them takes the object's name.

use super::Vault;
use super::copies::ObjectCopies;
use super::error::{Result, VaultError};
use super::extent::{self, ExtentId, ExtentReader};
use super::live::PageSet;
use super::object;
use super::place::Share;
use super::survey::wrong;
use super::verify::check_copy;
use super::writer::{Building, Copies};
use crate::address::PAGE_BYTES;

/// Nobody waits for it: worth more than the speed of level 1.
const LEVEL: i32 = 3;

/// Writes copies of an object that have these pages and no others. They have no name yet. `None` when no copy has one of the
/// pages.
///
/// # Errors
/// What the repositories say; [`VaultError::Damaged`] when a new copy does not read back.
pub(super) fn rewrite(
    vault: &Vault,
    object: &ObjectCopies,
    kept: &PageSet,
    shares: &[Share],
) -> Result<Option<Copies>> {
    let name = object.name;
    let mut building = Building::begin(vault, name, shares)?;
    let mut compressor = zstd::bulk::Compressor::new(LEVEL).map_err(|_| VaultError::Worker)?;
    let mut reader = ExtentReader::default();
    let mut extents: Vec<(u32, u64)> = kept.extents().collect();
    extents.sort_by_cached_key(|(number, _)| object.offset(*number));
    for (number, places) in extents {
        let (have, _) = object.read(number, places, &mut reader);
        if have != places {
            return Ok(None);
        }
        let id = ExtentId { object: name, number };
        let is_as_stored = !reader.stored().is_empty() && reader.filled() == places;
        let packed = if is_as_stored {
            reader.stored().to_vec()
        } else {
            reader.keep(places);
            extent::pack(id, reader.pages(), &mut compressor)
        };
        let hashes = reader.pages().chunks(PAGE_BYTES).map(object::hash).collect();
        building.append(number, &packed, hashes)?;
    }
    let (copies, _) = building.end()?;
    for (repository, reader) in copies.read_back()? {
        let place = wrong(vault.repository(repository), name, "the new copy does not read back");
        let copy = ObjectCopies::of(name, repository, reader);
        let (pages, found) = check_copy(&copy, &copy.copies[0]);
        let reason = found.err().map(|malformed| malformed.0);
        if reason.is_some() || pages != *kept {
            return Err(VaultError::Damaged { place, reason: reason.unwrap_or("it lacks pages") });
        }
    }
    Ok(Some(copies))
}
