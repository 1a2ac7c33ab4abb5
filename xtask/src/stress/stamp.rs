//! What a sector holds: zeros, or its own number and the value that was written to it, from end to end.
//!
//! ```text
//!   sector 7, value 4711:  7 4711 7 4711 ... (32 pairs of little-endian 64-bit words)
//! ```
//!
//! A sector that is neither was torn, holds another sector's data, or was never written by this program.

use std::fmt;

/// Bytes of a sector, the unit that is judged.
pub(super) const SECTOR: usize = 512;
/// Bytes of one pair of words.
const PAIR: usize = 16;

/// What a sector was written with. Values written by the load are larger the later they were drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Value(pub(super) u64);

impl Value {
    /// The value of a sector of zeros.
    pub(super) const ZEROS: Self = Self(0);
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ZEROS { f.write_str("zeros") } else { write!(f, "{}", self.0) }
    }
}

/// What a sector was found to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// One value throughout, and the sector's own number.
    Value(Value),
    /// One stamp throughout, of another sector.
    Elsewhere { sector: u64, value: Value },
    /// Several stamps, or none at all: the pairs that differ from the one before, the first few of them.
    Torn(Vec<(u64, u64)>),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(value) => write!(f, "{value}"),
            Self::Elsewhere { sector, value } => write!(f, "value {value} of sector {sector}"),
            Self::Torn(pairs) => write!(f, "no whole stamp, but (sector, value) {pairs:?}"),
        }
    }
}

/// Fills `bytes` with `value`, the first of them belonging to `sector`.
pub(super) fn fill(bytes: &mut [u8], sector: u64, value: Value) {
    if value == Value::ZEROS {
        return bytes.fill(0);
    }
    for (number, bytes) in (sector..).zip(bytes.chunks_mut(SECTOR)) {
        let mut pair = [0; PAIR];
        pair[..8].copy_from_slice(&number.to_le_bytes());
        pair[8..].copy_from_slice(&value.0.to_le_bytes());
        bytes.chunks_mut(PAIR).for_each(|chunk| chunk.copy_from_slice(&pair));
    }
}

/// The words of a sector.
pub(super) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
}

/// Reads the stamp of one sector.
pub(super) fn read(bytes: &[u8], sector: u64) -> Found {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let pair = |bytes: &[u8]| (word(&bytes[..8]), word(&bytes[8..]));
    let first = pair(&bytes[..PAIR]);
    if bytes.chunks(PAIR).any(|chunk| pair(chunk) != first) {
        let mut pairs: Vec<(u64, u64)> = bytes.chunks(PAIR).map(pair).collect();
        pairs.dedup();
        pairs.truncate(4);
        return Found::Torn(pairs);
    }
    match first {
        (0, 0) => Found::Value(Value::ZEROS),
        (_, 0) => Found::Torn(vec![first]),
        (number, value) if number == sector => Found::Value(Value(value)),
        (number, value) => Found::Elsewhere { sector: number, value: Value(value) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_reads_back_and_names_what_is_wrong_with_it() {
        let mut bytes = vec![0; 2 * SECTOR];
        fill(&mut bytes, 7, Value(4711));
        assert_eq!(read(&bytes[..SECTOR], 7), Found::Value(Value(4711)));
        assert_eq!(read(&bytes[SECTOR..], 8), Found::Value(Value(4711)));
        assert_eq!(read(&bytes[SECTOR..], 9), Found::Elsewhere { sector: 8, value: Value(4711) });
        fill(&mut bytes[..SECTOR], 7, Value::ZEROS);
        assert_eq!(read(&bytes[..SECTOR], 7), Found::Value(Value::ZEROS));
        fill(&mut bytes[..PAIR], 7, Value(1));
        assert_eq!(read(&bytes[..SECTOR], 7), Found::Torn(vec![(7, 1), (0, 0)]));
    }

    #[test]
    fn sector_0_is_told_from_zeros() {
        let mut bytes = vec![0; SECTOR];
        fill(&mut bytes, 0, Value(3));
        assert_eq!(read(&bytes, 0), Found::Value(Value(3)));
    }
}
