//! A machine's memory over the files of its backends.

use std::fs::File;
use std::os::unix::fs::FileExt;

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

impl MachineRam {
    /// `files` with the bytes that count of each; one after the other they hold the blocks of `layout`.
    pub fn new(files: Vec<(File, u64)>, layout: Layout) -> Self {
        Self { files: Files::new(files), layout }
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
            let Some((offset, follow)) = self.layout.find(from) else { return Err(hole) };
            let Some((file, within, in_file)) = self.files.find(offset) else { return Err(hole) };
            let now = usize::try_from(follow.min(in_file)).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at_mut(now);
            file.read_exact_at(now, within).map_err(|source| RamError::Io { at: from, source })?;
            let Some(next) = from.checked_add(now.len() as u64) else { return Err(hole) };
            (from, rest) = (next, later);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::ram::Block;

    #[test]
    fn a_read_goes_over_the_end_of_a_file() {
        let files = [1, 2].map(|byte| {
            let mut file = tempfile::tempfile().unwrap();
            // A file may be longer than its backend.
            file.write_all(&[byte; 0x3000]).unwrap();
            (file, 0x2000)
        });
        let block = |start, len, file_offset| Block { start: Physical::new(start), len, file_offset };
        let layout = Layout::new(vec![block(0, 0x1000, 0), block(0x8000, 0x3000, 0x1000)]).unwrap();
        let ram = MachineRam::new(files.into(), layout);
        let mut bytes = [0; 4];
        ram.read(Physical::new(0x8ffe), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 1, 2, 2]);
        assert!(matches!(ram.read(Physical::new(0xaffe), &mut bytes), Err(RamError::Hole { .. })));
        assert!(ram.files.find(0x4000).is_none());
        assert_eq!(ram.files.bytes(), 0x4000);
    }
}
