//! What lies beside a layer: the digests of its chunks, and its tables once more, packed.
//!
//! ```text
//!   ID.meta    digests of all chunks │ chunk 0 │ chunk 1 │ ···     those that hold tables: each its length, 4 bytes, and zstd
//! ```
//!
//! Tables are nearly all zeros, and lie in one piece at the beginning of a dense layer. Whoever opens a chain needs the tables of all layers, and gets them by
//! reading one small object a layer, many at a time. Where they lack, or are wrong, the layer has them.

use crate::digests::{CHUNK, Digests};
use crate::head::Object;

/// The most bytes of packed tables; those that follow are read from the layer.
const TABLES_BYTES_MAX: usize = 16 << 20;
/// Packs zeros well at the speed of memory.
const LEVEL: i32 = 1;

/// See the module documentation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Companion {
    pub(crate) digests: Digests,
    /// The first chunks, packed.
    tables: Vec<Vec<u8>>,
}

impl Companion {
    pub(crate) fn new(digests: Digests, tables: Vec<Vec<u8>>) -> Self {
        Self { digests, tables }
    }

    /// The most bytes of the companion of a layer of so many bytes.
    pub(crate) fn encoded_len_max(bytes: u64) -> u64 {
        Digests::encoded_len(bytes).saturating_add(TABLES_BYTES_MAX as u64)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.digests.encode();
        for packed in &self.tables {
            bytes.extend_from_slice(&len_of(packed).to_le_bytes());
            bytes.extend_from_slice(packed);
        }
        bytes
    }

    /// The companion of `object` from its bytes; `None` if they are not that.
    pub(crate) fn decode(bytes: &[u8], object: &Object) -> Option<Self> {
        let digests = usize::try_from(Digests::encoded_len(object.bytes)).ok()?;
        let (digests, mut rest) = bytes.split_at_checked(digests)?;
        let digests = Digests::decode(digests, object)?;
        let mut tables = Vec::new();
        while let Some((len, more)) = rest.split_first_chunk() {
            let (packed, more) = more.split_at_checked(u32::from_le_bytes(*len) as usize)?;
            tables.push(packed.to_vec());
            rest = more;
        }
        rest.is_empty().then_some(Self { digests, tables })
    }

    /// How many chunks of the layer it has, from the first on.
    pub(crate) fn chunks(&self) -> usize {
        self.tables.len()
    }

    /// Unpacks a chunk; whether it has that, and it is the layer's.
    pub(crate) fn unpack(&self, chunk: usize, into: &mut [u8]) -> bool {
        let Some(packed) = self.tables.get(chunk) else { return false };
        matches!(zstd::bulk::decompress_to_buffer(packed, into), Ok(len) if len == into.len())
            && self.digests.prove(chunk, into)
    }
}

fn len_of(packed: &[u8]) -> u32 {
    u32::try_from(packed.len()).expect("less than a chunk and a few bytes")
}

/// Packs tables that come from front to back.
#[derive(Debug, Default)]
pub(crate) struct Packer {
    tables: Vec<Vec<u8>>,
    /// Bytes of those.
    packed: usize,
    /// What came of the next chunk.
    next: Vec<u8>,
}

impl Packer {
    /// Adds bytes at the end.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.packed < TABLES_BYTES_MAX {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK as usize - self.next.len()));
            self.next.extend_from_slice(now);
            bytes = later;
            if self.next.len() == CHUNK as usize {
                let packed = zstd::bulk::compress(&self.next, LEVEL).expect("memory for a chunk");
                self.packed = self.packed.saturating_add(size_of::<u32>() + packed.len());
                if self.packed <= TABLES_BYTES_MAX {
                    self.tables.push(packed);
                }
                self.next.clear();
            }
        }
    }

    /// The chunks that were filled.
    pub(crate) fn finish(self) -> Vec<Vec<u8>> {
        self.tables
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;
    use crate::digests::Digester;
    use crate::head::ObjectId;

    /// A layer of two chunks of tables and one of data, and its companion.
    fn layer() -> (Vec<u8>, Object, Companion) {
        let chunk = CHUNK as usize;
        let mut bytes = vec![0; 3 * chunk];
        (bytes[7], bytes[chunk + 70_000]) = (1, 2);
        SmallRng::seed_from_u64(7).fill(&mut bytes[2 * chunk..]);
        let (mut digester, mut packer) = (Digester::default(), Packer::default());
        digester.update(&bytes);
        bytes[..2 * chunk].chunks(100_000).for_each(|piece| packer.update(piece));
        let companion = Companion::new(digester.finish(), packer.finish());
        let object = companion.digests.object(ObjectId::draw(), 0, 0);
        (bytes, object, companion)
    }

    #[test]
    fn tables_take_little_room_and_come_back() {
        let (bytes, object, companion) = layer();
        let encoded = companion.encode();
        assert!(encoded.len() < 300, "{}", encoded.len());
        let read = Companion::decode(&encoded, &object).unwrap();
        assert_eq!((&read, read.chunks()), (&companion, 2));
        let mut chunk = vec![9; CHUNK as usize];
        for (number, expected) in bytes.chunks(CHUNK as usize).take(2).enumerate() {
            assert!(read.unpack(number, &mut chunk) && chunk == expected, "chunk {number}");
        }
        assert!(!read.unpack(2, &mut chunk));
    }

    #[test]
    fn a_companion_that_was_changed_is_none_or_lacks_chunks() {
        let (bytes, object, companion) = layer();
        let encoded = companion.encode();
        let mut chunk = vec![0; CHUNK as usize];
        for at in 0..encoded.len() {
            let mut changed = encoded.clone();
            changed[at] ^= 1;
            for read in
                [&changed[..], &encoded[..at]].into_iter().filter_map(|read| Companion::decode(read, &object))
            {
                for (number, expected) in bytes.chunks(CHUNK as usize).enumerate() {
                    assert!(
                        !read.unpack(number, &mut chunk) || chunk == expected,
                        "byte {at}, chunk {number}"
                    );
                }
            }
        }
    }

    #[test]
    fn tables_past_the_most_are_left_out() {
        let mut packer = Packer::default();
        let mut random = SmallRng::seed_from_u64(7);
        let mut chunk = vec![0; CHUNK as usize];
        for _ in 0..100 {
            random.fill(&mut chunk[..]);
            packer.update(&chunk);
        }
        let tables = packer.finish();
        let bytes: usize = tables.iter().map(Vec::len).sum();
        assert!(
            (63..64).contains(&tables.len()) && bytes <= TABLES_BYTES_MAX,
            "{} chunks, {bytes} bytes",
            tables.len()
        );
    }
}
