//! Addresses inside a guest, and the frames that its memory is made of.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Base-2 logarithm of [`PAGE_BYTES`].
pub const PAGE_BITS: u32 = 12;
/// Bytes of a page: the smallest unit of x86-64's memory, and of everything in this crate.
pub const PAGE_BYTES: usize = 1 << PAGE_BITS;

/// Declares an address of a guest.
macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Wraps an address.
            pub const fn new(address: u64) -> Self {
                Self(address)
            }

            /// The address as a number.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The address `bytes` further up, or `None` past 2^64: guests choose both numbers.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Bytes from the start of its page.
            pub const fn within_page(self) -> usize {
                (self.0 & (PAGE_BYTES as u64 - 1)) as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// An address as the guest's memory controller sees it.
    Physical
}

address! {
    /// An address as the guest's kernel sees it, through its page tables.
    Virtual
}

/// The index of a page of guest-physical memory (Linux: a page frame number).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Frame(u64);

impl Frame {
    /// Wraps a page frame number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The page frame number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The frame that holds `address`.
    pub const fn of(address: Physical) -> Self {
        Self(address.get() >> PAGE_BITS)
    }

    /// The address of its first byte, or `None` past 2^64.
    pub const fn start(self) -> Option<Physical> {
        if self.0 >> (u64::BITS - PAGE_BITS) == 0 { Some(Physical(self.0 << PAGE_BITS)) } else { None }
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame {:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_holds_the_bytes_of_its_page() {
        let frame = Frame::of(Physical::new(0x5fff));
        assert_eq!(frame, Frame::new(5));
        assert_eq!(frame.start(), Some(Physical::new(0x5000)));
        assert_eq!(Physical::new(0x5fff).within_page(), 0xfff);
    }

    #[test]
    fn frames_past_the_end_of_the_address_space_have_no_start() {
        assert_eq!(Frame::new(1 << 52).start(), None);
        assert_eq!(Frame::new((1 << 52) - 1).start(), Some(Physical::new(!0xfff)));
        assert_eq!(Physical::new(u64::MAX).checked_add(1), None);
    }
}
