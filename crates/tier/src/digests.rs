//! Digests of an object's chunks, which prove a part of it without the rest.
//!
//! ```text
//!                 BLAKE3 of the object, in the head
//!                  /                 \
//!                ·                    \
//!            /       \                 \
//!        chunk 0   chunk 1   ···   last chunk      stored beside the object
//! ```
//!
//! BLAKE3 is a tree: hashes of its subtrees of [`CHUNK`] bytes make that of the whole. So the list needs no signature of its own,
//! and an object that is shipped or read back is hashed once for both.

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use blake3::{Hash, Hasher};

use crate::head::{Object, ObjectId};

/// Bytes of a chunk: at 1 Gbit/s they take 2 ms, which is less than the way to a far repository and back.
pub(crate) const CHUNK: u64 = 256 << 10;
/// Bytes of a digest.
const LEN: usize = blake3::OUT_LEN;

/// What proves a chunk.
pub(crate) type Digest = [u8; LEN];

/// Those of all chunks of an object, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Digests {
    chunks: Vec<Digest>,
    /// Bytes of the object.
    bytes: u64,
}

impl Digests {
    /// Bytes of the list for an object of so many bytes.
    pub(crate) fn encoded_len(bytes: u64) -> u64 {
        bytes.div_ceil(CHUNK).saturating_mul(LEN as u64)
    }

    /// Bytes of the object.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The BLAKE3 of the object.
    fn root(&self) -> Hash {
        match &self.chunks[..] {
            [] => blake3::hash(&[]),
            [only] => Hash::from_bytes(*only),
            chunks => {
                let (left, right) = halves(chunks);
                merge_subtrees_root(&merge(left), &merge(right), Mode::Hash)
            }
        }
    }

    /// The layer with this id and these bytes.
    pub(crate) fn object(&self, id: ObjectId, stored: u64, zeros: u64) -> Object {
        Object { id, bytes: self.bytes, blake3: self.root(), stored, zeros }
    }

    /// The bytes of the list.
    pub(crate) fn encode(&self) -> Vec<u8> {
        self.chunks.concat()
    }

    /// The list for `object` from its bytes; `None` if they are not that.
    pub(crate) fn decode(bytes: &[u8], object: &Object) -> Option<Self> {
        let (chunks, rest) = bytes.as_chunks::<LEN>();
        let digests = Self { chunks: chunks.to_vec(), bytes: object.bytes };
        let is_list = rest.is_empty() && bytes.len() as u64 == Self::encoded_len(object.bytes);
        (is_list && digests.root() == object.blake3).then_some(digests)
    }

    /// Whether these are the bytes of the chunk with this number.
    ///
    /// # Panics
    /// When the object has no such chunk.
    pub(crate) fn prove(&self, number: usize, bytes: &[u8]) -> bool {
        let is_whole = bytes.len() as u64 == CHUNK.min(self.bytes - number as u64 * CHUNK);
        is_whole && digest_of(number, bytes, self.chunks.len() == 1) == self.chunks[number]
    }
}

/// The digest of the chunk with this number.
fn digest_of(number: usize, bytes: &[u8], is_only: bool) -> Digest {
    digest(Hasher::new().set_input_offset(number as u64 * CHUNK).update(bytes), is_only)
}

/// Whether these are the bytes of a chunk that has this digest, and that others follow.
pub(crate) fn proves(wanted: &Digest, number: usize, bytes: &[u8]) -> bool {
    digest_of(number, bytes, false) == *wanted
}

/// The digest of a chunk; that of an only one is the root of the tree.
fn digest(hasher: &Hasher, is_only: bool) -> Digest {
    if is_only { hasher.finalize().into() } else { hasher.finalize_non_root() }
}

/// The tree of BLAKE3: on the left the largest power of two that leaves something for the right.
fn halves(chunks: &[Digest]) -> (&[Digest], &[Digest]) {
    chunks.split_at(chunks.len().next_power_of_two() / 2)
}

fn merge(chunks: &[Digest]) -> Digest {
    if let [only] = chunks {
        return *only;
    }
    let (left, right) = halves(chunks);
    merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
}

/// Makes the digests of an object that comes from front to back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Digester {
    /// Those of the chunks before the last.
    chunks: Vec<Digest>,
    /// Of the last chunk; not empty, unless the object is.
    last: Hasher,
}

impl Digester {
    /// Adds bytes at the end.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.last.count() == CHUNK {
                self.chunks.push(digest(&self.last, false));
                self.last = Hasher::new();
                self.last.set_input_offset(self.chunks.len() as u64 * CHUNK);
            }
            let (now, later) = bytes.split_at(bytes.len().min((CHUNK - self.last.count()) as usize));
            self.last.update(now);
            bytes = later;
        }
    }

    /// Those of the chunks that others follow.
    pub(crate) fn complete(&self) -> &[Digest] {
        &self.chunks
    }

    /// The digests of what was added.
    pub(crate) fn finish(mut self) -> Digests {
        let (before, last) = (self.chunks.len(), self.last.count());
        if last > 0 {
            self.chunks.push(digest(&self.last, before == 0));
        }
        Digests { chunks: self.chunks, bytes: before as u64 * CHUNK + last }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;
    use crate::head::ObjectId;

    fn digests(bytes: &[u8], piece: usize) -> Digests {
        let mut digester = Digester::default();
        bytes.chunks(piece).for_each(|piece| digester.update(piece));
        digester.finish()
    }

    fn object(bytes: &[u8]) -> Object {
        let (id, blake3) = (ObjectId::draw(), blake3::hash(bytes));
        Object { id, bytes: bytes.len() as u64, blake3, stored: 0, zeros: 0 }
    }

    #[test]
    fn digests_of_chunks_make_the_hash_of_the_whole() {
        let chunk = CHUNK as usize;
        let mut bytes = vec![0; 9 * chunk + 1];
        SmallRng::seed_from_u64(7).fill(&mut bytes[..]);
        for len in
            [0, 1, 1024, 1025, chunk - 1, chunk, chunk + 1, 2 * chunk, 5 * chunk, 8 * chunk, 9 * chunk + 1]
        {
            let bytes = &bytes[..len];
            let found = digests(bytes, 100_000);
            assert_eq!((found.root(), found.bytes), (blake3::hash(bytes), len as u64), "{len} bytes");
            assert_eq!(
                Digests::decode(&found.encode(), &object(bytes)).as_ref(),
                Some(&found),
                "{len} bytes"
            );
            for (number, bytes) in bytes.chunks(chunk).enumerate() {
                assert!(found.prove(number, bytes), "chunk {number} of {len} bytes");
            }
        }
    }

    #[test]
    fn changed_chunks_and_lists_prove_nothing() {
        let mut bytes = vec![7; 3 * CHUNK as usize];
        bytes[CHUNK as usize] = 8;
        let found = digests(&bytes, 1 << 20);
        let chunk = &mut bytes[..CHUNK as usize];
        assert!(!found.prove(1, chunk), "the bytes of another chunk");
        assert!(!found.prove(0, &chunk[1..]) && !found.prove(0, &[]), "a part of it");
        chunk[4000] ^= 1;
        assert!(!found.prove(0, chunk));
        chunk[4000] ^= 1;
        let (object, list) = (object(&bytes), found.encode());
        for at in 0..list.len() {
            let mut changed = list.clone();
            changed[at] ^= 1;
            assert_eq!(Digests::decode(&changed, &object), None);
            assert_eq!(Digests::decode(&list[..at], &object), None);
        }
    }
}
