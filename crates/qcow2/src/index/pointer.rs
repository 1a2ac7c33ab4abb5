//! Pointers to pages, the checksums in them, and the inner pages of a tree.
//!
//! ```text
//!   byte 0             5 6       7 8             11 12            15
//!   ┌──────────────────┬──────────┬────────────────┬───────────────┐
//!   │ page number      │ layer    │ generation     │ CRC-32C       │
//!   └──────────────────┴──────────┴────────────────┴───────────────┘
//! ```
//!
//! The page number counts 4 KiB from the start of the file in which the layer keeps its index. Sixteen zero bytes say
//! that there is nothing below: no page, no entry of any layer.

use std::fmt;

use vmstrata_types::{HostOffset, LayerIndex};

use super::{FANOUT, IndexError, PAGE_LEN, Page, le, wrong};

/// Names a chain of layers; drawn at random when its first index is made.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChainId(pub [u8; 16]);

impl fmt::Debug for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Where a page lies, and what it must hold; see the module documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PagePointer {
    place: u64,
    seal: u64,
}

const PAGE_BITS: u32 = 48;
const PAGE_SHIFT: u32 = PAGE_LEN.trailing_zeros();

impl PagePointer {
    /// Bytes of a pointer.
    pub const LEN: usize = 16;
    /// Nothing below.
    pub const HOLE: Self = Self { place: 0, seal: 0 };

    /// A pointer to `page`, which lies at `at` in the file that holds the index of `layer`.
    ///
    /// # Panics
    /// When `at` is 0, no multiple of a page, or higher than any qcow2 file is long.
    pub fn new(chain: &ChainId, layer: LayerIndex, at: HostOffset, generation: u32, page: &Page) -> Self {
        let number = at.get() >> PAGE_SHIFT;
        let placed = number > 0 && number >> PAGE_BITS == 0 && at.get().is_multiple_of(PAGE_LEN as u64);
        assert!(placed, "an index page lies on a page boundary after the header");
        let place = u64::from(layer.get()) << PAGE_BITS | number;
        let crc = checksum(chain, place, generation, page);
        Self { place, seal: u64::from(crc) << 32 | u64::from(generation) }
    }

    /// Whether there is nothing below.
    pub const fn is_hole(self) -> bool {
        self.place == 0
    }

    /// The layer whose index has the page.
    pub const fn layer(self) -> LayerIndex {
        LayerIndex::new((self.place >> PAGE_BITS) as u16)
    }

    /// Where the page lies in that layer's file or sidecar.
    pub const fn at(self) -> HostOffset {
        HostOffset::new((self.place & ((1 << PAGE_BITS) - 1)) << PAGE_SHIFT)
    }

    /// Whether `page` is what the pointer was made for.
    ///
    /// # Errors
    /// [`IndexError::Checksum`] when it is not.
    pub fn check(self, chain: &ChainId, page: &Page, what: &'static str) -> Result<(), IndexError> {
        let (crc, generation) = ((self.seal >> 32) as u32, self.seal as u32);
        if checksum(chain, self.place, generation, page) == crc {
            Ok(())
        } else {
            Err(IndexError::Checksum { what })
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, IndexError> {
        let pointer = Self { place: le::u64(bytes, 0), seal: le::u64(bytes, 8) };
        if pointer.place & ((1 << PAGE_BITS) - 1) == 0 && pointer != Self::HOLE {
            return wrong("page number", 0u8);
        }
        Ok(pointer)
    }

    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.place.to_le_bytes());
        bytes[8..].copy_from_slice(&self.seal.to_le_bytes());
        bytes
    }
}

/// CRC-32C of chain, place and generation, then the page: the same bytes elsewhere, or of another time, do not match.
fn checksum(chain: &ChainId, place: u64, generation: u32, page: &Page) -> u32 {
    let crc = crc32c::crc32c(&chain.0);
    let crc = crc32c::crc32c_append(crc, &place.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &generation.to_le_bytes());
    crc32c::crc32c_append(crc, page)
}

/// The pointers of an inner page.
///
/// # Errors
/// A pointer that points nowhere.
pub fn decode_inner(page: &Page) -> Result<Box<[PagePointer; FANOUT]>, IndexError> {
    let mut pointers = Box::new([PagePointer::HOLE; FANOUT]);
    for (pointer, bytes) in pointers.iter_mut().zip(page.chunks_exact(PagePointer::LEN)) {
        *pointer = PagePointer::from_bytes(bytes)?;
    }
    Ok(pointers)
}

/// An inner page of these pointers; what follows them are holes.
///
/// # Panics
/// When there are more than [`FANOUT`].
pub fn encode_inner(pointers: &[PagePointer]) -> Box<Page> {
    assert!(pointers.len() <= FANOUT, "an inner page has room for {FANOUT}");
    let mut page = Box::new([0; PAGE_LEN]);
    for (bytes, pointer) in page.chunks_exact_mut(PagePointer::LEN).zip(pointers) {
        bytes.copy_from_slice(&pointer.to_bytes());
    }
    page
}
