//! QEMU's migration stream, taken apart as it comes: pages of memory to one side, everything else to the other.
//!
//! ```text
//!   "QEVM", version 3 ─ configuration ─ START ram: sizes of blocks ─ PART ram: pages ... ─ FULL devices ... ─ EOF, description
//!                                       └──────── taken apart ─────────────────────────┘ └──── copied as it is ────┘
//! ```
//!
//! A machine whose memory is in files is restored from those files, so what is left without the pages of these files is a
//! stream that QEMU loads as any other: it never says that a page must come. Devices' states have no lengths, so they
//! cannot be parsed; they come after all of memory, and are copied to the end.
//!
//! Invariants: the stream may say anything: names, numbers of blocks, offsets and lengths are checked, and what is kept is
//! bounded. Sources: QEMU `migration/savevm.c`, `migration/ram.c`, `migration/qemu-file-types.h` (versions 6.0 to 10).

use std::io::{self, ErrorKind, Read};

use super::state::STATE_BYTES_MAX;
use crate::BoxError;
use crate::address::PAGE_BYTES;

const MAGIC: u32 = 0x5145_564d;
const VERSION: u32 = 3;
const SECTION_START: u8 = 1;
const SECTION_PART: u8 = 2;
const SECTION_END: u8 = 3;
const SECTION_FULL: u8 = 4;
const CONFIGURATION: u8 = 7;
const SECTION_FOOTER: u8 = 0x7e;
/// Flags in the low bits of a page's offset.
const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;
const FLAGS: u64 = PAGE_BYTES as u64 - 1;
/// Machines have some ten blocks of memory, and as many as they have backends.
const BLOCKS_MAX: usize = 4096;
/// Longest machine type.
const KIND_MAX: u32 = 256;

/// Why a stream was not taken apart.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// It broke off, or could not be read.
    #[error("QEMU's stream cannot be read")]
    Io(#[from] io::Error),
    /// It is not what QEMU writes, or of a kind that is not known.
    #[error("QEMU's stream is not understood: {what}")]
    Malformed {
        /// What was found.
        what: &'static str,
    },
    /// The taker of the pages failed.
    #[error("a page could not be stored")]
    Sink(#[source] BoxError),
}

/// A page of a block that the caller wants.
#[derive(Debug)]
pub struct StreamPage<'a> {
    /// What the caller calls the block.
    pub block: usize,
    /// The page's first byte in it.
    pub offset: u64,
    /// Its bytes.
    pub bytes: &'a [u8; PAGE_BYTES],
}

/// Where wanted pages go.
pub type PageSink<'a> = dyn FnMut(StreamPage<'_>) -> Result<(), BoxError> + 'a;

/// Reads a stream to its end. Pages of blocks for which `wanted` has a number go to `sink`; the rest of the stream is
/// returned, fit to be loaded by a QEMU that has those pages already.
///
/// # Errors
/// [`StreamError`]; what `sink` got by then is not to be used.
pub fn split(
    reader: impl Read,
    wanted: &dyn Fn(&str) -> Option<usize>,
    sink: &mut PageSink<'_>,
) -> Result<Vec<u8>, StreamError> {
    let mut splitter =
        Splitter { reader, wanted, sink, rest: Vec::new(), blocks: Vec::new(), last: None, ram: None };
    splitter.preamble()?;
    loop {
        let kind = splitter.u8()?;
        match kind {
            SECTION_START => splitter.start()?,
            SECTION_PART | SECTION_END => splitter.part()?,
            SECTION_FULL => break,
            _ => return Err(malformed("a section of unknown kind before the devices")),
        }
    }
    if splitter.ram.is_none() {
        return Err(malformed("devices before memory"));
    }
    splitter.devices()?;
    Ok(splitter.rest)
}

struct Splitter<'a, 'b, R> {
    reader: R,
    wanted: &'a dyn Fn(&str) -> Option<usize>,
    sink: &'a mut PageSink<'b>,
    /// What is read and not a wanted page.
    rest: Vec<u8>,
    blocks: Vec<Block>,
    /// Index of the block of the page before, which pages with [`CONTINUE`] are in; also in the next section.
    last: Option<usize>,
    /// The section of memory.
    ram: Option<u32>,
}

struct Block {
    name: String,
    bytes: u64,
    number: Option<usize>,
}

impl<R: Read> Splitter<'_, '_, R> {
    fn preamble(&mut self) -> Result<(), StreamError> {
        if self.u32()? != MAGIC || self.u32()? != VERSION {
            return Err(malformed("neither its magic number nor its version"));
        }
        if self.u8()? != CONFIGURATION {
            return Err(malformed("no configuration"));
        }
        let len = self.u32()?;
        if len > KIND_MAX {
            return Err(malformed("a machine type of any length"));
        }
        self.keep(u64::from(len)).map(drop)
    }

    /// The section that begins memory, and says how long its blocks are.
    fn start(&mut self) -> Result<(), StreamError> {
        let section = self.u32()?;
        let name = self.name()?;
        let (_instance, _version) = (self.u32()?, self.u32()?);
        if name != "ram" || self.ram.replace(section).is_some() {
            return Err(malformed("a device whose state comes in parts"));
        }
        let word = self.u64()?;
        if word & FLAGS != MEM_SIZE {
            return Err(malformed("memory without the sizes of its blocks"));
        }
        let mut left = word & !FLAGS;
        while left > 0 {
            let name = self.name()?;
            let bytes = self.u64()?;
            left = left.checked_sub(bytes).ok_or(malformed("blocks that are more than all memory"))?;
            if self.blocks.len() == BLOCKS_MAX || bytes & FLAGS != 0 || bytes == 0 {
                return Err(malformed("a block that is none"));
            }
            let number = (self.wanted)(&name);
            self.blocks.push(Block { name, bytes, number });
        }
        self.pages(section)
    }

    fn part(&mut self) -> Result<(), StreamError> {
        let section = self.u32()?;
        if self.ram != Some(section) {
            return Err(malformed("a part of an unknown section"));
        }
        self.pages(section)
    }

    /// Pages up to the end of a section, and its footer.
    fn pages(&mut self, section: u32) -> Result<(), StreamError> {
        loop {
            // Kept only if the page is not wanted.
            let word = u64::from_be_bytes(self.take()?);
            let (offset, flags) = (word & !FLAGS, word & FLAGS);
            match flags & !CONTINUE {
                EOS if flags == EOS => {
                    self.put(&word.to_be_bytes())?;
                    break;
                }
                ZERO | PAGE => self.page(offset, flags)?,
                _ => return Err(malformed("a page of unknown kind (compressed, or by several channels)")),
            }
        }
        if self.u8()? != SECTION_FOOTER || self.u32()? != section {
            return Err(malformed("a section without its footer"));
        }
        Ok(())
    }

    fn page(&mut self, offset: u64, flags: u64) -> Result<(), StreamError> {
        if flags & CONTINUE == 0 {
            let mut name = [0; 255];
            let [len] = self.take()?;
            let name = &mut name[..usize::from(len)];
            self.reader.read_exact(name)?;
            self.last = self.blocks.iter().position(|block| block.name.as_bytes() == name);
        }
        let index = self.last.ok_or(malformed("a page of an unknown block"))?;
        let block = &self.blocks[index];
        if offset >= block.bytes {
            return Err(malformed("a page past the end of its block"));
        }
        let number = block.number;
        let mut bytes = [0; PAGE_BYTES];
        let count = if flags & PAGE == 0 { 1 } else { PAGE_BYTES };
        self.reader.read_exact(&mut bytes[..count])?;
        if let Some(block) = number {
            let fill = bytes[0];
            bytes[count..].fill(fill);
            return (self.sink)(StreamPage { block, offset, bytes: &bytes }).map_err(StreamError::Sink);
        }
        // The page before may have been taken out, so each one that stays says its block.
        let name = std::mem::take(&mut self.blocks[index].name);
        let kept = self.put(&(offset | flags & !CONTINUE).to_be_bytes());
        let kept = kept.and_then(|()| self.put(&[name.len() as u8]));
        let kept = kept.and_then(|()| self.put(name.as_bytes())).and_then(|()| self.put(&bytes[..count]));
        self.blocks[index].name = name;
        kept
    }

    /// All that follows memory, to the end.
    fn devices(&mut self) -> Result<(), StreamError> {
        let before = self.rest.len() as u64;
        let room = STATE_BYTES_MAX.saturating_sub(before);
        (&mut self.reader).take(room + 1).read_to_end(&mut self.rest)?;
        if self.rest.len() as u64 > STATE_BYTES_MAX { Err(too_long()) } else { Ok(()) }
    }

    fn name(&mut self) -> Result<String, StreamError> {
        let len = self.u8()?;
        let bytes = self.keep(u64::from(len))?;
        String::from_utf8(bytes).map_err(|_| malformed("a name that is no text"))
    }

    fn u8(&mut self) -> Result<u8, StreamError> {
        let bytes: [u8; 1] = self.take()?;
        self.put(&bytes)?;
        Ok(bytes[0])
    }

    fn u32(&mut self) -> Result<u32, StreamError> {
        let bytes = self.take()?;
        self.put(&bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64, StreamError> {
        let bytes = self.take()?;
        self.put(&bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }

    fn take<const LEN: usize>(&mut self) -> Result<[u8; LEN], StreamError> {
        let mut bytes = [0; LEN];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads a few bytes that stay in the stream.
    fn keep(&mut self, len: u64) -> Result<Vec<u8>, StreamError> {
        let mut bytes = Vec::new();
        if (&mut self.reader).take(len).read_to_end(&mut bytes)? as u64 != len {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
        self.put(&bytes)?;
        Ok(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), StreamError> {
        if (self.rest.len() + bytes.len()) as u64 > STATE_BYTES_MAX {
            return Err(too_long());
        }
        self.rest.extend_from_slice(bytes);
        Ok(())
    }
}

const fn malformed(what: &'static str) -> StreamError {
    StreamError::Malformed { what }
}

const fn too_long() -> StreamError {
    malformed("more state than any machine's devices have")
}

#[cfg(test)]
mod tests;
