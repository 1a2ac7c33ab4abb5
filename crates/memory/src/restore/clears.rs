//! Bits of a memory that are to be cleared: they tell the guest that it has pages which are lost.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::error::RestoreError;
use crate::address::{Frame, PAGE_BYTES};
use crate::hide::{Clear, Hiding};
use crate::ram::Layout;

/// Bits to clear in a byte: the byte's offset in the machine's files in the high 56 bits, the bits in the low 8.
#[derive(Debug, Default)]
pub(super) struct Clears(Vec<u64>);

impl Clears {
    /// What hides the pages `lost`, which are in order.
    ///
    /// # Errors
    /// A page that nothing hides, or words that are not in the machine's memory.
    pub(super) fn hiding(layout: &Layout, hiding: &Hiding, lost: &[Frame]) -> Result<Self, RestoreError> {
        let (mut clears, mut folios, mut end) = (Self::default(), hiding.iter().peekable(), 0);
        for &frame in lost {
            // Its folio is hidden already.
            if frame.get() < end {
                continue;
            }
            while folios.next_if(|hide| hide.end() <= frame.get()).is_some() {}
            let hide = folios.next_if(|hide| hide.first <= frame).ok_or(RestoreError::Unhidden { frame })?;
            for clear in hide.clears {
                let found = layout.find(clear.at).filter(|(_, follow)| *follow >= Clear::BYTES);
                let (offset, _) = found.ok_or(RestoreError::Unhidden { frame })?;
                let bytes = (offset..).zip(clear.mask.to_le_bytes()).filter(|(_, bits)| *bits != 0);
                clears.0.extend(bytes.map(|(at, bits)| at << 8 | u64::from(bits)));
            }
            end = hide.end();
        }
        clears.0.sort_unstable();
        clears.0.shrink_to_fit();
        Ok(clears)
    }

    /// Clears what is to be cleared of the page at `offset`; false if that is nothing.
    pub(super) fn apply(&self, offset: u64, page: &mut [u8; PAGE_BYTES]) -> bool {
        let from = self.0.partition_point(|clear| clear >> 8 < offset);
        let of_page = self.0[from..].iter().take_while(|clear| (*clear >> 8) - offset < PAGE_BYTES as u64);
        let mut any = false;
        for clear in of_page {
            page[((clear >> 8) - offset) as usize] &= !(*clear as u8);
            any = true;
        }
        any
    }

    /// Clears what is to be cleared of the page `number`, which lies at `at` in `file`.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(super) fn apply_to(&self, number: u64, file: &File, at: u64) -> io::Result<()> {
        let mut page = [0; PAGE_BYTES];
        file.read_exact_at(&mut page, at)?;
        self.apply(number * PAGE_BYTES as u64, &mut page);
        file.write_all_at(&page, at)
    }

    /// The numbers of the pages in which something is to be cleared.
    pub(super) fn pages(&self) -> Vec<u64> {
        let mut pages: Vec<u64> = self.0.iter().map(|clear| (clear >> 8) / PAGE_BYTES as u64).collect();
        pages.dedup();
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_cleared_in_their_page_and_in_no_other() {
        let bytes = [(0x1fff, 0x80), (0x2000, 1), (0x2000, 2), (0x2fff, 4)];
        let clears = Clears(bytes.map(|(at, bits)| at << 8 | bits).to_vec());
        assert_eq!(clears.pages(), [1, 2]);
        let mut page = [0xff; PAGE_BYTES];
        assert!(clears.apply(0x2000, &mut page));
        assert_eq!((page[0], page[1], page[0xfff]), (0xfc, 0xff, 0xfb));
        let mut page = [0xff; PAGE_BYTES];
        assert!(clears.apply(0x1000, &mut page));
        assert_eq!((page[0], page[0xfff]), (0xff, 0x7f));
        assert!(!clears.apply(0x3000, &mut page) && !clears.apply(0, &mut page));
    }
}
