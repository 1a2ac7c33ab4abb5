//! Making copies again that are missing or damaged, from those that are whole.
//!
//! Copies are the same bytes, so each extent may come from another copy. Objects come first and metadata last, as when the
//! snapshot was written: a home that lists a snapshot has what it counts on there.

use super::Vault;
use super::error::{Result, VaultError};
use super::extent::{ExtentId, ExtentReader};
use super::home::{Hold, ObjectReader};
use super::info::{Info, ObjectUse};
use super::name::{ObjectKind, ObjectName, SnapshotId};
use super::object::{self, Hash};
use super::place::{self, Share};
use super::policy::{OneDevice, Policy};
use super::survey::Survey;
use super::verify::{Checked, CheckedObject, Health};
use crate::address::PAGE_BYTES;

/// What was repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// Copies made, as `HOME/OBJECT`.
    pub made: Vec<String>,
    /// What the snapshots have after that.
    pub health: Vec<Health>,
}

impl Vault {
    /// Makes the missing and damaged copies of these snapshots again; of all for none. What has no whole copy left, and
    /// copies for which there is no home, stay as they are, and are in the health returned.
    ///
    /// # Errors
    /// When no home can be read, or a copy cannot be written.
    pub fn repair(&self, ids: &[SnapshotId], one_device: OneDevice) -> Result<Repaired> {
        let _held = self.hold(Hold::Write)?;
        let survey = Survey::take(self)?;
        let ids = self.ids_or_all(&survey, ids)?;
        let mut checked = Checked::default();
        let mut made = Vec::new();
        for id in &ids {
            let (metadata, whole) = self.check_metadata(&survey, *id, &mut Vec::new());
            let Some(metadata) = metadata else { continue };
            let shares = self.shares_of(&survey, &metadata.info, one_device)?;
            let mut all_there = true;
            for object in metadata.info.objects.values() {
                let found = checked.object(self, &survey, object.name);
                let is_clean = object.name.kind == ObjectKind::Clean;
                let whole: Vec<usize> = found.whole().collect();
                let wanted = if is_clean { object.copies } else { all_of(&shares) };
                let lacking = lacking(&survey, object.name, &whole, &shares, wanted);
                all_there &= self.repair_object(*object, found, &lacking, &mut made)?;
            }
            if all_there {
                let name = ObjectName { owner: *id, kind: ObjectKind::Metadata };
                let lacking = lacking(&survey, name, &whole, &shares, all_of(&shares));
                self.repair_metadata(name, &whole, &lacking, &mut made)?;
            }
        }
        let (survey, mut checked) = (Survey::take(self)?, Checked::default());
        let health = ids.iter().map(|id| self.check(&survey, &mut checked, *id)).collect();
        Ok(Repaired { made, health })
    }

    /// Where a snapshot should be: where it is, and as many other homes as are needed and there.
    fn shares_of(&self, survey: &Survey, info: &Info, one_device: OneDevice) -> Result<Vec<Share>> {
        let names = info.objects.values().map(|object| object.name);
        let names = names.chain([ObjectName { owner: info.id, kind: ObjectKind::Metadata }]);
        let preferred: Vec<usize> =
            names.flat_map(|name| survey.copies(name)).map(|copy| copy.home).collect();
        let mut copies = info.critical_copies;
        loop {
            let policy = Policy { critical_copies: copies, one_device, ..Policy::default() };
            match place::choose(self, &policy, &preferred) {
                Err(VaultError::TooFewHomes { .. } | VaultError::SharedDevice { .. }) if copies > 1 => {
                    copies -= 1;
                }
                other => return other,
            }
        }
    }

    /// Makes copies of an object where they lack; false when some of its pages are in no copy, so that none can be made.
    /// Clean pages that are lost are no obstacle.
    fn repair_object(
        &self,
        object: ObjectUse,
        found: &CheckedObject,
        lacking: &[Share],
        made: &mut Vec<String>,
    ) -> Result<bool> {
        if lacking.is_empty() {
            return Ok(true);
        }
        let is_clean = object.name.kind == ObjectKind::Clean;
        let Some(bytes) = self.gather(object, found) else { return Ok(is_clean) };
        for share in lacking {
            self.put(object.name, *share, &bytes, made)?;
        }
        Ok(true)
    }

    /// The object's bytes from all its copies; `None` when some are nowhere.
    fn gather(&self, object: ObjectUse, found: &CheckedObject) -> Option<Vec<u8>> {
        let name = object.name;
        let open = |home: usize| self.home(home).open(name).ok();
        if let Some(home) = found.whole().next() {
            return read_all(open(home)?.as_ref());
        }
        let readers: Vec<_> = found.copies.iter().map(|copy| open(copy.home)).collect();
        let mut extents: Vec<_> =
            (0u32..).zip(&found.contents.extents).filter(|(_, place)| place.len > 0).collect();
        extents.sort_by_key(|(_, place)| place.offset);
        let mut bytes = object::header(name).to_vec();
        let mut hashes: Vec<Vec<Hash>> = vec![Vec::new(); found.contents.extents.len()];
        let mut extent = ExtentReader::default();
        for (number, place) in extents {
            let has = |index: &usize| found.copies[*index].good.get(number as usize) == Some(&true);
            let reader = readers[(0..readers.len()).find(has)?].as_ref()?;
            extent.read(ExtentId { object: name, number }, *place, reader.as_ref()).ok()?;
            hashes[number as usize] = extent.pages().chunks(PAGE_BYTES).map(object::hash).collect();
            if place.offset != bytes.len() as u64 {
                return None;
            }
            bytes.extend(extent.stored());
        }
        let end = object::trailer(bytes.len() as u64, &found.contents.extents, &hashes);
        bytes.extend(end);
        // Extents that no copy has any more leave it shorter.
        (bytes.len() as u64 == object.len).then_some(bytes)
    }

    fn repair_metadata(
        &self,
        name: ObjectName,
        whole: &[usize],
        lacking: &[Share],
        made: &mut Vec<String>,
    ) -> Result<()> {
        if lacking.is_empty() {
            return Ok(());
        }
        let Some(bytes) = whole.iter().find_map(|home| read_all(self.home(*home).open(name).ok()?.as_ref()))
        else {
            return Ok(());
        };
        lacking.iter().try_for_each(|share| self.put(name, *share, &bytes, made))
    }

    fn put(&self, name: ObjectName, share: Share, bytes: &[u8], made: &mut Vec<String>) -> Result<()> {
        let home = self.home(share.home);
        let write = || {
            let mut object = home.create(name, share.copies)?;
            object.append(bytes)?;
            object.sync()?;
            object.publish()
        };
        write().map_err(VaultError::home(home, "repairing", name))?;
        made.push(format!("{}/{name}", home.describe()));
        Ok(())
    }
}

/// Copies in all homes of a snapshot.
fn all_of(shares: &[Share]) -> u8 {
    shares.iter().map(|share| share.copies).sum()
}

/// Where copies of an object are to be made, and how many that home shall have then, so that there are `wanted`.
fn lacking(survey: &Survey, name: ObjectName, whole: &[usize], shares: &[Share], wanted: u8) -> Vec<Share> {
    let has = |share: &Share| {
        let is_whole = whole.contains(&share.home);
        if is_whole { survey.copies_in(share.home, name).min(share.copies) } else { 0 }
    };
    let mut missing = wanted.saturating_sub(shares.iter().map(has).sum());
    let mut lacking = Vec::new();
    for share in shares {
        let more = (share.copies - has(share)).min(missing);
        missing -= more;
        if more > 0 {
            lacking.push(Share { copies: has(share) + more, ..*share });
        }
    }
    lacking
}

fn read_all(reader: &dyn ObjectReader) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(reader.len()).ok()?];
    reader.read_at(0, &mut bytes).ok()?;
    Some(bytes)
}
