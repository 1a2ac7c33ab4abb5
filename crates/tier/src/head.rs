//! A head: an epoch of the disks of a repository, with who published it.
//!
//! Heads are numbered from 1 without gaps, and never change. Formats: `docs/format.md`.

use std::collections::HashSet;
use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use vmstrata_repo::{ObjectName, draw_id};

use crate::sealed::{seal, unseal};

/// The most objects that a head names.
pub const OBJECTS_MAX: usize = 4096;
/// The most disks of an epoch.
pub const DISKS_MAX: usize = 32;
/// The most bytes of a disk's name, as of a file's.
const NAME_BYTES_MAX: usize = 255;
/// The most bytes of a head; one with [`OBJECTS_MAX`] objects of [`DISKS_MAX`] disks has fewer.
pub const HEAD_BYTES_MAX: u64 = 1 << 20;
/// The highest number of a head, a generation or an epoch: what the name of a head has digits for.
const COUNT_MAX: u64 = 999_999_999_999;
/// Begins the names of heads.
pub(crate) const HEAD_PREFIX: &str = "head-";
/// Begins the names of the snapshots that are epochs.
const EPOCH_PREFIX: &str = "epoch-";
/// Ends the names of layers, and of what lies beside them.
const LAYER_SUFFIX: &str = ".qcow2";
const COMPANION_SUFFIX: &str = ".meta";
/// The name of the profile of starts.
pub(crate) const BOOT_NAME: &str = "boot";
/// Begins the names of pins.
pub(crate) const PIN_PREFIX: &str = "pin-";
const VERSION: u32 = 1;

/// The place of a head in the order of all heads of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HeadNumber(u64);

impl HeadNumber {
    /// That of the first head.
    pub const FIRST: Self = Self(1);

    /// The number of the next head.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The number of the head before it, if there was one.
    pub(crate) fn before(self) -> Option<Self> {
        (self > Self::FIRST).then(|| Self(self.0 - 1))
    }

    /// The name of that head.
    pub fn name(self) -> ObjectName {
        ObjectName::new(&self.to_string()).expect("letters, digits and a dash")
    }

    /// The number of the head with this name.
    pub fn of(name: &str) -> Option<Self> {
        let number = Self(name.strip_prefix(HEAD_PREFIX)?.parse().ok()?);
        let is_valid = (Self::FIRST..=Self(COUNT_MAX)).contains(&number) && number.to_string() == name;
        is_valid.then_some(number)
    }
}

impl fmt::Display for HeadNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HEAD_PREFIX}{:012}", self.0)
    }
}

/// Counts the processes that published a disk, one after the other: each begins a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(u64);

impl Generation {
    /// Before the first.
    pub const NONE: Self = Self(0);

    pub(crate) fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// As a number.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Counts the epochs of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EpochNumber(u64);

impl EpochNumber {
    /// A disk of which nothing is published.
    pub const NONE: Self = Self(0);

    /// The number of the next epoch.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// As a number.
    pub fn get(self) -> u64 {
        self.0
    }

    /// What the snapshot of the disk is called that this epoch is.
    pub fn snapshot_name(self) -> String {
        format!("{EPOCH_PREFIX}{self}")
    }

    /// The number of the epoch that the snapshot of this name is.
    pub fn of(name: &str) -> Option<Self> {
        let number = Self(name.strip_prefix(EPOCH_PREFIX)?.parse().ok()?);
        (number.0 <= COUNT_MAX && number.snapshot_name() == name).then_some(number)
    }
}

impl fmt::Display for EpochNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Declares 128 random bits, as text 32 hexadecimal digits.
macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u128);

        impl $name {
            /// One that nobody else draws.
            pub fn draw() -> Self {
                Self(draw_id())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl FromStr for $name {
            type Err = ParseIntError;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                u128::from_str_radix(text, 16).map(Self)
            }
        }
    };
}

random_id! {
    /// A copy of the disk on a host, which one process at a time has open for writing.
    OwnerId
}

random_id! {
    /// An object, whatever its content.
    ObjectId
}

random_id! {
    /// A pin.
    PinId
}

impl PinId {
    /// The name of the object that is the pin.
    pub fn name(self) -> ObjectName {
        ObjectName::new(&format!("{PIN_PREFIX}{self}")).expect("letters, digits and a dash")
    }

    /// The id of the pin with this name.
    pub fn of(name: &str) -> Option<Self> {
        let id: Self = name.strip_prefix(PIN_PREFIX)?.parse().ok()?;
        (id.name().as_str() == name).then_some(id)
    }
}

impl ObjectId {
    /// Its bits.
    pub(crate) fn to_u128(self) -> u128 {
        self.0
    }

    /// The file name of the layer with this id.
    pub fn layer_name(self) -> ObjectName {
        self.named(LAYER_SUFFIX)
    }

    /// The file name of the companion of the layer with this id.
    pub fn companion_name(self) -> ObjectName {
        self.named(COMPANION_SUFFIX)
    }

    fn named(self, suffix: &str) -> ObjectName {
        ObjectName::new(&format!("{self}{suffix}")).expect("digits, letters and a dot")
    }

    /// The id of the layer, or of the layer whose companion has this name.
    pub fn of(name: &str) -> Option<Self> {
        let id: Self = name.split('.').next()?.parse().ok()?;
        [id.layer_name(), id.companion_name()].iter().any(|own| own.as_str() == name).then_some(id)
    }
}

/// A complete layer in the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Object {
    /// Its id, from which its file name follows.
    #[serde(with = "as_text")]
    pub id: ObjectId,
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 of its bytes.
    #[serde(with = "as_text")]
    pub blake3: blake3::Hash,
    /// How many of its bytes are not blocks of zeros.
    pub stored: u64,
    /// How much of the disk it says is zeros, in bytes.
    pub zeros: u64,
}

/// What an epoch has of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskState {
    /// The file name of the disk's path.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// The layers, base first; each names the one before it as its backing file.
    pub objects: Vec<Object>,
}

impl DiskState {
    /// The layer that stands on all the others.
    ///
    /// # Panics
    /// Without a layer, which no epoch has that was checked.
    pub fn newest(&self) -> ObjectId {
        self.objects.last().expect("a disk that was published has a layer").id
    }

    fn check(&self) -> Result<(), String> {
        let name = &self.name;
        let is_file_name = !matches!(name.as_str(), "" | "." | "..") && !name.contains(['/', '\0']);
        if !is_file_name || name.len() > NAME_BYTES_MAX {
            return Err(format!("{name:?} is no name of a disk"));
        }
        if self.objects.is_empty() { Err(format!("{name} has no layer")) } else { Ok(()) }
    }
}

/// A state of the disks of a repository, which they had together between two of their guest's writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epoch {
    /// Its number.
    pub number: EpochNumber,
    /// When the disks had that state, in nanoseconds since 1970.
    pub time_ns: u64,
    /// The disks, by their names.
    pub disks: Vec<DiskState>,
}

impl Epoch {
    /// Of disks of which nothing is published.
    pub const NONE: Self = Self { number: EpochNumber::NONE, time_ns: 0, disks: Vec::new() };

    /// The layers of all disks.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.disks.iter().flat_map(|disk| &disk.objects)
    }

    /// What it has of the disk whose path has this file name. The only disk of a repository is meant by any.
    pub fn disk(&self, name: &str) -> Option<&DiskState> {
        match &self.disks[..] {
            [only] => Some(only),
            disks => disks.iter().find(|disk| disk.name == name),
        }
    }

    /// Refuses what cannot be published.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.number.0 > COUNT_MAX {
            return Err(format!("it counts past {COUNT_MAX}"));
        }
        if self.disks.is_empty() && *self != Self::NONE {
            return Err("it names no disk".to_owned());
        }
        if self.disks.len() > DISKS_MAX {
            return Err(format!("it names {} disks, and {DISKS_MAX} is the most", self.disks.len()));
        }
        if let Some(pair) = self.disks.windows(2).find(|pair| pair[0].name >= pair[1].name) {
            return Err(format!("it names {} after {}", pair[1].name, pair[0].name));
        }
        self.disks.iter().try_for_each(DiskState::check)?;
        let count = self.objects().count();
        if count > OBJECTS_MAX {
            return Err(format!("it names {count} objects, and {OBJECTS_MAX} is the most"));
        }
        let mut met = HashSet::with_capacity(count);
        match self.objects().find(|object| !met.insert(object.id)) {
            Some(twice) => Err(format!("it names {} twice", twice.id.layer_name())),
            None => Ok(()),
        }
    }
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    version: u32,
    /// Its number.
    pub number: HeadNumber,
    /// Who published it.
    pub generation: Generation,
    /// On which copy of the disk.
    #[serde(with = "as_text")]
    pub owner: OwnerId,
    /// The lowest number of a head that is kept: those below it, and what only they name, may be gone.
    pub floor: HeadNumber,
    /// What it publishes.
    pub epoch: Epoch,
}

impl Head {
    /// The head after `below`.
    pub(crate) fn after(below: Option<&Self>, owner: OwnerId) -> Self {
        match below {
            None => Self {
                version: VERSION,
                number: HeadNumber::FIRST,
                generation: Generation::NONE,
                owner,
                floor: HeadNumber::FIRST,
                epoch: Epoch::NONE,
            },
            Some(below) => Self { number: below.number.next(), owner, ..below.clone() },
        }
    }

    /// The bytes of the object that holds it.
    pub fn encode(&self) -> Vec<u8> {
        seal(self)
    }

    /// The head with this number from its bytes.
    ///
    /// # Errors
    /// What is wrong with them, if they are not what [`Head::encode`] made.
    pub fn decode(number: HeadNumber, bytes: &[u8]) -> Result<Self, String> {
        let head: Self = unseal(bytes)?;
        if head.version != VERSION {
            return Err(format!("it is of version {}, not {VERSION}", head.version));
        }
        if head.number != number {
            return Err(format!("it is {}", head.number));
        }
        if head.floor > number {
            return Err(format!("it is below its floor, {}", head.floor));
        }
        if head.generation.0 > COUNT_MAX {
            return Err(format!("it counts past {COUNT_MAX}"));
        }
        head.epoch.check()?;
        Ok(head)
    }
}

/// Whether an object of a disk's repository can have this name.
pub fn is_object_name(name: &str) -> bool {
    HeadNumber::of(name).is_some()
        || ObjectId::of(name).is_some()
        || PinId::of(name).is_some()
        || name == BOOT_NAME
}

/// Values that are stored as their text.
pub(crate) mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    /// Takes no other text than [`serialize`] makes.
    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: Display + FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        let text = String::deserialize(deserializer)?;
        let value: T = text.parse().map_err(D::Error::custom)?;
        if value.to_string() == text {
            Ok(value)
        } else {
            Err(D::Error::custom(format!("{text:?} is not {value}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sealed::SUM_LEN;

    /// A head of so many disks, whose names take as many bytes as they may, and of so many objects.
    fn head(disks: usize, objects: usize) -> Head {
        let object = |number: usize| Object {
            id: ObjectId(u128::MAX - number as u128),
            bytes: u64::MAX,
            blake3: blake3::hash(&number.to_le_bytes()),
            stored: u64::MAX,
            zeros: u64::MAX,
        };
        let mut objects: Vec<Object> = (0..objects).map(object).collect();
        let disk = |(number, objects)| DiskState {
            // A control character is escaped with six.
            name: format!("{}{number:02}", "\u{1}".repeat(NAME_BYTES_MAX - 2)),
            size: u64::MAX,
            objects,
        };
        let rest = (1..disks).map(|_| vec![objects.pop().unwrap()]).collect::<Vec<_>>();
        let disks = std::iter::once(objects).chain(rest).enumerate().map(disk).collect();
        let epoch = Epoch { number: EpochNumber(COUNT_MAX), time_ns: u64::MAX, disks };
        let generation = Generation(COUNT_MAX);
        Head { number: HeadNumber(7), generation, epoch, ..Head::after(None, OwnerId(5)) }
    }

    /// `head` as text that an edit changes, with the checksum that then belongs to it.
    fn edited(head: &Head, from: &str, to: &str) -> Result<Head, String> {
        let bytes = head.encode();
        let text = std::str::from_utf8(&bytes[..bytes.len() - SUM_LEN]).unwrap();
        assert!(text.contains(from), "{text}");
        let text = text.replacen(from, to, 1);
        let sum = blake3::hash(text.as_bytes());
        Head::decode(HeadNumber(7), format!("{text}{sum}\n").as_bytes())
    }

    #[test]
    fn the_largest_head_reads_back_and_keeps_its_bound() {
        let head = head(DISKS_MAX, OBJECTS_MAX);
        let bytes = head.encode();
        assert!(bytes.len() as u64 <= HEAD_BYTES_MAX, "{}", bytes.len());
        assert_eq!(Head::decode(HeadNumber(7), &bytes).unwrap(), head);
    }

    #[test]
    fn every_changed_or_missing_byte_is_found() {
        let bytes = head(1, 2).encode();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            Head::decode(HeadNumber(7), &changed).unwrap_err();
            Head::decode(HeadNumber(7), &bytes[..at]).unwrap_err();
        }
    }

    #[test]
    fn a_hostile_head_is_refused() {
        let head = head(1, 2);
        assert_eq!(edited(&head, "\"version\":1", "\"version\":2").unwrap_err(), "it is of version 2, not 1");
        assert_eq!(
            edited(&head, "\"floor\":1", "\"floor\":8").unwrap_err(),
            "it is below its floor, head-000000000008"
        );
        assert_eq!(edited(&head, "\"number\":7", "\"number\":8").unwrap_err(), "it is head-000000000008");
        let past = format!("\"generation\":{}", u64::MAX);
        let told = edited(&head, &format!("\"generation\":{COUNT_MAX}"), &past).unwrap_err();
        assert_eq!(told, "it counts past 999999999999");
        let ids = [0, 1].map(|number| head.epoch.disks[0].objects[number].id.to_string());
        assert!(edited(&head, &ids[0], &ids[1]).unwrap_err().ends_with("twice"));
        let upper = head.epoch.disks[0].objects[0].id.to_string().to_uppercase();
        edited(&head, &ids[0], &upper).unwrap_err();
        edited(&head, "\"owner\":", "\"more\":1,\"owner\":").unwrap_err();
        let objects = format!("\"objects\":[{}", "{},".repeat(OBJECTS_MAX));
        edited(&head, "\"objects\":[", &objects).unwrap_err();
    }

    #[test]
    fn a_head_of_hostile_disks_is_refused() {
        let disk = |name: &str| DiskState { name: name.to_owned(), ..head(1, 1).epoch.disks.remove(0) };
        let with = |disks: Vec<DiskState>| Epoch { disks, ..head(1, 1).epoch }.check();
        for name in ["", ".", "..", "a/b", "/a", "a\0", &"n".repeat(NAME_BYTES_MAX + 1)] {
            assert!(with(vec![disk(name)]).unwrap_err().ends_with("is no name of a disk"), "{name:?}");
        }
        with(vec![disk(&"n".repeat(NAME_BYTES_MAX))]).unwrap();
        assert_eq!(with(vec![disk("b"), disk("a")]).unwrap_err(), "it names a after b");
        assert_eq!(with(vec![disk("a"), disk("a")]).unwrap_err(), "it names a after a");
        assert!(with(vec![disk("a"), disk("b")]).unwrap_err().ends_with("twice"));
        let empty = DiskState { objects: Vec::new(), ..disk("b") };
        assert_eq!(with(vec![disk("a"), empty]).unwrap_err(), "b has no layer");
        assert_eq!(with(Vec::new()).unwrap_err(), "it names no disk");
        let many = (0..=DISKS_MAX).map(|number| disk(&format!("{number:02}"))).collect();
        assert_eq!(with(many).unwrap_err(), "it names 33 disks, and 32 is the most");
    }

    #[test]
    fn objects_are_heads_layers_companions_pins_and_one_profile() {
        let (layer, pin) = (ObjectId(7).layer_name(), PinId(7).name());
        assert!([layer.as_str(), pin.as_str(), "head-000000000012", "boot"].into_iter().all(is_object_name));
        assert_eq!(ObjectId::of(ObjectId(7).companion_name().as_str()), Some(ObjectId(7)));
        let upper = layer.as_str().to_uppercase();
        for other in ["web.qcow2", "7.qcow2", "7.meta", "head-12", "pin-7", &upper, "lock"] {
            assert!(!is_object_name(other), "{other}");
        }
    }

    #[test]
    fn a_snapshot_that_is_no_epoch_has_no_number() {
        assert_eq!(EpochNumber::of(&EpochNumber(12).snapshot_name()), Some(EpochNumber(12)));
        for other in ["epoch-", "epoch-012", "epoch-+1", "epoch-1000000000000", "12", "daily"] {
            assert_eq!(EpochNumber::of(other), None, "{other}");
        }
    }

    #[test]
    fn a_name_that_is_no_heads_has_no_number() {
        assert_eq!(HeadNumber::of("head-000000000012"), Some(HeadNumber(12)));
        assert_eq!(HeadNumber(12).name().as_str(), "head-000000000012");
        for other in [
            "head-12",
            "head-000000000000",
            "head-+00000000012",
            "head-",
            "000000000012",
            "head-00000000001x",
            "head-1000000000000",
        ] {
            assert_eq!(HeadNumber::of(other), None, "{other}");
        }
    }
}
