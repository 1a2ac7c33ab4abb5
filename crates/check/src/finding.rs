//! One thing that is wrong in an image.

use std::fmt;

use serde::ser::{Serialize, SerializeStruct as _, Serializer};
use vmstrata_qcow2::{EntryError, ParseError};
use vmstrata_types::HostOffset;

/// [`FindingKind::PastEnd`] of an L2 table.
pub(crate) const PAST_END_L2: &str = "an L2 table";

/// What is wrong in one place of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FindingKind {
    /// A cluster may be taken for free, or for unshared, while it is in use.
    RefcountTooLow {
        /// The refcount in the image.
        refcount: u64,
        /// References there are.
        references: u64,
    },
    /// Space that is not given back: harmless but for the space.
    Leak {
        /// The refcount in the image.
        refcount: u64,
        /// References there are.
        references: u64,
    },
    /// More references than the image's refcounts can count.
    RefcountOverflow {
        /// References there are.
        references: u64,
        /// The highest refcount of this width.
        max: u64,
    },
    /// Structures that never may share a cluster do, with a refcount that hides it.
    Overlap {
        /// References there are.
        references: u64,
    },
    /// An L1 entry breaks the format.
    L1Entry(EntryError),
    /// An L2 entry breaks the format.
    L2Entry(EntryError),
    /// The copied flag of an L1 entry contradicts the refcount of its L2 table.
    L1Copied {
        /// The flag in the entry.
        flag: bool,
        /// The L2 table.
        table: HostOffset,
    },
    /// The copied flag of an L2 entry contradicts the refcount of its cluster.
    L2Copied {
        /// The flag in the entry.
        flag: bool,
        /// The cluster.
        host: HostOffset,
    },
    /// Something lies past the end of the file: the file was cut short, or the pointer is garbage.
    PastEnd {
        /// What lies there.
        what: &'static str,
        /// Its first byte.
        start: HostOffset,
        /// Its bytes.
        len: u64,
    },
    /// A refcount table entry that breaks the format.
    RefcountTableEntry(EntryError),
    /// A refcount block that something else lies on.
    RefcountBlockShared {
        /// Where the block lies.
        block: HostOffset,
        /// References to its cluster.
        references: u64,
    },
    /// The snapshot table cannot be read: what snapshots hold is not known.
    SnapshotTable(ParseError),
    /// A snapshot whose L1 table cannot be read; its clusters seem leaked.
    Snapshot(ParseError),
    /// A snapshot of a version 3 image without the fields that version requires.
    SnapshotIncomplete {
        /// Bytes of extra data, less than 16.
        extra_len: u32,
    },
    /// Snapshots whose L1 tables lie over each other, too many to walk; what they hold is not known.
    SnapshotsOverlap,
    /// Bitmaps whose tables lie over each other, too many to walk; what they hold is not known.
    BitmapsOverlap,
    /// The bitmap directory cannot be read: what bitmaps hold is not known.
    Bitmaps(ParseError),
    /// A bitmap table entry that breaks the format.
    BitmapEntry(EntryError),
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The image is inconsistent: data is in danger, or lost.
    Corruption,
    /// Space is lost.
    Leak,
    /// The check could not look at a part of the image.
    CheckError,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Corruption => "corruption",
            Self::Leak => "leak",
            Self::CheckError => "check-error",
        })
    }
}

impl FindingKind {
    /// A name for programs, which stays.
    pub fn name(&self) -> &'static str {
        match self {
            Self::RefcountTooLow { .. } => "refcount-too-low",
            Self::Leak { .. } => "leak",
            Self::RefcountOverflow { .. } => "refcount-overflow",
            Self::Overlap { .. } => "overlap",
            Self::L1Entry(_) => "l1-entry",
            Self::L2Entry(_) => "l2-entry",
            Self::L1Copied { .. } => "l1-copied",
            Self::L2Copied { .. } => "l2-copied",
            Self::PastEnd { .. } => "past-end",
            Self::RefcountTableEntry(_) => "refcount-table-entry",
            Self::RefcountBlockShared { .. } => "refcount-block-shared",
            Self::SnapshotTable(_) => "snapshot-table",
            Self::Snapshot(_) => "snapshot",
            Self::SnapshotIncomplete { .. } => "snapshot-incomplete",
            Self::SnapshotsOverlap => "snapshots-overlap",
            Self::BitmapsOverlap => "bitmaps-overlap",
            Self::Bitmaps(_) => "bitmaps",
            Self::BitmapEntry(_) => "bitmap-entry",
        }
    }

    /// Whether there may be references that the check could not find because of this.
    pub(crate) fn hides_references(&self) -> bool {
        match self {
            Self::L1Entry(error) => matches!(error, EntryError::Misaligned { .. }),
            Self::PastEnd { what, .. } => *what == PAST_END_L2,
            Self::Snapshot(_) | Self::BitmapEntry(_) => true,
            kind => kind.severity() == Severity::CheckError,
        }
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        match self {
            Self::Leak { .. } => Severity::Leak,
            Self::SnapshotTable(_) | Self::SnapshotsOverlap => Severity::CheckError,
            Self::Bitmaps(_) | Self::BitmapsOverlap => Severity::CheckError,
            _ => Severity::Corruption,
        }
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RefcountTooLow { refcount, references } => {
                write!(f, "refcount is {refcount}, too low for {references} reference(s)")
            }
            Self::Leak { refcount, references } => {
                write!(f, "leaked: refcount is {refcount}, with {references} reference(s)")
            }
            Self::RefcountOverflow { references, max } => {
                write!(f, "{references} references, more than refcounts of this image can count ({max})")
            }
            Self::Overlap { references } => {
                write!(f, "{references} structures that may not share a cluster lie on this one")
            }
            Self::L1Entry(error) => write!(f, "L1 {error}"),
            Self::L2Entry(error) => write!(f, "L2 {error}"),
            Self::L1Copied { flag, table } => copied(f, *flag, "L2 table", *table),
            Self::L2Copied { flag, host } => copied(f, *flag, "cluster", *host),
            Self::PastEnd { what, start, len } => {
                write!(f, "{what} at {start}, {len} bytes long, lies past the end of the file")
            }
            Self::RefcountTableEntry(error) => write!(f, "refcount table {error}"),
            Self::RefcountBlockShared { block, references } => {
                write!(f, "refcount block at {block} shares its cluster: {references} references")
            }
            Self::SnapshotTable(error) => write!(f, "snapshots are not readable: {error}"),
            Self::Snapshot(error) => write!(f, "snapshot is not readable: {error}"),
            Self::SnapshotIncomplete { extra_len } => {
                write!(f, "snapshot has {extra_len} bytes of extra data; version 3 requires 16")
            }
            Self::SnapshotsOverlap => f.write_str("the L1 tables of snapshots lie over each other"),
            Self::BitmapsOverlap => f.write_str("the tables of bitmaps lie over each other"),
            Self::Bitmaps(error) => write!(f, "bitmaps are not readable: {error}"),
            Self::BitmapEntry(error) => write!(f, "bitmap table {error}"),
        }
    }
}

fn copied(f: &mut fmt::Formatter<'_>, flag: bool, what: &str, at: HostOffset) -> fmt::Result {
    let (flag, refcount) = if flag { ("set", "not one") } else { ("clear", "one") };
    write!(f, "copied flag is {flag} but the refcount of the {what} at {at} is {refcount}")
}

/// Something wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The cluster, for refcounts; otherwise the byte where the wrong entry or field starts.
    pub at: HostOffset,
    /// What is wrong.
    pub kind: FindingKind,
}

/// In words and by name, for programs.
impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut finding = serializer.serialize_struct("Finding", 4)?;
        finding.serialize_field("severity", &self.kind.severity().to_string())?;
        finding.serialize_field("kind", self.kind.name())?;
        finding.serialize_field("offset", &self.at.get())?;
        finding.serialize_field("message", &self.kind.to_string())?;
        finding.end()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {}", self.at, self.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_says_where_and_what() {
        let kind = FindingKind::L2Copied { flag: true, host: HostOffset::new(0x50000) };
        let finding = Finding { at: HostOffset::new(0x40008), kind };
        assert_eq!(
            finding.to_string(),
            "at byte 0x40008: copied flag is set but the refcount of the cluster at 0x50000 is not one"
        );
    }
}
