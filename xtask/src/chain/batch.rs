//! Sequential output to a file in large writes, so that small clusters do not cost a system call each.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::Result;

/// Bytes gathered before they are written.
const BATCH: usize = 1 << 20;

/// Consecutive bytes of a file, gathered into large writes.
pub(super) struct Batch {
    file: File,
    start: u64,
    bytes: Vec<u8>,
}

impl Batch {
    /// Bytes that go to `start` and on.
    pub(super) fn new(file: File, start: u64) -> Self {
        Self { file, start, bytes: Vec::with_capacity(2 * BATCH) }
    }

    /// Where the next byte goes.
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Room for the next `len` bytes, zeroed.
    pub(super) fn reserve(&mut self, len: usize) -> Result<&mut [u8]> {
        if self.bytes.len() >= BATCH {
            self.write()?;
        }
        let from = self.bytes.len();
        self.bytes.resize(from + len, 0);
        Ok(&mut self.bytes[from..])
    }

    /// Drops the last `len` bytes reserved.
    pub(super) fn take_back(&mut self, len: usize) {
        self.bytes.truncate(self.bytes.len() - len);
    }

    fn write(&mut self) -> Result<()> {
        self.file.write_all_at(&self.bytes, self.start)?;
        self.start = self.end();
        self.bytes.clear();
        Ok(())
    }

    /// Writes what is left; returns where it ended.
    pub(super) fn finish(mut self) -> Result<u64> {
        self.write()?;
        Ok(self.start)
    }
}
