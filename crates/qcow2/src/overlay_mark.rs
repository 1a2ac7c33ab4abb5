//! The mark of overlays that took the place of a raw disk: the `VMSO` header extension.
//!
//! A raw file holds what its guest wrote, and that may look like a qcow2 header. The mark is a random number that the guest
//! never sees, so a header with the right one is no guest's. `docs/format.md` says where else it stands.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::extension::{Extension, Extensions, magic};

/// Bytes of a mark.
const LEN: usize = 16;

/// See the module documentation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OverlayMark([u8; LEN]);

/// A text that is no mark.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a mark is {} hexadecimal digits", 2 * LEN)]
pub struct OverlayMarkError;

impl OverlayMark {
    /// The mark of these bytes, which nobody can guess.
    pub const fn new(bytes: [u8; LEN]) -> Self {
        Self(bytes)
    }

    /// The mark among `extensions`, if there is exactly one of the right length.
    pub fn find(extensions: &Extensions) -> Option<Self> {
        let mut marks = extensions.items.iter().filter(|extension| extension.magic() == magic::OVERLAY);
        let (mark, None) = (marks.next()?, marks.next()) else { return None };
        Some(Self(mark.data().try_into().ok()?))
    }

    /// The extension to store.
    pub fn extension(self) -> Extension {
        Extension::Unknown { magic: magic::OVERLAY, data: self.0.to_vec() }
    }
}

impl fmt::Display for OverlayMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for OverlayMark {
    /// Not in logs: it is a secret from guests.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OverlayMark(..)")
    }
}

impl FromStr for OverlayMark {
    type Err = OverlayMarkError;

    fn from_str(text: &str) -> Result<Self, OverlayMarkError> {
        if text.len() != 2 * LEN || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(OverlayMarkError);
        }
        let number = u128::from_str_radix(text, 16).map_err(|_| OverlayMarkError)?;
        Ok(Self(number.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: OverlayMark = OverlayMark::new([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);

    #[test]
    fn a_mark_is_read_back_from_its_text_and_from_its_extension() {
        assert_eq!(MARK.to_string(), "000102030405060708090a0b0c0d0eff");
        assert_eq!(MARK.to_string().parse(), Ok(MARK));
        assert_eq!(OverlayMark::find(&Extensions { items: vec![MARK.extension()] }), Some(MARK));
    }

    #[test]
    fn what_is_no_mark_is_none() {
        for text in ["", "00", &"0".repeat(33), &"g".repeat(32), &format!("+{}", "0".repeat(31))] {
            assert_eq!(text.parse::<OverlayMark>(), Err(OverlayMarkError), "{text}");
        }
        let of = |data: &[&[u8]]| {
            let extension = |data: &&[u8]| Extension::Unknown { magic: magic::OVERLAY, data: data.to_vec() };
            OverlayMark::find(&Extensions { items: data.iter().map(extension).collect() })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[&[0; 15]]), None);
        assert_eq!(of(&[&[0; 17]]), None);
        assert_eq!(of(&[&[0; 16], &[0; 16]]), None, "two marks are one too many");
    }
}
