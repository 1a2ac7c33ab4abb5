//! File names of snapshots, and the formats that they end in.
//!
//! The snapshot NAME of `web.qcow2` is `web.NAME.qcow2` in the same directory, or `web.NAME.raw` when the file is raw.
//! Two disks whose names differ in a known ending only share such names; the second one to use a name is refused.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use vmstrata_store::FileId;

/// How a layer keeps its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Guest offset and host offset are the same.
    Raw,
    /// Clusters found through L1 and L2 tables.
    Qcow2,
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

/// Endings that name a format and so do not belong to the disk's own name.
pub(crate) const ENDINGS: [&str; 5] = [".qcow2", ".qcow", ".raw", ".img", ".disk"];

/// Where the file of the snapshot `name` of the disk at `disk` lies; `None` when that path names no file.
pub fn frozen_path(disk: &Path, name: &str, format: Format) -> Option<PathBuf> {
    let mut frozen = stem(disk.file_name()?).to_owned();
    frozen.push(format!(".{name}.{format}"));
    Some(disk.with_file_name(frozen))
}

/// A disk's file name without its ending.
pub(crate) fn stem(file_name: &OsStr) -> &OsStr {
    let stems = ENDINGS.iter().filter_map(|ending| file_name.as_bytes().strip_suffix(ending.as_bytes()));
    let shortest = stems.filter(|stem| !stem.is_empty()).min_by_key(|stem| stem.len());
    shortest.map_or(file_name, OsStr::from_bytes)
}

/// The file name by which a disk's layers are known as its own, as far as it can be recorded.
pub(crate) fn disk_name(disk: &Path) -> Option<String> {
    let name = disk.file_name()?.to_string_lossy();
    Some(name.chars().filter(|c| !c.is_control()).collect()).filter(|name: &String| !name.is_empty())
}

/// How an image in the same directory names the file `file_name` as its backing file: a colon must not look like the
/// end of a protocol's name.
pub(crate) fn sibling(file_name: &OsStr) -> OsString {
    if file_name.as_bytes().contains(&b':') {
        Path::new(".").join(file_name).into()
    } else {
        file_name.to_owned()
    }
}

/// The path of the sidecar of the layer at `path`; `None` for a published one.
pub(crate) fn sidecar_of(path: &Path) -> Option<PathBuf> {
    if is_published(path) {
        return None;
    }
    let name = path.file_name().unwrap_or_default();
    if name.len() + SIDECAR.len() > NAME_MAX {
        return Some(path.with_file_name(beside_name(name, SIDECAR)));
    }
    let mut sidecar = path.as_os_str().to_owned();
    sidecar.push(SIDECAR);
    Some(sidecar.into())
}

/// Whether the file at `path` is a published layer of a tiered disk: 32 hexadecimal digits and `.qcow2`, in a directory whose name ends
/// with [`REPOSITORY`]. Such a file never changes, pins in the directory say who needs it, and nothing else lies beside it.
pub fn is_published(path: &Path) -> bool {
    let directory = path.parent().and_then(Path::file_name).unwrap_or_default();
    let name = path.file_name().unwrap_or_default().as_bytes();
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let is_id = |id: &[u8]| id.len() == 32 && id.iter().all(is_digit);
    directory.as_bytes().ends_with(REPOSITORY.as_bytes()) && name.strip_suffix(b".qcow2").is_some_and(is_id)
}

/// What the copy of a layer is called until it is whole: `.NAME.part`.
pub fn unfinished_copy(copy: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(copy.file_name().unwrap_or_default());
    name.push(UNFINISHED);
    copy.with_file_name(name)
}

pub(crate) fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_bytes();
    name.starts_with(b".") && name.ends_with(UNFINISHED.as_bytes())
}

/// Whether the image at `path` is what a tiered disk leaves at its own path: an overlay on a layer in the repository beside it.
pub(crate) fn leads_to_own_repository(path: &Path, below: Option<&Path>) -> bool {
    let Some(directory) = below.filter(|below| is_published(below)).and_then(Path::parent) else {
        return false;
    };
    let mut own = path.as_os_str().to_owned();
    own.push(REPOSITORY);
    FileId::at(Path::new(&own)).is_some_and(|own| FileId::at(directory) == Some(own))
}

/// How the name of a copy ends that is not whole.
const UNFINISHED: &str = ".part";
/// How the name of the directory of a tiered disk's layers ends.
pub const REPOSITORY: &str = ".tier";
/// How the name of a sidecar ends.
pub const SIDECAR: &str = ".vmsx";
/// Bytes of a file's name, at most.
const NAME_MAX: usize = 255;
/// Digits of [`short_hash`].
pub(crate) const HASH_LEN: usize = 16;

/// The beginning of a name's hash, in [`HASH_LEN`] hexadecimal digits.
pub(crate) fn short_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..HASH_LEN / 2].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hidden name of what belongs to the file `name`: `.NAME` with `end` behind. Of a NAME too long for that the hash stands
/// in place of its last bytes.
pub(crate) fn beside_name(name: &OsStr, end: &str) -> OsString {
    let bytes = name.as_bytes();
    let room = NAME_MAX.saturating_sub(1 + end.len());
    let name = if bytes.len() <= room {
        bytes.to_vec()
    } else {
        let hash = short_hash(bytes);
        let text = name.to_string_lossy();
        let kept = text.floor_char_boundary(room.saturating_sub(1 + hash.len()));
        format!("{}~{hash}", &text[..kept]).into_bytes()
    };
    OsString::from_vec([b".", &*name, end.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_lies_beside_its_disk() {
        let path = |disk: &str, format| frozen_path(Path::new(disk), "mon", format).unwrap();
        assert_eq!(path("/a/web.qcow2", Format::Qcow2), Path::new("/a/web.mon.qcow2"));
        assert_eq!(path("web.img", Format::Raw), Path::new("web.mon.raw"));
        assert_eq!(path("/a/web", Format::Qcow2), Path::new("/a/web.mon.qcow2"));
        assert_eq!(path("/a/web.v2", Format::Qcow2), Path::new("/a/web.v2.mon.qcow2"));
        assert_eq!(path("/a/.qcow2", Format::Qcow2), Path::new("/a/.qcow2.mon.qcow2"));
        assert_eq!(frozen_path(Path::new("/"), "mon", Format::Raw), None);
    }

    #[test]
    fn a_published_layer_has_a_number_for_its_name_and_lies_in_a_repository() {
        let id = "18fae2764b0dd14f00c0ffee00c0ffee";
        let is_published = |path: &str| is_published(Path::new(path));
        assert!(is_published(&format!("/nas/web.qcow2.tier/{id}.qcow2")));
        for other in
            ["/nas/web.qcow2.tier/web.qcow2", &format!("/nas/{id}.qcow2"), &format!("/nas/web.tier/{id}")]
        {
            assert!(!is_published(other), "{other}");
        }
        assert!(!is_published(&format!("/nas/web.qcow2.tier/{}.qcow2", id.to_uppercase())));
        assert!(!is_published(&format!("/nas/web.qcow2.tier/{}.qcow2", &id[1..])));
    }

    #[test]
    fn a_colon_does_not_make_a_protocol_of_a_file() {
        let sibling = |name: &str| sibling(name.as_ref());
        assert_eq!(sibling("nbd:x.mon.qcow2"), "./nbd:x.mon.qcow2");
        assert_eq!(sibling("web.mon.qcow2"), "web.mon.qcow2");
        assert_eq!(crate::chain::plain_name(&sibling("nbd:x")).unwrap(), "./nbd:x");
    }

    #[test]
    fn what_belongs_to_a_file_has_a_name_however_long_the_files_is() {
        let of = |name: &str| beside_name(OsStr::new(name), ".1-0.new").into_string().unwrap();
        assert_eq!(of("web.qcow2"), ".web.qcow2.1-0.new");
        let long = ["x".repeat(255), "x".repeat(254), "ä".repeat(127)].map(|name| of(&name));
        for (number, name) in long.iter().enumerate() {
            assert!(name.len() <= NAME_MAX && name.ends_with(".1-0.new"), "{name}");
            assert!(!long[number + 1..].contains(name), "{name}");
        }
    }
}
