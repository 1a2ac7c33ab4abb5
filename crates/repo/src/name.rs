//! Names of objects.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of an object: 1 to 200 ASCII letters, digits, `.`, `_` and `-`, beginning with a letter or a digit, and not `lock`.
///
/// Every kind of repository can keep these. What a repository makes beside its objects has other names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName(Box<str>);

/// Which of the names that an object can have a repository uses. Everything else in its directory is not its own.
pub type NameRule = fn(&str) -> bool;

impl ObjectName {
    /// The longest name, in bytes: file systems allow 255, and an unfinished object's file has a longer name.
    pub const MAX_LEN: usize = 200;
    /// The file that a directory's holders lock, which is no object.
    pub const LOCK: &str = "lock";

    /// The name `text`.
    ///
    /// # Errors
    /// `InvalidInput` when no object can have it.
    pub fn new(text: &str) -> io::Result<Self> {
        if Self::is_valid(text) {
            return Ok(Self(text.into()));
        }
        let told = format!(
            "{text:?} is no name of an object: 1 to {} letters, digits, '.', '_' and '-', not beginning with '.', '_' or '-', and not '{}'",
            Self::MAX_LEN,
            Self::LOCK
        );
        Err(io::Error::new(io::ErrorKind::InvalidInput, told))
    }

    /// Whether an object can have the name `text`.
    pub fn is_valid(text: &str) -> bool {
        let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        text.len() <= Self::MAX_LEN
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(is_fit)
            && text != Self::LOCK
    }

    /// Refuses a name that the objects of a repository with this rule do not have.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn check(&self, rule: NameRule) -> io::Result<()> {
        if rule(self.as_str()) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "objects of this repository have other names"))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Draws 128 bits that no other process draws: the time in ns, so that they sort by it, and 64 random bits.
pub fn draw_id() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    let random = RandomState::new().hash_one((now, std::process::id()));
    u128::from(now) << 64 | u128::from(random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_fit_for_every_kind() {
        for good in ["a", "0", "web.qcow2", "18ea40b26cc753da.critical", "A_b-c", "locks", &"n".repeat(200)] {
            assert_eq!(ObjectName::new(good).unwrap().as_str(), good);
        }
        let long = "n".repeat(201);
        for bad in [
            "", ".", "..", "/", "a/b", "../a", "a\0", "\0", ".a", "-a", "_a", "a b", "a:b", "ü", "lock",
            &long,
        ] {
            assert_eq!(ObjectName::new(bad).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{bad:?}");
        }
    }

    #[test]
    fn ids_differ() {
        assert_ne!(draw_id(), draw_id());
    }
}
