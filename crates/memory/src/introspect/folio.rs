//! Whether a folio of file cache is clean, and what then hides it: the rules of facts proved on Linux 5.10 to 7.3.
//!
//! Clean means: the content is what the disk has, no one is using it, and the kernel will read it again once the bits of the
//! [`Clear`]s are gone. Every condition that cannot be checked fails.

use super::mapping::FileCache;
use super::origin::FileSystem;
use super::shapes::{Buffers, Iomap, Shapes};
use super::view::View;
use crate::address::Virtual;
use crate::hide::Clear;

/// Buffers of one folio: 2 MiB of blocks of 512 bytes.
const BUFFERS_MAX: usize = 4096;
/// Bytes of a buffer head, as far as they are read.
const BUFFER_BYTES_MAX: usize = 256;
/// Bits of iomap state read: as many blocks, valid and dirty.
const STATE_WORDS_MAX: usize = 2 * BUFFERS_MAX / 64;

/// A block of a clean folio and where the disk has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    /// Bytes from the start of the folio.
    pub within: u64,
    /// Bytes from the start of the file system's device.
    pub on_device: u64,
    /// Bytes.
    pub len: u64,
}

/// What a folio's private data say; kept from folio to folio so that nothing is allocated for each.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// What hides the folio.
    pub clears: Vec<Clear>,
    /// Where its blocks lie, as far as known.
    pub placed: Vec<Placed>,
}

/// A folio that has passed every test of its struct pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Its first struct page.
    pub page: Virtual,
    /// Its `private`, if the flag says that there is one.
    pub private: Option<Virtual>,
    /// Bytes of it.
    pub bytes: u64,
    /// Its file.
    pub file: FileCache,
}

impl Findings {
    /// Fills `self` for a folio; `None` when something says that it is not clean, or is not understood.
    pub(super) fn fill(&mut self, view: &mut View<'_>, shapes: &Shapes, folio: Candidate) -> Option<()> {
        self.clears.clear();
        self.placed.clear();
        let flags = folio.page.checked_add(shapes.page.flags as u64)?;
        self.clear(view, flags, shapes.flags.uptodate)?;
        match (folio.private, folio.file.system) {
            (None, _) => Some(()),
            (Some(first), FileSystem::Ext4) => self.buffers(view, &shapes.buffers, folio, first),
            (Some(state), FileSystem::Xfs) => self.iomap(view, shapes.iomap.as_ref()?, folio, state),
        }
    }

    fn clear(&mut self, view: &mut View<'_>, at: Virtual, mask: u64) -> Option<()> {
        let (at, _) = view.translate(at).filter(|(at, _)| at.get().is_multiple_of(Clear::BYTES))?;
        self.clears.push(Clear { at, mask });
        Some(())
    }

    /// The ring of buffer heads: each of this folio, unused, in a harmless state; together as long as the folio.
    fn buffers(
        &mut self,
        view: &mut View<'_>,
        shape: &Buffers,
        folio: Candidate,
        first: Virtual,
    ) -> Option<()> {
        let (mut at, mut within, mut spare) = (first, 0_u64, [0; BUFFER_BYTES_MAX]);
        for _ in 0..BUFFERS_MAX {
            let bytes = view.object(at, &mut spare[..shape.size])?;
            let word = |at: usize| u64::from_le_bytes(bytes[at..][..8].try_into().expect("eight bytes"));
            let (state, next, block) = (word(shape.state), word(shape.next), word(shape.block));
            let unused = bytes[shape.count..][..4] == [0; 4];
            let own = word(shape.page) == folio.page.get() && word(shape.device) == folio.file.device.get();
            let len = word(shape.bytes);
            if state & !shape.harmless != 0 || !unused || !own || len != 1 << folio.file.block_bits {
                return None;
            }
            self.clear(view, at.checked_add(shape.state as u64)?, shape.uptodate)?;
            if state & shape.mapped != 0 {
                self.placed.push(Placed { within, on_device: block.checked_mul(len)?, len });
            }
            within += len;
            at = Virtual::new(next);
            if at == first {
                return (within == folio.bytes).then_some(());
            }
        }
        None
    }

    /// The bits of iomap: no transfer under way, nothing dirty.
    fn iomap(&mut self, view: &mut View<'_>, shape: &Iomap, folio: Candidate, state: Virtual) -> Option<()> {
        let pending = [shape.reading, shape.writing].map(|at| view.u32(state.checked_add(at as u64)?));
        let blocks = usize::try_from(folio.bytes >> folio.file.block_bits).ok()?;
        if pending != [Some(0), Some(0)] || !(1..=BUFFERS_MAX).contains(&blocks) {
            return None;
        }
        let runs = if shape.has_dirty { 2 } else { 1 };
        let bits = state.checked_add(shape.bits as u64)?;
        let mut words = [0; STATE_WORDS_MAX * 8];
        let words = &mut words[..(runs * blocks).div_ceil(64) * 8];
        view.read(bits, words)?;
        for (index, word) in words.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            let valid = low_bits(blocks.saturating_sub(index * 64));
            let both = low_bits((runs * blocks).saturating_sub(index * 64));
            if word & both & !valid != 0 {
                return None;
            }
            if valid != 0 {
                self.clear(view, bits.checked_add(index as u64 * 8)?, valid)?;
            }
        }
        Some(())
    }
}

/// The lowest `count` bits, or all.
fn low_bits(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}
