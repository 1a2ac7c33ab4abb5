//! Making copies again that are missing or damaged, from those that are whole.
//!
//! Each page may come from another copy ([`rewrite`]). Objects come first and metadata last, as when the
//! snapshot was written: a repository that lists a snapshot has what it counts on there.

use vmstrata_repo::{Hold, ObjectReader};

use super::Vault;
use super::copies::ObjectCopies;
use super::error::{Result, VaultError};
use super::info::Info;
use super::live::PageSet;
use super::name::{ObjectId, ObjectKind, SnapshotId};
use super::place::{self, Share};
use super::policy::{OneDevice, Policy};
use super::rewrite::rewrite;
use super::survey::Survey;
use super::verify::{Checked, CheckedObject, Health, ids_or_all};

/// What was repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// Copies made, as `REPOSITORY/OBJECT`.
    pub made: Vec<String>,
    /// Snapshots whose pages lie in those.
    pub mended: Vec<String>,
    /// What the snapshots have after that.
    pub health: Vec<Health>,
}

impl Vault {
    /// Makes the missing and damaged copies of these snapshots again; of all for none. What has no whole copy left, and
    /// copies for which there is no repository, stay as they are, and are in the health returned.
    ///
    /// # Errors
    /// When no repository can be read, or a copy cannot be written.
    pub fn repair(&self, ids: &[SnapshotId], one_device: OneDevice) -> Result<Repaired> {
        let _held = self.hold(Hold::Write)?;
        let survey = Survey::take(self)?;
        let listed = survey.snapshots(self);
        let ids = ids_or_all(&survey, &listed, ids)?;
        let mut checked = Checked::new(&listed);
        let (mut made, mut names) = (Vec::new(), Vec::new());
        for id in &ids {
            let (metadata, whole) = self.check_metadata(&survey, *id, &mut Vec::new());
            let Some(metadata) = metadata else { continue };
            let shares = self.shares_of(&survey, &metadata.info, one_device)?;
            let (needs, _) = self.needs_by(&survey, &metadata);
            let mut all_there = true;
            for object in metadata.info.objects.values() {
                let (name, needed) = (object.name, &needs[&object.name]);
                let found = checked.object(self, &survey, name);
                let is_clean = name.kind == ObjectKind::Clean;
                let wanted = if is_clean { object.copies } else { all_of(&shares) };
                let lacking = lacking(&survey, name, &found.whole(needed), &shares, wanted);
                let before = made.len();
                all_there &= self.repair_object(&survey, (name, needed), found, &lacking, &mut made)?;
                names.extend((made.len() > before).then_some(name));
            }
            if all_there {
                let name = ObjectId { owner: *id, kind: ObjectKind::Metadata };
                let lacking = lacking(&survey, name, &whole, &shares, all_of(&shares));
                self.repair_metadata(name, &whole, &lacking, &mut made)?;
            }
        }
        let mended = checked.users.others(&names, None);
        let (survey, mut checked) = (Survey::take(self)?, Checked::new(&listed));
        let health = ids.iter().map(|id| self.check(&survey, &mut checked, *id)).collect();
        Ok(Repaired { made, mended, health })
    }

    /// Where a snapshot should be: where it is, and as many other repositories as are needed and there.
    fn shares_of(&self, survey: &Survey, info: &Info, one_device: OneDevice) -> Result<Vec<Share>> {
        let names = info.objects.values().map(|object| object.name);
        let names = names.chain([ObjectId { owner: info.id, kind: ObjectKind::Metadata }]);
        let preferred: Vec<usize> =
            names.flat_map(|name| survey.copies(name)).map(|copy| copy.repository).collect();
        let mut copies = info.critical_copies;
        loop {
            let policy = Policy { critical_copies: copies, one_device, ..Policy::default() };
            match place::choose(self, &policy, &preferred) {
                Err(VaultError::TooFewRepositories { .. } | VaultError::SharedDevice { .. })
                    if copies > 1 =>
                {
                    copies -= 1;
                }
                other => return other,
            }
        }
    }

    /// Makes copies of an object where they lack, with all pages that any copy has; false when one that is needed is in no
    /// copy, so that none can be made. Clean pages that are lost are no obstacle.
    fn repair_object(
        &self,
        survey: &Survey,
        (name, needed): (ObjectId, &PageSet),
        found: &CheckedObject,
        lacking: &[Share],
        made: &mut Vec<String>,
    ) -> Result<bool> {
        let is_there = found.pages.has_all(needed);
        if lacking.is_empty() || !is_there {
            return Ok(is_there || name.kind == ObjectKind::Clean);
        }
        let mut object = ObjectCopies::open(self, survey, name);
        let whole = found.whole(needed);
        object.copies.sort_by_key(|copy| !whole.contains(&copy.repository));
        let Some(copies) = rewrite(self, &object, &found.pages, lacking)? else {
            return Ok(name.kind == ObjectKind::Clean);
        };
        copies.publish()?;
        made.extend(
            lacking.iter().map(|share| format!("{}/{name}", self.repository(share.repository).describe())),
        );
        Ok(true)
    }

    fn repair_metadata(
        &self,
        name: ObjectId,
        whole: &[usize],
        lacking: &[Share],
        made: &mut Vec<String>,
    ) -> Result<()> {
        if lacking.is_empty() {
            return Ok(());
        }
        let Some(bytes) = whole
            .iter()
            .find_map(|repository| read_all(self.repository(*repository).open(&name.into()).ok()?.as_ref()))
        else {
            return Ok(());
        };
        lacking.iter().try_for_each(|share| self.put(name, *share, &bytes, made))
    }

    fn put(&self, name: ObjectId, share: Share, bytes: &[u8], made: &mut Vec<String>) -> Result<()> {
        let repository = self.repository(share.repository);
        let mut object = repository.replace(&name.into(), share.copies)?;
        object.write(bytes)?;
        object.sync()?;
        object.finish()?;
        made.push(format!("{}/{name}", repository.describe()));
        Ok(())
    }
}

/// Copies in all repositories of a snapshot.
fn all_of(shares: &[Share]) -> u8 {
    shares.iter().map(|share| share.copies).sum()
}

/// Where copies of an object are to be made, and how many that repository shall have then, so that there are `wanted`.
fn lacking(survey: &Survey, name: ObjectId, whole: &[usize], shares: &[Share], wanted: u8) -> Vec<Share> {
    let has = |share: &Share| {
        let is_whole = whole.contains(&share.repository);
        if is_whole { survey.copies_in(share.repository, name).min(share.copies) } else { 0 }
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
