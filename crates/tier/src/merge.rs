//! Merges of layers in a repository, which keep a disk's chain, and what is dead in it, bounded.
//!
//! ```text
//!   base ◄─ 1 ◄─ 2 ◄─ 3 ◄─ 4        head: base 1 2 3 4
//!             ◄─ M                  M says what 2, 3 and 4 say, and stands on 1; meanwhile 5 and 6 are published
//!             ◄─ M ◄─ N             N says what 5 and 6 say, and stands on M
//!   base ◄─ 1 ◄─ M ◄─ N             head: base 1 M N, the same epoch
//! ```
//!
//! A layer names the one below it, and never changes. So a merge always takes all layers from one on, up to the newest; those that are
//! published meanwhile are merged in turn, onto the result, until none is left. Then one head names the new layers. Nothing takes the name
//! of anything else: who reads the old layers goes on, and a merge that is given up or comes late leaves layers that no head names.
//!
//! Which layers: **all**, when those above the base take nearly as much room as the base has bytes that are not dead for sure. Else, when there are
//! more than [`LAYERS_MAX`], the fewest above which is not much: the newest ones, [`MERGED_MIN`] at least, such that the layer below is half as
//! large as all of them. So layers that are merged together are of one size, and a byte is written again once for about 24 times as many layers.

use vmstrata_store::Planted;

use crate::head::{Object, ObjectId};

/// The most layers of a chain when no merge is under way.
pub const LAYERS_MAX: usize = 80;
/// The least that are merged.
const MERGED_MIN: usize = 24;
/// Less than this above a base is left alone.
const SMALL_BYTES: u64 = 64 << 20;

/// A merge that is under way. See the module documentation.
#[derive(Clone, Debug)]
pub struct Merge {
    /// How many layers lie below.
    from: usize,
    /// They, and the results.
    into: Vec<Object>,
    /// How many layers of the chain these stand for.
    done: usize,
}

impl Merge {
    /// The merge that this chain needs.
    pub fn due(chain: &[Object]) -> Option<Self> {
        first_merged(chain).map(|from| Self::new(chain, from))
    }

    /// The merge of all layers from this one on.
    ///
    /// # Panics
    /// When the chain has no such layer.
    pub fn new(chain: &[Object], from: usize) -> Self {
        assert!(from < chain.len(), "layer {from} of {}", chain.len());
        Self { from, into: chain[..from].to_vec(), done: from }
    }

    /// The merge onto the layers `into`, of which the last stands for the first `done` layers of the chain together with those below it.
    ///
    /// # Panics
    /// Without a layer.
    pub(crate) fn onto(into: Vec<Object>, done: usize) -> Self {
        Self { from: into.len() - 1, into, done }
    }

    /// The layers that are to become one now, lowest first: none when the merge is complete.
    pub fn left<'a>(&self, chain: &'a [Object]) -> &'a [Object] {
        let is_planted = Planted::Unmerged.is_there() && self.done > self.from;
        &chain[if is_planted { chain.len() } else { self.done }..]
    }

    /// What the next result stands on; without, it holds all of the disk.
    pub fn below(&self) -> Option<ObjectId> {
        self.into.last().map(|object| object.id)
    }

    /// So many of the layers that were left are in `result`.
    pub fn merged(&mut self, layers: usize, result: Object) {
        self.done += layers;
        self.into.push(result);
    }

    /// The results so far, for a merge that is given up.
    pub fn results(&self) -> &[Object] {
        &self.into[self.from..]
    }

    /// The chain in place of the one whose layers it all has merged.
    ///
    /// # Panics
    /// When layers are left.
    pub fn finish(self, chain: &[Object]) -> Vec<Object> {
        assert!(self.left(chain).is_empty(), "{} layers are left", self.left(chain).len());
        self.into
    }
}

fn first_merged(chain: &[Object]) -> Option<usize> {
    let (base, above) = chain.split_first()?;
    let stored = |layers: &[Object]| layers.iter().map(|layer| layer.stored).sum::<u64>();
    let zeros: u64 = above.iter().map(|layer| layer.zeros).fold(0, u64::saturating_add);
    let dead = stored(above).saturating_add(zeros.saturating_mul(2));
    // A tenth is left for what comes in while the base is merged.
    if !above.is_empty() && dead >= (base.stored - base.stored / 10).max(SMALL_BYTES) {
        return Some(0);
    }
    if chain.len() <= LAYERS_MAX {
        return None;
    }
    let is_first = |from: &usize| chain[from - 1].stored >= stored(&chain[*from..]) / 2;
    Some((1..=chain.len() - MERGED_MIN).rev().find(is_first).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;
    use crate::dense;

    const EPOCH_S: u64 = 30;
    const KEEP_MS: u64 = 600_000;
    /// What a repository on a wire of 1 Gbit/s takes.
    const BYTES_A_SECOND: u64 = 100 << 20;

    fn object(stored: u64, zeros: u64) -> Object {
        Object { id: ObjectId::draw(), bytes: stored, stored, blake3: blake3::hash(b""), zeros }
    }

    fn first(stored: &[u64]) -> Option<usize> {
        let chain: Vec<Object> = stored.iter().map(|stored| object(*stored, 0)).collect();
        first_merged(&chain)
    }

    #[test]
    fn a_chain_is_merged_whole_when_what_is_above_the_base_may_hide_it() {
        assert_eq!(first(&[]), None);
        assert_eq!(first(&[0, SMALL_BYTES - 1]), None);
        assert_eq!(first(&[0, SMALL_BYTES]), Some(0));
        assert_eq!(first(&[10 << 30, 4 << 30, (5 << 30) - 1]), None);
        assert_eq!(first(&[10 << 30, 4 << 30, 5 << 30]), Some(0));
        let discarded = [object(1 << 40, 0), object(4096, 1 << 39)];
        assert_eq!(first_merged(&discarded), Some(0));
        assert_eq!(first_merged(&[object(0, 0), object(0, u64::MAX), object(0, u64::MAX)]), Some(0));
    }

    #[test]
    fn a_long_chain_is_merged_from_the_layer_above_one_that_is_not_small() {
        let chain = |large: usize| {
            let mut chain = vec![1 << 50];
            chain.resize(1 + large, 1 << 30);
            chain.resize(LAYERS_MAX, 1 << 20);
            chain
        };
        assert_eq!(first(&chain(0)), None);
        for large in [0, 1, 10, LAYERS_MAX - MERGED_MIN - 1] {
            let mut chain = chain(large);
            chain.push(1 << 20);
            assert_eq!(first(&chain), Some(if large == 0 { 1 } else { 1 + large }), "{large}");
        }
        // Of equal layers, the least.
        let mut equal = vec![1 << 50];
        equal.resize(LAYERS_MAX + 1, 1 << 20);
        equal[LAYERS_MAX - MERGED_MIN] = 1 << 40;
        assert_eq!(first(&equal), Some(LAYERS_MAX - MERGED_MIN + 1));
    }

    /// A disk under random writes, the layers of which are bitmaps of its blocks.
    struct Model {
        bytes_a_second: u64,
        chain: Vec<Object>,
        data: Vec<Vec<u32>>,
        merge: Option<(Merge, Vec<Vec<u32>>)>,
        /// A layer that is being written: how many it holds, until when.
        writing: Option<(usize, Vec<u32>, u64)>,
        /// Layers that no new head names, since when.
        trash: Vec<(u64, u64)>,
        shipped: u64,
        written: u64,
    }

    impl Model {
        fn write(&mut self, layers: usize, now_ms: u64) {
            let from = self.data.len() - layers;
            let mut data = vec![0; self.data[0].len()];
            for layer in &self.data[from..] {
                data.iter_mut().zip(layer).for_each(|(all, one)| *all |= one);
            }
            let bytes = dense::stored_bytes(&data);
            self.written += bytes;
            self.writing = Some((layers, data, now_ms + bytes * 1000 / self.bytes_a_second));
        }

        /// Goes on merging, up to a moment.
        fn merge(&mut self, mut now_ms: u64, until_ms: u64) {
            loop {
                if self.merge.is_none() {
                    let Some(due) = Merge::due(&self.chain) else { return };
                    self.merge = Some((due, Vec::new()));
                }
                if let Some((layers, data, done_ms)) = self.writing.take() {
                    if done_ms > until_ms {
                        self.writing = Some((layers, data, done_ms));
                        return;
                    }
                    now_ms = now_ms.max(done_ms);
                    let (merge, results) = self.merge.as_mut().unwrap();
                    merge.merged(layers, object(dense::stored_bytes(&data), 0));
                    results.push(data);
                }
                let (merge, _) = self.merge.as_ref().unwrap();
                match merge.left(&self.chain).len() {
                    0 => {
                        let (merge, results) = self.merge.take().unwrap();
                        let chain = merge.finish(&self.chain);
                        let from = chain.len() - results.len();
                        self.trash.extend(self.chain[from..].iter().map(|object| (object.stored, now_ms)));
                        self.data.truncate(from);
                        self.data.extend(results);
                        self.chain = chain;
                    }
                    left => self.write(left, now_ms),
                }
            }
        }
    }

    /// Writes 2,000 blocks of 4 KiB a second to random places of 50 GiB, for so many hours; or both less by a factor.
    fn random_writes(hours: u64, less: u64) {
        let (clusters, writes) = ((50u64 << 30) / (128 << 10) / less, 2000 * EPOCH_S / less);
        let mut random = SmallRng::seed_from_u64(7);
        let base = vec![u32::MAX; clusters as usize];
        let live = dense::stored_bytes(&base);
        let mut model = Model {
            bytes_a_second: BYTES_A_SECOND / less,
            chain: vec![object(live, 0)],
            data: vec![base],
            merge: None,
            writing: None,
            trash: Vec::new(),
            shipped: 0,
            written: 0,
        };
        let (mut longest, mut most, mut most_with_trash) = (0, 0, 0);
        for epoch in 0..hours * 3600 / EPOCH_S {
            let mut data = vec![0u32; clusters as usize];
            for _ in 0..writes {
                let block = random.random_range(0..clusters * 32);
                data[(block / 32) as usize] |= 1 << (block % 32);
            }
            let bytes = dense::stored_bytes(&data);
            model.shipped += bytes;
            model.written += bytes;
            model.chain.push(object(bytes, 0));
            model.data.push(data);
            longest = longest.max(model.chain.len());
            let now_ms = epoch * EPOCH_S * 1000;
            model.trash.retain(|(_, since)| since + KEEP_MS > now_ms);
            model.merge(now_ms, now_ms + EPOCH_S * 1000);
            let space: u64 = model.chain.iter().map(|object| object.stored).sum();
            let results =
                model.merge.iter().flat_map(|(merge, _)| merge.results()).map(|object| object.stored);
            let trash: u64 =
                model.trash.iter().map(|(stored, _)| stored).chain(results.collect::<Vec<_>>().iter()).sum();
            most = most.max(space);
            most_with_trash = most_with_trash.max(space + trash);
        }
        let times = |bytes: u64, of: u64| bytes as f64 / of as f64;
        let (written, space) = (times(model.written, model.shipped), times(most, live));
        println!(
            "written {written:.2} times what was shipped; chain of {longest}; space {space:.2} times what is live"
        );
        println!("with trash and results of merges {:.2} times", times(most_with_trash, live));
        assert!(written <= 3.0 && longest <= 100, "{written} times, chain of {longest}");
        assert!(space <= 2.0, "{space} times what is live");
    }

    #[test]
    fn a_day_of_random_writes_is_written_three_times_at_most() {
        random_writes(24, 40);
    }

    /// As above, over 50 GiB.
    #[test]
    #[ignore = "minutes"]
    fn a_day_of_random_writes_to_a_large_disk_is_written_three_times_at_most() {
        random_writes(24, 1);
    }
}
