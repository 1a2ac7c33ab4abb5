//! What snapshots and their objects are called.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use vmstrata_repo::ObjectName;

use super::error::{Result, VaultError};

/// Tells one snapshot from every other; drawn when its writer begins. Ids begin with the time, so names sort by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId([u8; 16]);

impl SnapshotId {
    /// From its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// One that no other process draws: the time, and 64 random bits.
    pub(super) fn draw() -> Self {
        Self(vmstrata_repo::draw_id().to_be_bytes())
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for SnapshotId {
    type Err = VaultError;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || VaultError::NotFound(text.to_owned());
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != 32 || !text.bytes().all(is_hex) {
            return Err(wrong());
        }
        let mut bytes = [0; 16];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for SnapshotId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SnapshotId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// What an object holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum ObjectKind {
    /// Pages that the guest cannot live without.
    Critical = 0,
    /// Pages of clean cache.
    Clean = 1,
    /// All that is known of the snapshot, and where its pages lie. Its presence makes the snapshot.
    Metadata = 2,
}

impl ObjectKind {
    const ALL: [Self; 3] = [Self::Critical, Self::Clean, Self::Metadata];

    const fn suffix(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Clean => "clean",
            Self::Metadata => "snapshot",
        }
    }
}

/// Tells an object from every other: the snapshot that wrote it, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// Who wrote it.
    pub owner: SnapshotId,
    /// What it holds.
    pub kind: ObjectKind,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.owner, self.kind.suffix())
    }
}

impl ObjectId {
    /// The object that is called `text`, if an object can be called so.
    pub fn parse(text: &str) -> Option<Self> {
        let (owner, suffix) = text.split_once('.')?;
        let kind = ObjectKind::ALL.into_iter().find(|kind| kind.suffix() == suffix)?;
        Some(Self { owner: owner.parse().ok()?, kind })
    }

    /// Whether an object can be called `text`: the rule for the repositories of a vault.
    pub fn is_name(text: &str) -> bool {
        Self::parse(text).is_some()
    }
}

impl From<ObjectId> for ObjectName {
    fn from(id: ObjectId) -> Self {
        Self::new(&id.to_string()).expect("hexadecimal digits and a word")
    }
}

/// Checks the name of a guest or a snapshot; the rules are those for names of disk snapshots.
///
/// # Errors
/// [`VaultError::Name`].
pub(super) fn check_name(name: &str) -> Result<()> {
    let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let sound = (1..=100).contains(&name.len()) && name.bytes().all(is_fit) && !name.starts_with(['.', '-']);
    if sound { Ok(()) } else { Err(VaultError::Name(name.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        let id = SnapshotId::draw();
        assert_eq!(id.to_string().parse::<SnapshotId>().unwrap(), id);
        for kind in ObjectKind::ALL {
            let name = ObjectId { owner: id, kind };
            assert_eq!(ObjectId::parse(&name.to_string()), Some(name));
        }
        assert_ne!(SnapshotId::draw(), id);
    }

    #[test]
    fn other_files_are_no_objects() {
        let id = SnapshotId::draw().to_string();
        let upper = format!("{}.clean", id.to_uppercase().replace('0', "A"));
        for text in ["", "lock", &id, &format!(".{id}.clean"), &format!("{id}.clean.new"), "+1.clean", &upper]
        {
            assert_eq!(ObjectId::parse(text), None, "{text}");
        }
    }

    #[test]
    fn names_of_guests_are_fit_for_file_names() {
        for good in ["web", "a", "web-1.example_y", &"n".repeat(100)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "a+b", ".web", "-web", "a/b", "a@b", "a b", "ü", &"n".repeat(101)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
