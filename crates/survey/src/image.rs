//! One image file as the survey keeps it: a few hundred bytes, whatever its header says.

use std::path::{Path, PathBuf};

use vmstrata_disk::{Error, ErrorKind, Format, ImageHead, ProbedFile};
use vmstrata_qcow2::{Incompatible, ParseErrorKind};
use vmstrata_store::{FileId, GateError};
use vmstrata_types::ClusterBits;

use crate::risk::RiskKind;

/// Something wrong with a file or with what it stands on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: RiskKind,
    /// In words, with the name at fault.
    pub(crate) message: String,
}

/// The layer below an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Below {
    /// This file, to be read in this format; `None` means: as it looks.
    File(FileId, Option<Format>),
    /// None that can be used.
    Broken(Fault),
}

/// What a usable qcow2 header says.
#[derive(Clone, Debug)]
pub(crate) struct Qcow2Facts {
    pub(crate) cluster_bits: ClusterBits,
    pub(crate) internal_snapshots: u32,
    pub(crate) marked_dirty: bool,
    pub(crate) marked_corrupt: bool,
    pub(crate) in_session: bool,
    /// Name of the backing file as stored, as far as it is UTF-8.
    pub(crate) backing_name: Option<String>,
    pub(crate) below: Option<Below>,
    /// The snapshot that the layer below is: its name, and when it was taken, in ns since 1970.
    pub(crate) snapshot: Option<(String, i64)>,
    pub(crate) half_deleted: bool,
    pub(crate) written_since_indexed: bool,
    /// What is wrong with its tables, as far as they were read.
    pub(crate) tables: Option<Fault>,
}

/// A file that is an image, or was meant to be.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) id: FileId,
    /// The first of its names, in order of the alphabet.
    pub(crate) path: PathBuf,
    /// Bytes of the disk; 0 where that is not known.
    pub(crate) virtual_size: u64,
    pub(crate) allocated: u64,
    pub(crate) mtime_ns: i64,
    pub(crate) born_ns: Option<i64>,
    pub(crate) writer: bool,
    /// `None` for a raw file, and for one with a fault.
    pub(crate) qcow2: Option<Qcow2Facts>,
    pub(crate) fault: Option<Fault>,
}

impl Image {
    /// An image of what was found at `path`; `below` is where its backing file was found to be.
    pub(crate) fn new(
        path: &Path,
        found: ProbedFile,
        below: impl FnOnce(&ImageHead) -> Option<Below>,
    ) -> Self {
        let (qcow2, fault) = match &found.head {
            Ok(head) => (head.as_ref().map(|head| Qcow2Facts::new(head, below(head))), None),
            Err(error) => (None, Some(Fault::of(error))),
        };
        let virtual_size = match &found.head {
            Ok(Some(head)) => head.header.size,
            // Raw files are counted in sectors.
            Ok(None) => found.identity.len.next_multiple_of(512),
            Err(_) => 0,
        };
        Self {
            id: found.identity.file,
            path: path.to_owned(),
            virtual_size,
            allocated: found.allocated_bytes,
            mtime_ns: found.identity.mtime_ns,
            born_ns: found.born_ns,
            writer: found.writer,
            qcow2,
            fault,
        }
    }

    /// Whether it is not closed: a process writes it, or was killed while it did. Its newest tables may not be in the file yet.
    pub(crate) fn is_open(&self) -> bool {
        self.writer || self.qcow2.as_ref().is_some_and(|facts| facts.in_session)
    }

    /// Takes in another name of the same file.
    pub(crate) fn merge_name(&mut self, path: &Path) {
        if path < self.path {
            self.path = path.to_owned();
        }
    }
}

impl Qcow2Facts {
    fn new(head: &ImageHead, below: Option<Below>) -> Self {
        let header = &head.header;
        Self {
            cluster_bits: header.cluster_bits,
            internal_snapshots: header.snapshot_count,
            marked_dirty: header.incompatible.contains(Incompatible::DIRTY),
            marked_corrupt: header.incompatible.contains(Incompatible::CORRUPT) && !head.is_behind_log(),
            in_session: head.is_in_session(),
            backing_name: head.backing.as_ref().map(|backing| backing.name.to_string_lossy().into_owned()),
            below,
            snapshot: head.snapshot.as_ref().and_then(|snapshot| {
                // A time past 2262 is none.
                Some((snapshot.name.clone(), i64::try_from(snapshot.taken_ns).ok()?))
            }),
            half_deleted: head.is_half_deleted,
            written_since_indexed: head.was_written_since_indexed,
            tables: head.l1.as_ref().err().map(Fault::of),
        }
    }
}

impl Fault {
    /// What an error of the engine means for the chain that the file is in.
    pub(crate) fn of(error: &Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Gate(GateError::Outside { .. }) => RiskKind::Outside,
            ErrorKind::Gate(GateError::Open { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                RiskKind::Missing
            }
            ErrorKind::BackingName { .. } | ErrorKind::BackingFormat { .. } | ErrorKind::Foreign { .. } => {
                RiskKind::Unsupported
            }
            ErrorKind::Format(parse) => match parse.kind {
                ParseErrorKind::Unsupported { .. }
                | ParseErrorKind::UnknownFeatures { .. }
                | ParseErrorKind::UnsupportedVersion { .. } => RiskKind::Unsupported,
                _ => RiskKind::Corrupt,
            },
            ErrorKind::Entry { .. } | ErrorKind::Truncated { .. } => RiskKind::Corrupt,
            _ => RiskKind::Unreadable,
        };
        Self { kind, message: error.to_string() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A raw image of 1 MiB that is sound.
    pub(crate) fn raw_image(name: &str) -> Image {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Image {
            id: FileId { dev: 1, ino: hasher.finish() },
            path: name.into(),
            virtual_size: 1 << 20,
            allocated: 1 << 20,
            mtime_ns: 0,
            born_ns: None,
            writer: false,
            qcow2: None,
            fault: None,
        }
    }

    /// A qcow2 image of 1 MiB with clusters of 64 KiB, on `below`.
    pub(crate) fn qcow2_image(name: &str, below: Option<&str>) -> Image {
        let on = |below: &str| Below::File(raw_image(below).id, Some(Format::Qcow2));
        let facts = Qcow2Facts {
            cluster_bits: ClusterBits::DEFAULT,
            internal_snapshots: 0,
            marked_dirty: false,
            marked_corrupt: false,
            in_session: false,
            backing_name: below.map(str::to_owned),
            below: below.map(on),
            snapshot: None,
            half_deleted: false,
            written_since_indexed: false,
            tables: None,
        };
        Image { qcow2: Some(facts), ..raw_image(name) }
    }

    #[test]
    fn the_first_name_in_the_alphabet_is_kept() {
        let mut image = raw_image("m");
        for name in ["z", "b", "k"] {
            image.merge_name(Path::new(name));
        }
        assert_eq!(image.path, Path::new("b"));
    }
}
