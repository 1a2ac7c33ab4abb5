//! What an overlay says of the snapshot it stands on: the `VMSN` header extension.
//!
//! A snapshot of vmstrata is a layer: the file that was active until then. The overlay that was made when it was taken
//! carries, in its header, the name, time and labels of its *backing file*. So a frozen file is never written for
//! the sake of its name, and the name appears together with the overlay or not at all. `docs/format.md` has the bytes.
//!
//! An overlay of a disk that is not its backing file's has the same record without a name: it says only whose disk the
//! layers below are ([`LayerRecord::Foreign`]).
//!
//! Invariants: what [`LayerRecord::encode`] returns, [`LayerRecord::parse`] reads back; whatever `parse` accepts
//! keeps within the limits here and holds no control characters, so that it can go into messages and file names.

mod record;

use thiserror::Error;

use crate::bytes::{be32, be64};
use crate::extension::{Extension, Extensions, magic};

pub use self::record::LayerRecord;

/// Most bytes of a snapshot's name.
pub const MAX_NAME_LEN: usize = 100;
/// Most bytes of a group's id.
pub const MAX_GROUP_LEN: usize = 64;
/// Most bytes of the name of the disk that a clone was made from.
pub const MAX_ORIGIN_LEN: usize = 255;
/// Most labels of a snapshot.
pub const MAX_LABELS: usize = 32;
/// Most bytes of a label's key.
pub const MAX_KEY_LEN: usize = 64;
/// Most bytes of a label's value.
pub const MAX_VALUE_LEN: usize = 255;
/// Most bytes of the whole record: with it, header and backing name keep within the 4 KiB that readers fetch first.
pub const MAX_LEN: usize = 2048;

const VERSION: u8 = 1;
/// Bytes before the strings.
const FIXED: usize = 20;
const CRC_AT: usize = 16;

/// What is known of a snapshot beside its content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its name: 1 to [`MAX_NAME_LEN`] of `A-Z a-z 0-9 . _ -`, not starting with `.` or `-`.
    pub name: String,
    /// When it was taken, in ns since 1970. No two snapshots have the same: it tells one from another of its name.
    pub taken_ns: u64,
    /// Free-form labels, in order, no key twice. Keys are of the same characters as names and `/`; values are any text
    /// without control characters.
    pub labels: Vec<(String, String)>,
    /// What snapshots of several disks at one instant have in common.
    pub group: Option<String>,
    /// In a clone: the file name of the disk whose snapshot this is.
    pub origin: Option<String>,
}

/// Why there is no usable record, or none can be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SnapshotInfoError {
    /// A name that is none.
    #[error(
        "{0:?} is no snapshot name: 1 to {MAX_NAME_LEN} of the characters A-Z a-z 0-9 . _ -, the first a letter, a digit or _"
    )]
    Name(String),
    /// A group id that is none.
    #[error(
        "{0:?} is no group id: 1 to {MAX_GROUP_LEN} of the characters A-Z a-z 0-9 . _ -, the first a letter, a digit or _"
    )]
    Group(String),
    /// An origin that cannot be stored.
    #[error(
        "{0:?} cannot be recorded as a clone's origin: 1 to {MAX_ORIGIN_LEN} bytes, no control characters"
    )]
    Origin(String),
    /// A label's key that is none.
    #[error("{0:?} is no label: its key is 1 to {MAX_KEY_LEN} of the characters A-Z a-z 0-9 . _ - /")]
    Key(String),
    /// A label's value that cannot be stored.
    #[error(
        "the value of label {key:?} is too long or has control characters: up to {MAX_VALUE_LEN} bytes of text"
    )]
    Value {
        /// The label's key.
        key: String,
    },
    /// One key twice.
    #[error("label {0:?} is given twice")]
    KeyTwice(String),
    /// More labels than allowed.
    #[error("{0} labels are too many, a snapshot can have {MAX_LABELS}")]
    TooManyLabels(usize),
    /// All together more than allowed.
    #[error("name and labels need {0} bytes, a snapshot can have {MAX_LEN}")]
    TooLong(usize),
    /// A record of a later version.
    #[error("the record has version {0}, this program knows version {VERSION}")]
    Version(u8),
    /// A record that does not have the length, checksum or text it should.
    #[error("the record is damaged: {0}")]
    Damaged(&'static str),
}

impl SnapshotInfo {
    /// Of snapshots of several disks at one instant, that of disk `number`: a nanosecond later than the one before it.
    #[must_use]
    pub fn for_disk(&self, number: usize) -> Self {
        Self { taken_ns: self.taken_ns.saturating_add(number as u64), ..self.clone() }
    }

    /// Checks every part against the limits.
    ///
    /// # Errors
    /// The first part that is outside.
    pub fn check(&self) -> Result<(), SnapshotInfoError> {
        if is_name(&self.name, MAX_NAME_LEN) {
            self.check_rest()
        } else {
            Err(SnapshotInfoError::Name(self.name.clone()))
        }
    }

    /// All but the name.
    fn check_rest(&self) -> Result<(), SnapshotInfoError> {
        if let Some(group) = self.group.as_ref().filter(|group| !is_name(group, MAX_GROUP_LEN)) {
            return Err(SnapshotInfoError::Group(group.clone()));
        }
        let fits = |origin: &&String| !origin.is_empty() && is_text(origin, MAX_ORIGIN_LEN);
        if let Some(origin) = self.origin.as_ref().filter(|origin| !fits(origin)) {
            return Err(SnapshotInfoError::Origin(origin.clone()));
        }
        if self.labels.len() > MAX_LABELS {
            return Err(SnapshotInfoError::TooManyLabels(self.labels.len()));
        }
        for (number, (key, value)) in self.labels.iter().enumerate() {
            check_label(key, value)?;
            if self.labels[..number].iter().any(|(other, _)| other == key) {
                return Err(SnapshotInfoError::KeyTwice(key.clone()));
            }
        }
        Ok(())
    }

    /// The extension's data.
    ///
    /// # Errors
    /// A part outside its limits, or too much of all.
    pub fn encode(&self) -> Result<Vec<u8>, SnapshotInfoError> {
        self.check()?;
        self.encode_checked()
    }

    fn encode_checked(&self) -> Result<Vec<u8>, SnapshotInfoError> {
        let group = self.group.as_deref().unwrap_or_default();
        let origin = self.origin.as_deref().unwrap_or_default();
        let lens = [self.name.len(), group.len(), origin.len(), self.labels.len()];
        let mut out = vec![VERSION, 0, 0, 0];
        out.extend(lens.map(|len| u8::try_from(len).expect("limits are below 256")));
        out.extend_from_slice(&self.taken_ns.to_be_bytes());
        out.extend_from_slice(&[0; FIXED - CRC_AT]);
        for text in [&self.name, group, origin] {
            out.extend_from_slice(text.as_bytes());
        }
        for (key, value) in &self.labels {
            out.extend([key, value].map(|text| u8::try_from(text.len()).expect("limits are below 256")));
            out.extend_from_slice(key.as_bytes());
            out.extend_from_slice(value.as_bytes());
        }
        if out.len() > MAX_LEN {
            return Err(SnapshotInfoError::TooLong(out.len()));
        }
        let crc = crc32c::crc32c(&out);
        out[CRC_AT..FIXED].copy_from_slice(&crc.to_be_bytes());
        Ok(out)
    }

    /// Reads the extension's data.
    ///
    /// # Errors
    /// A record without a name; otherwise as [`LayerRecord::parse`].
    pub fn parse(data: &[u8]) -> Result<Self, SnapshotInfoError> {
        match LayerRecord::parse(data)? {
            LayerRecord::Snapshot(info) => Ok(info),
            LayerRecord::Foreign(_) => Err(SnapshotInfoError::Name(String::new())),
        }
    }

    /// Reads the extension's data but for what the parts may hold.
    fn parse_parts(data: &[u8]) -> Result<Self, SnapshotInfoError> {
        let damaged = SnapshotInfoError::Damaged;
        match data.first() {
            None => return Err(damaged("it is empty")),
            Some(&VERSION) => {}
            Some(&version) => return Err(SnapshotInfoError::Version(version)),
        }
        if !(FIXED..=MAX_LEN).contains(&data.len()) {
            return Err(damaged("its length is impossible"));
        }
        let zeroed = crc32c::crc32c_append(crc32c::crc32c(&data[..CRC_AT]), &[0; FIXED - CRC_AT]);
        if crc32c::crc32c_append(zeroed, &data[FIXED..]) != be32(data, CRC_AT) {
            return Err(damaged("its checksum does not match"));
        }
        if data[1..4] != [0; 3] {
            return Err(damaged("reserved bytes are not zero"));
        }
        Self::parse_text(data)
    }

    fn parse_text(data: &[u8]) -> Result<Self, SnapshotInfoError> {
        let mut rest = Reader(&data[FIXED..]);
        let optional = |text: String| (!text.is_empty()).then_some(text);
        let name = rest.text(data[4])?;
        let group = optional(rest.text(data[5])?);
        let origin = optional(rest.text(data[6])?);
        let mut labels = Vec::new();
        for _ in 0..data[7] {
            let (key, value) = (rest.byte()?, rest.byte()?);
            labels.push((rest.text(key)?, rest.text(value)?));
        }
        if !rest.0.is_empty() {
            return Err(SnapshotInfoError::Damaged("bytes follow the last label"));
        }
        Ok(Self { name, taken_ns: be64(data, 8), labels, group, origin })
    }

    /// The record among a header's extensions, if there is one: the first, should there be more.
    pub fn find(extensions: &Extensions) -> Option<&[u8]> {
        extensions.items.iter().find(|item| item.magic() == magic::SNAPSHOT).map(Extension::data)
    }
}

fn check_label(key: &str, value: &str) -> Result<(), SnapshotInfoError> {
    let is_key = |byte: u8| is_name_byte(byte) || byte == b'/';
    if key.is_empty() || key.len() > MAX_KEY_LEN || !key.bytes().all(is_key) {
        return Err(SnapshotInfoError::Key(key.to_owned()));
    }
    if is_text(value, MAX_VALUE_LEN) { Ok(()) } else { Err(SnapshotInfoError::Value { key: key.to_owned() }) }
}

/// What still is to be read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Result<u8, SnapshotInfoError> {
        let (&byte, rest) = self.0.split_first().ok_or(SnapshotInfoError::Damaged("it ends early"))?;
        self.0 = rest;
        Ok(byte)
    }

    fn text(&mut self, len: u8) -> Result<String, SnapshotInfoError> {
        let ended = SnapshotInfoError::Damaged("it ends early");
        let (text, rest) = self.0.split_at_checked(len.into()).ok_or(ended)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|_| SnapshotInfoError::Damaged("its text is not UTF-8"))
    }
}

/// Whether `text` may be a snapshot's name.
pub fn is_snapshot_name(text: &str) -> bool {
    is_name(text, MAX_NAME_LEN)
}

fn is_name(text: &str, max: usize) -> bool {
    let begins_well = text.bytes().next().is_some_and(|first| !matches!(first, b'.' | b'-'));
    begins_well && text.len() <= max && text.bytes().all(is_name_byte)
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

fn is_text(text: &str, max: usize) -> bool {
    text.len() <= max && !text.contains(char::is_control)
}

#[cfg(test)]
mod tests;
