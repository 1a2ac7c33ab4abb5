//! The newest state that a repository has all of, for who takes a disk over.
//!
//! A head names complete objects only. A NAS that loses what it acknowledged (`async`) breaks that: heads and layers of its last minute are
//! damaged or gone. Then the disk goes back to the newest head whose objects are all there. Its number is not the highest: the damaged
//! heads keep theirs, as any of them may be a claim, and the next head follows them.
//!
//! That a name is not there, only a listing says that is newer than the head that has it: [`Look::since`]. A lookup may be old.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use vmstrata_repo::Repository;
use vmstrata_store::Planted;

use crate::abreast::each;
use crate::companion::Companion;
use crate::error::{Error, Result};
use crate::head::{Epoch, Head, HeadNumber, Object, ObjectId, PinId};
use crate::look::{Look, read_head};
use crate::object::is_right_from;
use crate::pin::{Pin, Purpose};

/// Layers of a disk that are looked at in any case, the newest, and how many bytes of them are read.
const YOUNG: usize = 4;
const YOUNG_BYTES: u64 = 32 << 20;
/// Layers that are looked at at a time.
const AT_ONCE: usize = 8;

/// The newest head that is whole.
#[derive(Clone, Debug)]
pub struct Whole {
    /// That head.
    pub head: Head,
    /// The heads above it, highest first, and what is wrong with each.
    pub lost: Vec<(HeadNumber, String)>,
    /// The layers that were there.
    pub(crate) layers: Vec<ObjectId>,
}

impl Whole {
    /// What the next head follows: the state of this one, with a number and a generation that none of the lost ones exceeds.
    pub(crate) fn below(&self) -> Head {
        let mut below = self.head.clone();
        let highest = self.lost.first().map_or(below.number, |(highest, _)| *highest);
        while below.number < highest {
            below.number = below.number.next();
            below.generation = below.generation.next();
        }
        below
    }
}

/// The newest head of a repository with all that it names, or an earlier one where the listing is old. Where objects of the newest are
/// lost, all are read that the last ten minutes brought.
///
/// # Errors
/// [`Error::Lost`] where no head is whole; as [`crate::newest`].
pub fn newest_whole(repository: &dyn Repository) -> Result<Option<Whole>> {
    let mut look = Look::any(repository)?;
    loop {
        let Some(newest) = look.heads().max() else { return Ok(None) };
        let head = intact(repository, newest)?;
        if let Ok(head) = head
            && missing(&look, &head.epoch).is_none()
            && check(repository, young(&head.epoch), YOUNG_BYTES)?.is_none()
        {
            return Ok(Some(Whole { head, lost: Vec::new(), layers: look.layers().collect() }));
        }
        let later = if Planted::StaleLoss.is_there() { look } else { look_again(repository)? };
        if later.heads().max() == Some(newest) {
            return fall_back(repository, &later).map(Some);
        }
        // Somebody publishes.
        look = later;
    }
}

/// A listing that was made after the one before.
fn look_again(repository: &dyn Repository) -> Result<Look> {
    let purpose = Purpose::reader("a take-over that looks for what is whole");
    let pin = Pin { id: PinId::draw(), epoch: Epoch::NONE, purpose };
    let look = pin.put(repository).and_then(|()| Look::since(repository, &pin.id.name()));
    pin.release(repository)?;
    look
}

/// The newest whole head of those that are kept.
fn fall_back(repository: &dyn Repository, look: &Look) -> Result<Whole> {
    let mut numbers: Vec<HeadNumber> = look.heads().collect();
    numbers.sort_unstable_by(|one, other| other.cmp(one));
    let (mut lost, mut floor, mut old) = (Vec::new(), HeadNumber::FIRST, BTreeSet::new());
    for number in numbers {
        if number < floor {
            break;
        }
        let head = match intact(repository, number)? {
            Ok(head) => head,
            Err(why) => {
                lost.push((number, why));
                continue;
            }
        };
        if floor < head.floor {
            // What was published ten minutes ago is on stable storage. It may have been deleted since.
            floor = head.floor;
            let is_there = look.heads().any(|number| number == floor);
            let first = is_there.then(|| intact(repository, floor)).transpose()?.and_then(Result::ok);
            old = first.map_or_else(BTreeSet::new, |first| ids(&first.epoch).collect());
        }
        let wrong = match missing(look, &head.epoch) {
            _ if Planted::BlindFallback.is_there() => None,
            Some(missing) => Some(missing),
            None => {
                let recent = head.epoch.objects().filter(|object| !old.contains(&object.id));
                check(repository, recent, u64::MAX)?
            }
        };
        if let Some(why) = wrong {
            lost.push((number, why));
            continue;
        }
        let (whole, epoch) = (head.number, head.epoch.number);
        let (newest, why) = lost.first().map(|(number, why)| (*number, &**why)).unwrap_or((whole, ""));
        let repository = repository.describe();
        tracing::warn!(
            repository,
            "{newest} is lost: {why}; the newest that is whole is {whole}, epoch {epoch}"
        );
        return Ok(Whole { head, lost, layers: look.layers().collect() });
    }
    let (newest, why) = lost.into_iter().next().expect("a listing with heads");
    Err(Error::Lost { repository: repository.describe(), name: newest.name(), why })
}

fn young(epoch: &Epoch) -> impl Iterator<Item = &Object> {
    epoch.disks.iter().flat_map(|disk| disk.objects.iter().rev().take(YOUNG))
}

fn ids(epoch: &Epoch) -> impl Iterator<Item = ObjectId> {
    epoch.objects().map(|object| object.id)
}

/// A head, or what is wrong with it.
fn intact(repository: &dyn Repository, number: HeadNumber) -> Result<Result<Head, String>> {
    match read_head(repository, number) {
        Ok(head) => Ok(Ok(head)),
        Err(Error::Damaged { why, .. }) => Ok(Err(format!("it is damaged: {why}"))),
        Err(error) => Err(error),
    }
}

/// The first object of an epoch that a listing lacks.
fn missing(look: &Look, epoch: &Epoch) -> Option<String> {
    let names = ids(epoch).flat_map(|id| [id.layer_name(), id.companion_name()]);
    look.first_missing(names).map(|name| format!("{name} is gone"))
}

/// Looks at layers, and reads so many bytes of them; what is wrong with one that is not what was shipped. A repository that is far is asked for
/// several at a time.
fn check<'a>(
    repository: &dyn Repository,
    objects: impl Iterator<Item = &'a Object>,
    mut bytes: u64,
) -> Result<Option<String>> {
    let is_read = |object: &'a Object| {
        let is_read = object.bytes <= bytes;
        bytes -= if is_read { object.bytes } else { 0 };
        (object, is_read)
    };
    let objects: Vec<(&Object, bool)> = objects.map(is_read).collect();
    let found = Mutex::new(Ok(None));
    each(&objects, AT_ONCE, |(object, is_read)| {
        let looked = check_one(repository, object, *is_read);
        let is_right = matches!(looked, Ok(None));
        if !is_right {
            *found.lock() = looked;
        }
        is_right
    });
    found.into_inner()
}

/// Looks at a layer, and may read it; what is wrong with it.
fn check_one(repository: &dyn Repository, object: &Object, is_read: bool) -> Result<Option<String>> {
    let (id, damaged) = (object.id, |name| Ok(Some(format!("{name} is damaged"))));
    let companion = repository.open(&id.companion_name())?;
    let mut encoded = vec![0; companion.len().min(Companion::encoded_len_max(object.bytes)) as usize];
    companion.read_at(0, &mut encoded)?;
    let is_all = companion.len() == encoded.len() as u64;
    let Some(Companion { digests, .. }) = Companion::decode(&encoded, object).filter(|_| is_all) else {
        return damaged(id.companion_name());
    };
    let layer = repository.open(&id.layer_name())?;
    if layer.len() != object.bytes || is_read && !is_right_from(0, &*layer, &digests)? {
        return damaged(id.layer_name());
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::sync::Arc;

    use vmstrata_repo::{DirectoryRepository, ObjectName};

    use super::*;
    use crate::{Claim, DiskState, OwnerId, Publisher, is_object_name, newest, ship};

    /// A disk of which heads 2, 3 and 4 publish epochs, each with one layer more.
    fn published(dir: &Path) -> (Arc<dyn Repository>, Publisher) {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();
        let repository: Arc<dyn Repository> =
            Arc::new(DirectoryRepository::open(dir, is_object_name).unwrap());
        let mut publisher = Publisher::claim(repository.clone(), OwnerId::draw(), Claim::First).unwrap();
        for _ in 0..3 {
            let mut epoch = publisher.head().epoch.clone();
            let layer = ship(&*repository, 0, |shipment| shipment.put(b"a layer")).unwrap();
            match &mut epoch.disks[..] {
                [disk] => disk.objects.push(layer),
                _ => {
                    epoch.disks = vec![DiskState { name: "web".to_owned(), size: 4096, objects: vec![layer] }]
                }
            }
            publisher.publish(Epoch { number: epoch.number.next(), ..epoch }).unwrap();
        }
        (repository, publisher)
    }

    fn cut_short(dir: &Path, name: &ObjectName) {
        fs::File::options().write(true).open(dir.join(name.as_str())).unwrap().set_len(3).unwrap();
    }

    #[test]
    fn a_take_over_goes_back_to_the_newest_whole_head_and_above_all_lost_ones() {
        let dir = tempfile::tempdir().unwrap();
        let (repository, mut old) = published(dir.path());
        let newest_head = old.head().clone();
        cut_short(dir.path(), &newest_head.number.name());
        let layers = &newest_head.epoch.disks[0].objects;
        // As long as it was, and zeros.
        fs::write(dir.path().join(layers[1].id.layer_name().as_str()), [0; 7]).unwrap();
        let whole = newest_whole(&*repository).unwrap().unwrap();
        assert_eq!(whole.head.epoch.disks[0].objects, layers[..1]);
        let lost: Vec<String> = whole.lost.iter().map(|(number, why)| format!("{number}: {why}")).collect();
        let second = format!("head-000000000003: {} is damaged", layers[1].id.layer_name());
        assert_eq!(lost, ["head-000000000004: it is damaged: it is too short", &second]);
        let refused = Publisher::claim(repository.clone(), newest_head.owner, Claim::Resume).unwrap_err();
        assert!(matches!(refused, Error::DamagedNewest { .. }), "any host may have written it: {refused}");

        let new = Publisher::claim(repository.clone(), OwnerId::draw(), Claim::TakeOver).unwrap();
        assert_eq!(new.head().epoch, whole.head.epoch);
        assert_eq!(new.head().number, newest_head.number.next());
        assert!(
            new.head().generation.get() > newest_head.generation.get() + 1,
            "as if both lost heads were claims"
        );
        let refused = old.publish(Epoch { number: newest_head.epoch.number.next(), ..newest_head.epoch });
        assert!(matches!(refused, Err(Error::Fenced { .. })), "{refused:?}");
        assert_eq!(newest(&*repository).unwrap().as_ref(), Some(new.head()));
        assert_eq!(crate::states(&*repository).unwrap().len(), 2, "lost heads are passed over");
        assert_eq!(Pin::all(&*repository).unwrap(), []);
    }

    #[test]
    fn nothing_is_taken_over_where_no_kept_head_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (repository, publisher) = published(dir.path());
        fs::remove_file(dir.path().join(publisher.head().epoch.disks[0].objects[0].id.layer_name().as_str()))
            .unwrap();
        fs::remove_file(dir.path().join("head-000000000001")).unwrap();
        let refused = newest_whole(&*repository).unwrap_err().to_string();
        assert!(
            refused.contains("head-000000000004 is lost: ") && refused.contains(" is gone; so are all"),
            "{refused}"
        );
    }
}
