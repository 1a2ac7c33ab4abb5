//! The record as a whole: of a snapshot, or of whose disk it is.

use super::{SnapshotInfo, SnapshotInfoError};

/// What an overlay says of the layer below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerRecord {
    /// It is a snapshot.
    Snapshot(SnapshotInfo),
    /// It has no name, and it and all below belong to another disk, whose file name this is.
    Foreign(String),
}

impl LayerRecord {
    /// The extension's data.
    ///
    /// # Errors
    /// A part outside its limits, or too much of all.
    pub fn encode(&self) -> Result<Vec<u8>, SnapshotInfoError> {
        match self {
            Self::Snapshot(info) => info.encode(),
            Self::Foreign(disk) => {
                // No origin would be encoded like an empty one.
                if disk.is_empty() {
                    return Err(SnapshotInfoError::Origin(String::new()));
                }
                let info = SnapshotInfo { origin: Some(disk.clone()), ..SnapshotInfo::default() };
                info.check_rest()?;
                info.encode_checked()
            }
        }
    }

    /// Reads the extension's data.
    ///
    /// # Errors
    /// A later version, a checksum that does not match, or what no version writes.
    pub fn parse(data: &[u8]) -> Result<Self, SnapshotInfoError> {
        let info = SnapshotInfo::parse_parts(data)?;
        info.check_rest()?;
        match info {
            SnapshotInfo { name, origin: Some(disk), .. } if name.is_empty() => Ok(Self::Foreign(disk)),
            info => info.check().map(|()| Self::Snapshot(info)),
        }
    }

    /// The disk that the layers below belong to, if that is another one.
    pub fn origin(&self) -> Option<&str> {
        match self {
            Self::Snapshot(info) => info.origin.as_deref(),
            Self::Foreign(disk) => Some(disk),
        }
    }
}

impl From<SnapshotInfo> for LayerRecord {
    fn from(info: SnapshotInfo) -> Self {
        Self::Snapshot(info)
    }
}
