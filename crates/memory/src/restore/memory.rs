//! A snapshot's memory, put into the files of a machine's backends, with what was lost hidden from the guest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::clears::Clears;
use super::error::RestoreError;
use crate::address::{Frame, PAGE_BYTES};
use crate::capture::MachineRam;
use crate::hide::Hiding;
use crate::ram::Ram;
use crate::refill::Refiller;
use crate::vault::{Snapshot, Want};

/// What was put into files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// Pages with bytes.
    pub pages: u64,
    /// Of those, clean pages whose bytes came from the guest's disks.
    pub refilled: u64,
    /// Clean pages that are lost or were left out, and are hidden from the guest.
    pub hidden: u64,
}

/// Fills `files`, which hold the machine's backends in order, with so many bytes each, all zeros. Clean pages that the
/// snapshot does not give come from `refill`, if there is one.
///
/// # Errors
/// When a page that the guest needs is lost, a lost clean page cannot be hidden, or a file cannot be written.
pub fn fill(
    snapshot: &Snapshot,
    want: Want,
    refill: Option<&Refiller<'_>>,
    files: Vec<(File, u64)>,
) -> Result<Filled, RestoreError> {
    let memory = Memory(MachineRam::new(files, snapshot.info().layout.clone()));
    let pages = std::sync::atomic::AtomicU64::new(0);
    let write = |frame, bytes: &[[u8; PAGE_BYTES]]| {
        pages.fetch_add(bytes.len() as u64, std::sync::atomic::Ordering::Relaxed);
        memory.write(frame, bytes.as_flattened())
    };
    let absent = snapshot.stream(want, write)?;
    let lost = match refill {
        Some(refill) => {
            refill.pages(&absent, None, |frame, page| write(frame, std::slice::from_ref(page)))?
        }
        None => absent.clone(),
    };
    if !lost.is_empty() {
        // What hides a page lies in others, which are all there now.
        memory.hide(snapshot.hiding()?, &lost)?;
    }
    let (refilled, hidden) = ((absent.len() - lost.len()) as u64, lost.len() as u64);
    Ok(Filled { pages: pages.into_inner(), refilled, hidden })
}

/// The memory of a machine that does not run yet.
#[derive(Debug)]
struct Memory(MachineRam);

impl Memory {
    /// Puts pages to their places; a file may end between two of them.
    fn write(&self, frame: Frame, mut bytes: &[u8]) -> io::Result<()> {
        let nowhere = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut at = frame.start().ok_or_else(nowhere)?;
        while !bytes.is_empty() {
            let (file, within, follow) = self.0.place(at).ok_or_else(nowhere)?;
            let len = usize::try_from(follow).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(len);
            file.write_all_at(now, within)?;
            (bytes, at) = (later, at.checked_add(len as u64).ok_or_else(nowhere)?);
        }
        Ok(())
    }

    /// Clears the bits that tell the guest that it has a page. All critical pages must be in place.
    ///
    /// Page by page, not word by word: a guest full of cache has millions of such words, dozens in a page.
    fn hide(&self, hiding: &Hiding, lost: &[Frame]) -> Result<(), RestoreError> {
        let clears = Clears::hiding(self.0.layout(), hiding, lost)?;
        for number in clears.pages() {
            let found = self
                .0
                .files()
                .find(number * PAGE_BYTES as u64)
                .filter(|(_, _, follow)| *follow >= PAGE_BYTES as u64);
            let (file, at, _) = found.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
            clears.apply_to(number, file, at)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Physical;
    use crate::hide::Clear;
    use crate::ram::{Block, Layout};

    fn memory() -> (Memory, File) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x3000).unwrap();
        let handle = file.try_clone().unwrap();
        let block = Block { start: Physical::new(0x10_0000), len: 0x3000, file_offset: 0 };
        let layout = Layout::new(vec![block]).unwrap();
        (Memory(MachineRam::new(vec![(handle, 0x3000)], layout)), file)
    }

    #[test]
    fn hiding_clears_the_bits_of_a_mask_and_no_others() {
        let (memory, file) = memory();
        memory.write(Frame::new(0x101), &[0xff; PAGE_BYTES]).unwrap();
        let clear = |at, mask| Clear { at: Physical::new(at), mask };
        let clears = [clear(0x10_1008, 0x8000_0000_0000_0004), clear(0x10_1020, 1)];
        let hiding = [(Frame::new(0x102), clears)].into_iter().collect();
        memory.hide(&hiding, &[Frame::new(0x102)]).unwrap();
        let mut word = [0; 8];
        file.read_exact_at(&mut word, 0x1008).unwrap();
        assert_eq!(u64::from_le_bytes(word), 0x7fff_ffff_ffff_fffb);
        file.read_exact_at(&mut word, 0x1020).unwrap();
        assert_eq!(u64::from_le_bytes(word), 0xffff_ffff_ffff_fffe);
        file.read_exact_at(&mut word, 0x1010).unwrap();
        assert_eq!(u64::from_le_bytes(word), u64::MAX);
    }

    #[test]
    fn pages_are_written_over_the_ends_of_files_and_blocks() {
        let files = [0x1000, 0x2000].map(|bytes| (tempfile::tempfile().unwrap(), bytes));
        let handles = files.each_ref().map(|(file, _)| file.try_clone().unwrap());
        let block = |start, len, file_offset| Block { start: Physical::new(start), len, file_offset };
        let layout = Layout::new(vec![block(0, 0x2000, 0), block(0x2000, 0x1000, 0x2000)]).unwrap();
        let memory = Memory(MachineRam::new(files.into(), layout));
        let bytes = [1, 2, 3].map(|byte| [byte; PAGE_BYTES]);
        memory.write(Frame::new(0), bytes.as_flattened()).unwrap();
        let read = |file: &File, len| {
            let mut read = vec![0; len];
            file.read_exact_at(&mut read, 0).unwrap();
            read
        };
        assert_eq!(read(&handles[0], PAGE_BYTES), bytes[0]);
        assert_eq!(read(&handles[1], 2 * PAGE_BYTES), bytes[1..].as_flattened());
        memory.write(Frame::new(2), bytes.as_flattened()).unwrap_err();
    }

    #[test]
    fn a_lost_page_that_nothing_hides_is_an_error() {
        let (memory, _file) = memory();
        let frame = Frame::new(0x102);
        let refused = |hiding: &Hiding| matches!(memory.hide(hiding, &[frame]), Err(RestoreError::Unhidden { frame: named }) if named == frame);
        assert!(refused(&Hiding::default()));
        for at in [0x10_3000, 0x10_2ffc, 0] {
            let clear = Clear { at: Physical::new(at), mask: 1 };
            assert!(refused(&[(frame, [clear])].into_iter().collect()), "{at:#x}");
        }
    }
}
