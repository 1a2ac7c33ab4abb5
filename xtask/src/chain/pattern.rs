//! Data that says where it belongs.
//!
//! Every 64 bytes hold a magic number, their own guest offset, the layer that wrote them, the seed, and four
//! words mixed from these. A reader that knows the chain's plan can therefore judge any sector alone, and a
//! wrong one tells which layer it came from. Half of the words compress well and half do not at all, so a
//! deflated cluster is about half its size.
//!
//! All words are little-endian.

use std::fmt;

/// Bytes that carry one record.
pub const LINE: usize = 64;

/// The smallest unit a disk hands out, and the unit of verification.
pub const SECTOR: usize = 512;

const MAGIC: u64 = u64::from_le_bytes(*b"vmstrata");

/// Whose data it is: the layer's index in the chain, or a writer of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Writer(u32);

impl Writer {
    /// The data of a layer of the chain.
    pub const fn layer(index: u16) -> Self {
        Self(index as u32)
    }

    /// Data written through an export, `round` telling one pass over the disk from another.
    pub const fn client(round: u16) -> Self {
        Self(0x1_0000 | round as u32)
    }
}

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 0x1_0000 {
            write!(f, "layer {}", self.0)
        } else {
            write!(f, "client round {}", self.0 & 0xffff)
        }
    }
}

/// A well-spread 64-bit function of `x` (the finaliser of SplitMix64).
pub const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn line(at: u64, writer: Writer, seed: u64) -> [u64; 8] {
    let noise = mix(at ^ seed.rotate_left(32) ^ ((writer.0 as u64) << 48));
    [
        MAGIC,
        at,
        writer.0 as u64,
        seed,
        noise,
        noise.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        noise.rotate_left(23) ^ at,
        !noise.wrapping_mul(0xd6e8_feb8_6659_fd93),
    ]
}

/// Fills `buf` with what `writer` writes at guest offset `at`.
///
/// # Panics
/// When `at` or the length is not a multiple of 64.
pub fn fill(buf: &mut [u8], at: u64, writer: Writer, seed: u64) {
    assert!(
        at.is_multiple_of(LINE as u64) && buf.len().is_multiple_of(LINE),
        "patterns come in lines of 64 bytes"
    );
    for (index, chunk) in buf.chunks_exact_mut(LINE).enumerate() {
        let words = line(at + (index * LINE) as u64, writer, seed);
        for (bytes, word) in chunk.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Why data is not what it should be.
#[derive(Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Guest offset of the first wrong line.
    pub at: u64,
    /// What was expected there; `None` stands for zeros.
    pub expected: Option<Writer>,
    /// What the bytes say of themselves.
    pub found: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at guest offset {:#x}: expected ", self.at)?;
        match self.expected {
            Some(writer) => write!(f, "{writer}")?,
            None => write!(f, "zeros")?,
        }
        write!(f, ", found {}", self.found)
    }
}

impl std::error::Error for Mismatch {}

/// Checks that `buf`, read at guest offset `at`, is what `expected` wrote (`None`: zeros).
///
/// # Errors
/// The first line that differs.
///
/// # Panics
/// When `at` or the length is not a multiple of 64.
pub fn check(buf: &[u8], at: u64, expected: Option<Writer>, seed: u64) -> Result<(), Mismatch> {
    assert!(
        at.is_multiple_of(LINE as u64) && buf.len().is_multiple_of(LINE),
        "patterns come in lines of 64 bytes"
    );
    for (index, chunk) in buf.chunks_exact(LINE).enumerate() {
        let at = at + (index * LINE) as u64;
        let words = expected.map_or([0; 8], |writer| line(at, writer, seed));
        let same = chunk.chunks_exact(8).zip(words).all(|(bytes, word)| bytes == word.to_le_bytes());
        if !same {
            return Err(Mismatch { at, expected, found: describe(chunk, seed) });
        }
    }
    Ok(())
}

fn describe(chunk: &[u8], seed: u64) -> String {
    let words: Vec<u64> =
        chunk.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes"))).collect();
    if words.iter().all(|word| *word == 0) {
        return "zeros".into();
    }
    match words[..] {
        [MAGIC, at, writer, its_seed, ..] if writer <= 0x1_ffff => {
            let whole =
                if words == line(at, Writer(writer as u32), its_seed) { "" } else { "a torn line of " };
            let other = if its_seed == seed { "" } else { ", of another seed" };
            format!("{whole}{} for offset {at:#x}{other}", Writer(writer as u32))
        }
        _ => format!("foreign bytes {:02x?}...", &chunk[..16]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_filled_is_accepted_and_nothing_else() {
        let mut buf = vec![0; 4096];
        fill(&mut buf, 0x1_0000, Writer::layer(3), 7);
        assert_eq!(check(&buf, 0x1_0000, Some(Writer::layer(3)), 7), Ok(()));
        assert!(check(&buf, 0x1_1000, Some(Writer::layer(3)), 7).is_err(), "another place");
        assert!(check(&buf, 0x1_0000, Some(Writer::layer(4)), 7).is_err(), "another layer");
        assert!(check(&buf, 0x1_0000, Some(Writer::layer(3)), 8).is_err(), "another seed");
        assert!(check(&buf, 0x1_0000, None, 7).is_err(), "data where zeros belong");
    }

    #[test]
    fn one_flipped_bit_is_found_anywhere() {
        let mut buf = vec![0; SECTOR];
        fill(&mut buf, 512, Writer::client(1), 9);
        for at in 0..buf.len() {
            buf[at] ^= 0x10;
            let error = check(&buf, 512, Some(Writer::client(1)), 9).unwrap_err();
            assert_eq!(error.at, 512 + (at / LINE * LINE) as u64);
            buf[at] ^= 0x10;
        }
    }

    #[test]
    fn a_mismatch_names_the_layer_that_was_read_instead() {
        let mut buf = vec![0; SECTOR];
        fill(&mut buf, 1024, Writer::layer(2), 5);
        let error = check(&buf, 1024, Some(Writer::layer(9)), 5).unwrap_err();
        assert_eq!(error.found, "layer 2 for offset 0x400");
        assert!(check(&[0; 64], 0, Some(Writer::layer(0)), 5).unwrap_err().found.contains("zeros"));
    }
}
