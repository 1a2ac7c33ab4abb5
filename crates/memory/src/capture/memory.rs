//! A machine's memory over the files of its backends.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::address::Physical;
use crate::ram::{Layout, Ram, RamError};

/// The memory of a machine: its backends one after the other, laid out in the guest by a [`Layout`].
#[derive(Debug)]
pub struct MachineRam {
    files: Files,
    layout: Layout,
}

/// Files that are read as one.
#[derive(Debug)]
pub(crate) struct Files {
    /// Each with the offset of its first byte and its bytes, in order.
    files: Vec<(File, u64, u64)>,
}

impl Files {
    /// Of files of which so many bytes each count.
    pub(crate) fn new(files: Vec<(File, u64)>) -> Self {
        let mut before = 0;
        let place = |(file, bytes)| {
            let start = before;
            before += bytes;
            (file, start, bytes)
        };
        Self { files: files.into_iter().map(place).collect() }
    }

    /// The file that holds the byte at `offset`, where in it, and how many bytes of the file follow.
    pub(crate) fn find(&self, offset: u64) -> Option<(&File, u64, u64)> {
        let after = self.files.partition_point(|(_, start, _)| *start <= offset);
        let (file, start, bytes) = self.files.get(after.checked_sub(1)?)?;
        let within = offset - start;
        (within < *bytes).then(|| (file, within, bytes - within))
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.last().map_or(0, |(_, start, bytes)| start + bytes)
    }
}

/// Whether a file surely has no page in a range.
pub(super) fn is_hole(file: &File, offset: u64, len: u64) -> bool {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(data) => data >= offset + len,
        Err(Errno::NXIO) => true,
        Err(_) => false,
    }
}

impl MachineRam {
    /// `files` with the bytes that count of each; one after the other they hold the blocks of `layout`.
    pub fn new(files: Vec<(File, u64)>, layout: Layout) -> Self {
        Self { files: Files::new(files), layout }
    }

    /// The file that holds the byte at `at`, where in it, and how many bytes follow there that also follow in the guest.
    pub(crate) fn place(&self, at: Physical) -> Option<(&File, u64, u64)> {
        let (offset, follow) = self.layout.find(at)?;
        let (file, within, in_file) = self.files.find(offset)?;
        Some((file, within, follow.min(in_file)))
    }

    /// The backends' files.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }
}

impl Ram for MachineRam {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, at: Physical, into: &mut [u8]) -> Result<(), RamError> {
        let len = into.len();
        let hole = RamError::Hole { at, len };
        let (mut from, mut rest) = (at, into);
        while !rest.is_empty() {
            let Some((file, within, follow)) = self.place(from) else { return Err(hole) };
            let now = usize::try_from(follow).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at_mut(now);
            file.read_exact_at(now, within).map_err(|source| RamError::Io { at: from, source })?;
            let Some(next) = from.checked_add(now.len() as u64) else { return Err(hole) };
            (from, rest) = (next, later);
        }
        Ok(())
    }

    fn is_untouched(&self, at: Physical, len: u64) -> bool {
        let place = self.place(at).filter(|(_, _, follow)| *follow >= len);
        place.is_some_and(|(file, within, _)| is_hole(file, within, len))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::ram::Block;

    fn block(start: u64, len: u64, file_offset: u64) -> Block {
        Block { start: Physical::new(start), len, file_offset }
    }

    #[test]
    fn a_read_goes_over_the_end_of_a_file() {
        let files = [1, 2].map(|byte| {
            let mut file = tempfile::tempfile().unwrap();
            // A file may be longer than its backend.
            file.write_all(&[byte; 0x3000]).unwrap();
            (file, 0x2000)
        });
        let layout = Layout::new(vec![block(0, 0x1000, 0), block(0x8000, 0x3000, 0x1000)]).unwrap();
        let ram = MachineRam::new(files.into(), layout);
        let mut bytes = [0; 4];
        ram.read(Physical::new(0x8ffe), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 1, 2, 2]);
        assert!(matches!(ram.read(Physical::new(0xaffe), &mut bytes), Err(RamError::Hole { .. })));
        assert!(ram.files.find(0x4000).is_none());
        assert_eq!(ram.files.bytes(), 0x4000);
    }

    #[test]
    fn a_read_crosses_touching_blocks_and_stops_at_holes() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 0x1000]).unwrap();
        file.write_all(&[2; 0x1000]).unwrap();
        let layout = Layout::new(vec![block(0x1000, 0x1000, 0), block(0, 0x1000, 0x1000)]).unwrap();
        let ram = MachineRam::new(vec![(file, 0x2000)], layout);
        let mut bytes = [0; 4];
        ram.read(Physical::new(0xffe), &mut bytes).unwrap();
        assert_eq!(bytes, [2, 2, 1, 1]);
        let past = ram.read(Physical::new(0x1ffe), &mut bytes);
        assert!(matches!(past, Err(RamError::Hole { at, len: 4 }) if at == Physical::new(0x1ffe)));
    }

    #[test]
    fn what_was_never_written_is_known_to_be_zeros() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(&[1], 3 << 20).unwrap();
        let layout = Layout::new(vec![block(1 << 32, 4 << 20, 0)]).unwrap();
        let ram = MachineRam::new(vec![(file, 4 << 20)], layout);
        let untouched =
            |piece: u64, len: u64| ram.is_untouched(Physical::new((1 << 32) + (piece << 20)), len << 20);
        assert_eq!([0, 1, 2, 3].map(|piece| untouched(piece, 1)), [true, true, true, false]);
        assert!(!untouched(2, 2) && !untouched(3, 2) && !ram.is_untouched(Physical::new(0), 1));
    }
}
