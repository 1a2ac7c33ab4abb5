//! A copy of a guest's memory in this process, made while the guest is held still and read at leisure afterwards.
//!
//! The copy is made twice: once while the guest still runs, so that the host's pages for it are there and those of the guest
//! are not in swap, and once in the pause, when it counts. What the backends' files have no page for is skipped: there the
//! copy is zero, and takes no memory: the host's making of pages takes as long as copying into them. (Huge pages would be
//! made faster, but were measured slower on a virtual machine, whose own host has to make them first.)

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmstrata_store::on_threads;

use super::error::CaptureError;
use super::memory::{Files, MachineRam, is_hole};
use crate::address::{PAGE_BYTES, Physical};
use crate::ram::{Layout, Ram, RamError};

/// Bytes copied at once.
const CHUNK: usize = 1 << 20;
/// More threads do not use more of a host's memory bandwidth.
const THREADS_MAX: usize = 8;

/// A guest's memory as it was at one instant.
#[derive(Debug)]
pub(super) struct StillRam {
    bytes: Vec<u8>,
    /// `[chunk]`: whether it may have bytes other than zeros.
    is_used: Vec<bool>,
    layout: Layout,
}

impl StillRam {
    /// Room for a copy of `ram`, filled once with what `ram` has now.
    ///
    /// # Errors
    /// [`CaptureError::Memory`] when the host has no room.
    pub(super) fn prepare(ram: &MachineRam) -> Result<Self, CaptureError> {
        let mut copy = Self::blank(ram.layout().clone(), ram.files().bytes())?;
        copy.fill(ram)?;
        Ok(copy)
    }

    /// Room for `bytes` bytes of memory, all zero.
    ///
    /// # Errors
    /// [`CaptureError::Memory`] when the host has no room.
    pub(super) fn blank(layout: Layout, bytes: u64) -> Result<Self, CaptureError> {
        let none = CaptureError::Memory { bytes };
        let Ok(len) = usize::try_from(bytes) else { return Err(none) };
        if available().is_some_and(|there| there < bytes) {
            return Err(none);
        }
        // Zeroed by the kernel, page by page, when it is first touched.
        let bytes = vec![0; len];
        Ok(Self { bytes, is_used: vec![false; len.div_ceil(CHUNK)], layout })
    }

    /// Puts a page to its place among the backends' bytes; `None` past their end. Zeros stay untouched memory.
    pub(super) fn put(&mut self, offset: u64, page: &[u8; PAGE_BYTES]) -> Option<()> {
        let start = usize::try_from(offset).ok()?;
        let into = self.bytes.get_mut(start..start.checked_add(PAGE_BYTES)?)?;
        if *page != [0; PAGE_BYTES] {
            into.copy_from_slice(page);
            self.is_used[start / CHUNK] = true;
        }
        Some(())
    }

    /// Copies all of `ram` as it is now.
    pub(super) fn fill(&mut self, ram: &MachineRam) -> Result<(), CaptureError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let chunks: Vec<_> =
            self.bytes.chunks_mut(CHUNK).zip(&mut self.is_used).map(Mutex::new).enumerate().collect();
        let next = AtomicUsize::new(0);
        let copy_some = || -> io::Result<()> {
            while let Some((index, chunk)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                let (into, is_used) = &mut *chunk.try_lock().expect("each chunk is taken once");
                read_chunk(ram.files(), (index * CHUNK) as u64, into, is_used)?;
            }
            Ok(())
        };
        let copied: io::Result<()> = on_threads(threads, copy_some).into_iter().collect();
        copied.map_err(|source| RamError::Io { at: Physical::new(0), source }.into())
    }
}

impl Ram for StillRam {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, at: Physical, into: &mut [u8]) -> Result<(), RamError> {
        let len = into.len();
        let hole = || RamError::Hole { at, len };
        let (mut from, mut rest) = (at, into);
        while !rest.is_empty() {
            let (offset, follow) = self.layout.find(from).ok_or_else(hole)?;
            let count = rest.len().min(usize::try_from(follow).unwrap_or(usize::MAX));
            let (now, later) = rest.split_at_mut(count);
            let start = usize::try_from(offset).map_err(|_| hole())?;
            now.copy_from_slice(self.bytes.get(start..start + count).ok_or_else(hole)?);
            from = from.checked_add(count as u64).ok_or_else(hole)?;
            rest = later;
        }
        Ok(())
    }

    fn bytes(&self, at: Physical, len: usize) -> Option<&[u8]> {
        let (offset, follow) = self.layout.find(at)?;
        let start = usize::try_from(offset).ok()?;
        (follow >= len as u64).then(|| self.bytes.get(start..start.checked_add(len)?)).flatten()
    }
}

/// Fills a chunk from `offset` on, over the ends of files; what a file has no page for is zero.
fn read_chunk(files: &Files, offset: u64, into: &mut [u8], is_used: &mut bool) -> io::Result<()> {
    let (mut offset, mut rest, was_used) = (offset, into, *is_used);
    while !rest.is_empty() {
        let (file, within, follow) = files.find(offset).ok_or(io::ErrorKind::UnexpectedEof)?;
        let count = rest.len().min(usize::try_from(follow).unwrap_or(usize::MAX));
        let (now, later) = rest.split_at_mut(count);
        if !is_hole(file, within, count as u64) {
            *is_used = true;
            file.read_exact_at(now, within)?;
        } else if was_used {
            now.fill(0);
        }
        (offset, rest) = (offset + count as u64, later);
    }
    Ok(())
}

/// Bytes of memory that the host can give without pushing others out.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::Block;

    #[test]
    fn a_copy_is_what_the_memory_was_when_it_was_last_filled() {
        let file = tempfile::tempfile().unwrap();
        let len = 5 * CHUNK as u64 + 0x1000;
        file.set_len(len).unwrap();
        file.write_all_at(b"before", 3 * CHUNK as u64).unwrap();
        let block = Block { start: Physical::new(0), len, file_offset: 0 };
        let handle = file.try_clone().unwrap();
        let ram = MachineRam::new(vec![(handle, len)], Layout::new(vec![block]).unwrap());
        let mut copy = StillRam::prepare(&ram).unwrap();
        let at = Physical::new(3 * CHUNK as u64);
        let mut bytes = [0; 6];
        copy.read(at, &mut bytes).unwrap();
        assert_eq!(&bytes, b"before");
        file.write_all_at(b"after!", 3 * CHUNK as u64).unwrap();
        copy.read(at, &mut bytes).unwrap();
        assert_eq!(&bytes, b"before");
        copy.fill(&ram).unwrap();
        copy.read(at, &mut bytes).unwrap();
        assert_eq!(&bytes, b"after!");
        assert_eq!((copy.bytes(at, 6), copy.bytes(Physical::new(len - 3), 6)), (Some(&b"after!"[..]), None));
        // A page that was given back meanwhile is zero, not what it was before.
        file.set_len(3 * CHUNK as u64).unwrap();
        file.set_len(len).unwrap();
        copy.fill(&ram).unwrap();
        copy.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
        assert!(matches!(copy.read(Physical::new(len - 3), &mut bytes), Err(RamError::Hole { .. })));
    }
}
