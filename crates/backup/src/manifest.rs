//! The manifest of a backup: what it is, what it builds upon, and the checksums of all of it.
//!
//! JSON, so that anyone can read it; its own checksum is over the compact form of itself with a checksum of zeros.
//! A region's checksum covers, for each cluster that the backup stores in it, in order: the guest offset (8 bytes,
//! little-endian), one byte (1 data, 0 zeros), and the bytes of a data cluster, padded with zeros past the disk's end.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use vmstrata_disk::{AtomicFile, Error, IoContext as _, Result, snapshot};
use vmstrata_store::open_named;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::REGION_BYTES;
pub use crate::digest::Digest;
use crate::fault::BackupFault;

/// What the manifest of `FILE` is called: `FILE` with this at its end.
pub const MANIFEST_SUFFIX: &str = ".manifest.json";
/// The version that is written; older ones are read, too.
const VERSION: u32 = 2;
/// Longer manifests are refused: this is one of a full disk of 28 TiB.
const BYTES_MAX: u64 = 1 << 30;
/// Bytes of a manifest that are about one region, at most, and those that are about none.
const REGION_TEXT_MAX: u64 = 144;
const HEAD_MAX: u64 = 1 << 16;
/// Regions in which a backup may store anything: its manifest can be read again.
pub(crate) const REGIONS_MAX: usize = ((BYTES_MAX - HEAD_MAX) / REGION_TEXT_MAX) as usize;

/// A state of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// File name of its newest layer.
    pub file: String,
    /// Its name, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// When it was taken, in seconds since 1970, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at: Option<u64>,
    /// And how many nanoseconds after that: of two snapshots of one name, this tells which it is. Absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at_ns: Option<u32>,
}

const NS_PER_SECOND: u64 = 1_000_000_000;

/// A file's name; one that is not UTF-8 with its other bytes as `\xff`.
fn text_of(name: &OsStr) -> String {
    name.to_str().map_or_else(|| name.as_bytes().escape_ascii().to_string(), str::to_owned)
}

impl State {
    /// What a manifest says of a state.
    pub(crate) fn of(state: &snapshot::State) -> Self {
        let taken = state.taken_ns();
        Self {
            file: text_of(state.path.file_name().unwrap_or(state.path.as_os_str())),
            snapshot: state.info.as_ref().map(|info| info.name.clone()),
            taken_at: taken.map(|taken| taken / NS_PER_SECOND),
            taken_at_ns: taken.map(|taken| (taken % NS_PER_SECOND) as u32),
        }
    }

    /// Whether two states were taken at one time, as far as that is known of both.
    pub(crate) fn is_same_snapshot(&self, other: &Self) -> Option<bool> {
        let seconds = self.taken_at? == other.taken_at?;
        let rest = self.taken_at_ns.zip(other.taken_at_ns);
        Some(seconds && rest.is_none_or(|(one, other)| one == other))
    }
}

/// What an incremental backup builds upon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The backing file's name, as the backup stores it.
    #[serde(with = "vmstrata_disk::file_name")]
    pub file: OsString,
    /// File name of the state since which changes are stored.
    pub since: String,
    /// The checksum of that backup's manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_sha256: Option<Digest>,
}

/// The backup's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSum {
    /// Its length.
    pub bytes: u64,
    /// Of all its bytes, as `sha256sum` prints it.
    pub sha256: Digest,
}

/// What a backup stores of a part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionSum {
    /// Guest offset at which the region begins, a multiple of [`Manifest::region_bytes`].
    pub start: u64,
    /// See the module documentation.
    pub sha256: Digest,
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The manifest's version.
    pub vmstrata_backup: u32,
    /// What it is a backup of.
    pub state: State,
    /// What it builds upon; absent in a full backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builds_on: Option<Link>,
    /// When it was made, in seconds since 1970.
    pub made_at: u64,
    /// Virtual size of the disk.
    pub disk_bytes: u64,
    /// Size of the backup's clusters.
    pub cluster_bytes: u64,
    /// The file.
    pub file: FileSum,
    /// Size of a region.
    pub region_bytes: u64,
    /// The regions in which the backup stores anything, sorted.
    pub regions: Vec<RegionSum>,
    /// Of the manifest itself.
    pub sha256: Digest,
}

/// The path of the manifest of the backup at `file`.
pub fn manifest_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(MANIFEST_SUFFIX);
    name.into()
}

impl Manifest {
    pub(crate) const VERSION: u32 = VERSION;

    /// Reads and checks a manifest.
    ///
    /// # Errors
    /// A file that cannot be read, is no manifest of a known version, or does not match its own checksum.
    pub fn read(path: &Path) -> Result<Self> {
        let read = || -> Result<Self> {
            let file = open_named(path).while_trying("open the backup's manifest")?;
            let mut bytes = Vec::new();
            file.take(BYTES_MAX).read_to_end(&mut bytes).while_trying("read the backup's manifest")?;
            Self::parse(&bytes)
        };
        read().map_err(|error| error.in_file(path))
    }

    /// Reads and checks the bytes of a manifest.
    ///
    /// # Errors
    /// Bytes that are no manifest of a known version, or do not match their own checksum.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            vmstrata_backup: u32,
        }
        let not = |error: serde_json::Error| BackupFault::NotAManifest { reason: error.to_string() };
        let Version { vmstrata_backup: version } = serde_json::from_slice(bytes).map_err(not)?;
        if !(1..=VERSION).contains(&version) {
            return Err(BackupFault::Version { version, known: VERSION }.into());
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(not)?;
        if manifest.sha256 != manifest.own_sum() || !manifest.has_sound_regions() {
            return Err(BackupFault::ManifestDamaged.into());
        }
        Ok(manifest)
    }

    fn has_sound_regions(&self) -> bool {
        let starts = || self.regions.iter().map(|region| region.start);
        self.region_bytes == REGION_BYTES
            && starts().all(|start| start.is_multiple_of(REGION_BYTES) && start < self.disk_bytes)
            && starts().is_sorted_by(|one, next| one < next)
    }

    /// Enters its own checksum.
    pub(crate) fn seal(mut self) -> Self {
        self.sha256 = self.own_sum();
        self
    }

    fn own_sum(&self) -> Digest {
        struct Hashing(Sha256);
        impl std::io::Write for Hashing {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.update(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut hash = Hashing(Sha256::new());
        let blank = Self { sha256: Digest::default(), ..self.clone() };
        serde_json::to_writer(&mut hash, &blank).expect("a manifest is plain data");
        Digest::of(hash.0)
    }

    /// What the region at `start` must have; `None` when the backup stores nothing there.
    pub(crate) fn region(&self, start: u64) -> Option<Digest> {
        let found = self.regions.binary_search_by_key(&start, |region| region.start).ok()?;
        Some(self.regions[found].sha256)
    }

    /// Writes the manifest under `path`, whole or not at all.
    ///
    /// # Errors
    /// A file that is there already, unless `replace`; whatever the host reports.
    pub fn write(&self, path: &Path, replace: bool) -> Result<()> {
        ManifestDraft::beside(path)?.publish(self, replace)
    }

    fn write_to(&self, file: &File) -> std::io::Result<()> {
        let mut out = std::io::BufWriter::new(file);
        serde_json::to_writer_pretty(&mut out, self)?;
        out.write_all(b"\n")?;
        out.flush()
    }
}

/// A place for a manifest: made before the backup, so that it is known that there is one.
#[derive(Debug)]
pub struct ManifestDraft {
    draft: AtomicFile,
    path: PathBuf,
}

impl ManifestDraft {
    /// In the directory of `path`.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn beside(path: &Path) -> Result<Self> {
        let draft = AtomicFile::beside(path).map_err(|error| error.in_file(path))?;
        Ok(Self { draft, path: path.to_owned() })
    }

    /// Writes the manifest under the path, whole or not at all.
    ///
    /// # Errors
    /// A file that is there already, unless `replace`; whatever the host reports.
    pub fn publish(self, manifest: &Manifest, replace: bool) -> Result<()> {
        let written = manifest.write_to(&self.draft.file).while_trying("write the backup's manifest");
        let published = written.and_then(|()| self.draft.publish(&self.path, replace));
        published.map_err(|error: Error| error.in_file(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            vmstrata_backup: VERSION,
            state: State {
                file: "web.mon.qcow2".into(),
                snapshot: Some("mon".into()),
                taken_at: Some(5),
                taken_at_ns: Some(7),
            },
            builds_on: Some(Link {
                file: "full.qcow2".into(),
                since: "web.sun.qcow2".into(),
                manifest_sha256: Some(Digest([7; 32])),
            }),
            made_at: 9,
            disk_bytes: 1 << 30,
            cluster_bytes: 1 << 16,
            file: FileSum { bytes: 12, sha256: Digest([3; 32]) },
            region_bytes: REGION_BYTES,
            regions: vec![RegionSum { start: 0, sha256: Digest([1; 32]) }],
            sha256: Digest::default(),
        }
        .seal()
    }

    #[test]
    fn what_is_written_is_read() {
        let text = serde_json::to_vec_pretty(&manifest()).unwrap();
        assert_eq!(Manifest::parse(&text).unwrap(), manifest());
    }

    #[test]
    fn a_change_of_any_byte_is_noticed_or_means_nothing() {
        let text = serde_json::to_vec(&manifest()).unwrap();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut damaged = text.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(read) = Manifest::parse(&damaged) {
                    assert_eq!(read, manifest(), "byte {at}, bit {bit}");
                }
            }
        }
    }

    #[test]
    fn other_versions_are_named() {
        let text = String::from_utf8(serde_json::to_vec(&manifest()).unwrap()).unwrap();
        for (version, said) in [("3", "version 3"), ("0", "version 0")] {
            let text = text.replace("\"vmstrata_backup\":2", &format!("\"vmstrata_backup\":{version}"));
            let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    /// As the program wrote them that knew version 1.
    #[test]
    fn manifests_of_version_1_are_read() {
        let text = include_bytes!("../tests/golden/manifest-1.json");
        let read = Manifest::parse(text).unwrap();
        assert_eq!(
            (read.vmstrata_backup, read.state.taken_at, read.state.taken_at_ns),
            (1, Some(1_795_598_838), None)
        );
        let now = |taken_at, taken_at_ns| State { taken_at, taken_at_ns, ..read.state.clone() };
        assert_eq!(read.state.is_same_snapshot(&now(Some(1_795_598_838), Some(5))), Some(true));
        assert_eq!(read.state.is_same_snapshot(&now(Some(1_795_598_839), Some(5))), Some(false));
        assert_eq!(read.state.is_same_snapshot(&now(None, None)), None);
    }

    #[test]
    fn a_manifest_of_the_most_regions_can_be_read() {
        let of = |count: u64| {
            let start = |number| u64::MAX - number;
            let regions = (0..count).map(|n| RegionSum { start: start(n), sha256: Digest([255; 32]) });
            let file = tempfile::tempfile().unwrap();
            Manifest { regions: regions.collect(), ..manifest() }.write_to(&file).unwrap();
            file.metadata().unwrap().len()
        };
        assert!(of(3) - of(2) <= REGION_TEXT_MAX, "{}", of(3) - of(2));
        assert!(of(0) + REGIONS_MAX as u64 * REGION_TEXT_MAX <= BYTES_MAX);
    }

    #[test]
    fn snapshots_are_told_apart_to_the_nanosecond() {
        let taken = |at, ns| State { taken_at: Some(at), taken_at_ns: Some(ns), ..manifest().state };
        assert_eq!(taken(5, 7).is_same_snapshot(&taken(5, 7)), Some(true));
        assert_eq!(taken(5, 7).is_same_snapshot(&taken(5, 8)), Some(false));
    }
}
