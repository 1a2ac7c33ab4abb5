//! Groups: disks that are cut at one instant, and published by one head.
//!
//! ```text
//!   web.qcow2.tier  ──┐
//!                     ├──►  guest.tier/     the repository of the group `guest`
//!   data.qcow2.tier ──┘
//! ```
//!
//! The link beside a disk's path says which group it is of; the heads of its repository, of which disks that consists. Both never change. To a
//! repository that is no directory no link leads, and the group's name is this host's: whatever it is, the disks are those of the heads.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use vmstrata_disk::REPOSITORY;

use crate::head::{DISKS_MAX, Epoch};

/// The most bytes of a group's name, from which those of files are made.
pub(crate) const NAME_BYTES_MAX: usize = 200;

/// Some disks in one directory that are published together, or will be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// The names of its disks, each once.
    pub(crate) disks: Vec<String>,
}

impl Group {
    /// # Errors
    /// Why this cannot be a group.
    pub(crate) fn new(name: &str, paths: &[PathBuf]) -> Result<Self, String> {
        if !is_group_name(name) {
            return Err(format!(
                "its name is not 1 to {NAME_BYTES_MAX} letters, digits, dots, dashes and underscores"
            ));
        }
        let mut disks: Vec<String> = Vec::with_capacity(paths.len());
        for path in paths {
            if path.parent() != paths[0].parent() {
                let (one, other) = (paths[0].display(), path.display());
                return Err(format!("{one} and {other} are not in the same directory"));
            }
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| format!("the name of {} is not UTF-8", path.display()))?;
            if let Some(other) = disks.iter().find(|other| collide(other, name)) {
                return Err(format!("{other} and {name} would have the same files on this host"));
            }
            disks.push(name.to_owned());
        }
        if disks.iter().any(|disk| disk == name) {
            return Err("it has the name of one of its disks".to_owned());
        }
        if disks.len() > DISKS_MAX {
            return Err(format!("it has {} disks, and {DISKS_MAX} is the most", disks.len()));
        }
        Ok(Self { name: name.to_owned(), disks })
    }

    /// The directory of its repository.
    pub(crate) fn repository(&self, path: &Path) -> PathBuf {
        path.with_file_name(format!("{}{REPOSITORY}", self.name))
    }

    /// The disks that the group lacks of those of an epoch.
    ///
    /// # Errors
    /// Why it is not the group of that epoch.
    pub(crate) fn missing(&self, epoch: &Epoch) -> Result<Vec<String>, String> {
        let published: BTreeSet<&str> = epoch.disks.iter().map(|disk| disk.name.as_str()).collect();
        let own: BTreeSet<&str> = self.disks.iter().map(String::as_str).collect();
        match own.difference(&published).next() {
            Some(new) if !published.is_empty() => {
                let published: Vec<&str> = published.iter().copied().collect();
                Err(format!("it is published with {}: {new} cannot be added", published.join(", ")))
            }
            _ => Ok(published.difference(&own).map(|name| (*name).to_owned()).collect()),
        }
    }
}

/// Whether the files of two disks in one directory could have the same name.
fn collide(one: &str, other: &str) -> bool {
    let stem = |name: &str| Path::new(name).with_extension("").to_string_lossy().into_owned();
    let (one, other) = (stem(one), stem(other));
    let is_frozen =
        |disk: &str, of: &str| disk.strip_prefix(of).is_some_and(|rest| rest.starts_with(".epoch-"));
    one == other || is_frozen(&one, &other) || is_frozen(&other, &one)
}

/// A path with more at its end.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// The directory of the repository of the disk at `path`: its own, or its group's.
pub fn repository_of(path: &Path) -> PathBuf {
    match group_of(path) {
        Some(name) => Group { name, disks: Vec::new() }.repository(path),
        None => beside(path, REPOSITORY),
    }
}

/// The group that the disk at `path` is published with.
pub fn group_of(path: &Path) -> Option<String> {
    let target = fs::read_link(beside(path, REPOSITORY)).ok()?;
    let name = target.to_str()?.strip_suffix(REPOSITORY)?;
    is_group_name(name).then(|| name.to_owned())
}

/// Whether a group can have this name.
pub fn is_group_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::{DiskState, EpochNumber};

    fn group(name: &str, paths: &[&str]) -> Result<Group, String> {
        Group::new(name, &paths.iter().map(PathBuf::from).collect::<Vec<_>>())
    }

    #[test]
    fn names_of_groups_are_checked_at_their_edges() {
        for name in ["guest", "a", "9-_.x", &"n".repeat(200)] {
            assert!(is_group_name(name), "{name}");
        }
        for name in ["", ".", "..", ".hidden", "a/b", "a b", "ä", &"n".repeat(201)] {
            assert!(!is_group_name(name), "{name}");
        }
    }

    #[test]
    fn disks_of_a_group_lie_in_one_directory_and_share_no_file_of_the_host() {
        group("guest", &["/nas/web.qcow2", "/nas/web.data.qcow2", "/nas/web.epoch.qcow2"]).unwrap();
        for (paths, part) in [
            (["/nas/a.qcow2", "/b.qcow2"], "not in the same directory"),
            (["/nas/a.qcow2", "/nas/a.img"], "the same files"),
            (["/nas/a.qcow2", "/nas/a.qcow2"], "the same files"),
            (["/nas/a.qcow2", "/nas/a.epoch-3.qcow2"], "the same files"),
        ] {
            let why = group("guest", &paths).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
        assert!(group("a.qcow2", &["/nas/a.qcow2"]).unwrap_err().contains("the name of one of its disks"));
        let paths: Vec<String> = (0..=DISKS_MAX).map(|number| format!("/nas/{number}.qcow2")).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        assert!(group("guest", &paths).unwrap_err().contains("32 is the most"));
        group("guest", &paths[1..]).unwrap();
    }

    #[test]
    fn a_published_group_keeps_its_disks() {
        let disk = |name: &&str| DiskState { name: (*name).to_owned(), size: 1, objects: Vec::new() };
        let epoch = |names: &[&str]| Epoch {
            number: EpochNumber::NONE,
            disks: names.iter().map(disk).collect(),
            ..Epoch::NONE
        };
        let group = group("guest", &["/nas/a", "/nas/b"]).unwrap();
        assert_eq!(group.missing(&Epoch::NONE).unwrap(), [""; 0]);
        assert_eq!(group.missing(&epoch(&["a", "b"])).unwrap(), [""; 0]);
        assert_eq!(group.missing(&epoch(&["a", "b", "c"])).unwrap(), ["c"]);
        assert_eq!(group.missing(&epoch(&["a"])).unwrap_err(), "it is published with a: b cannot be added");
    }
}
