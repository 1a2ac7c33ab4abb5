//! Session numbers: which process writes an image, and whether it left a journal in this boot.
//!
//! ```text
//!   autoclear bits   63   62                32   31    30            16   15            1     0
//!                  ┌────┬────────────────────┬───────┬─────────────────┬─────────────────┬─────────┐
//!                  │ 1  │ drawn anew         │ index │ tag of the boot │ tag of the log  │ bitmaps │
//!                  └────┴────────────────────┴───────┴─────────────────┴─────────────────┴─────────┘
//! ```
//!
//! Every stock writer clears autoclear bits that it does not know, so an image that still holds a number was written by
//! nobody else since. Without a journal the tag of the boot is 0; without a flush log the tag of the log is 0.

use std::hash::{BuildHasher as _, RandomState};
use std::io;

/// The autoclear bits of a session number.
pub(crate) const SESSION_MASK: u64 = 0xFFFF_FFFF_7FFF_0000;
/// Those that name the flush log of an image with a session number. Without one they mean what the format says: bit 1 is "raw external
/// data".
pub(crate) const LOG_MASK: u64 = 0xFFFE;
const LOG_SHIFT: u32 = 1;
const IN_USE: u64 = 1 << 63;
const DRAWN: u64 = 0x7FFF_FFFF << 32;
const TAG_SHIFT: u32 = 16;
const TAG_MAX: u64 = 0x7FFF;

/// The bits for a log's tag.
pub(crate) fn bits_of_log(tag: u64) -> u64 {
    tag << LOG_SHIFT & LOG_MASK
}

/// The bits of a log in these of an image; 0 if it is behind none.
pub(crate) fn log_in(autoclear: u64) -> u64 {
    if autoclear & IN_USE == 0 { 0 } else { autoclear & LOG_MASK }
}

/// The kernel's name for this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BootId(pub(crate) [u8; 16]);

impl BootId {
    /// # Errors
    /// A host without `/proc`.
    pub(crate) fn now() -> io::Result<Self> {
        let text = vmstrata_store::proc::boot_id()?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let id = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
        Ok(Self(id.to_le_bytes()))
    }

    /// What a session number says of the boot; never 0.
    fn tag(self) -> u64 {
        u64::from(crc32c::crc32c(&self.0)) % TAG_MAX + 1
    }

    /// A number that no earlier process used for an image, in all likelihood: of a session that leaves a journal.
    pub(crate) fn new_session(self) -> u64 {
        new_session() | self.tag() << TAG_SHIFT
    }

    /// Whether a process of this boot that left a journal wrote the number.
    pub(crate) fn has_journal(self, session: u64) -> bool {
        session >> TAG_SHIFT & TAG_MAX == self.tag()
    }
}

/// As [`BootId::new_session`], of a session without a journal.
pub(crate) fn new_session() -> u64 {
    RandomState::new().hash_one(std::process::id()) & DRAWN | IN_USE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_tells_whether_this_boot_has_its_journal() {
        let (here, elsewhere) = (BootId([1; 16]), BootId([2; 16]));
        let session = here.new_session();
        assert!(here.has_journal(session) && !elsewhere.has_journal(session));
        assert!(!here.has_journal(new_session()) && !here.has_journal(0));
        assert_eq!((session | new_session()) & !SESSION_MASK, 0, "bits of others are left alone");
        assert_eq!((bits_of_log(1), bits_of_log(0x7FFF)), (2, LOG_MASK));
        assert_eq!(LOG_MASK & (SESSION_MASK | 1), 0);
        assert_eq!((log_in(session | 2), log_in(session | 1), log_in(3)), (2, 0, 0));
    }
}
