//! The allocator against a naive model: a map from cluster to refcount.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vmstrata_qcow2::{CreateOptions, new_image};
use vmstrata_store::MemoryStore;

use super::*;

#[derive(Clone, Debug)]
enum Operation {
    Allocate(u64),
    /// As an I/O thread does: one cluster, or none where that takes a read.
    AllocateAtOnce,
    /// Frees this one of the runs that are held, modulo their number.
    Free(usize),
    /// As a clean close does.
    Release,
    /// Everything in memory is lost; what is claimed stays claimed.
    Reopen,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let one = prop_oneof![
        6 => (1u64..150).prop_map(Operation::Allocate),
        6 => Just(Operation::AllocateAtOnce),
        3 => any::<usize>().prop_map(Operation::Free),
        1 => Just(Operation::Release),
        1 => Just(Operation::Reopen),
    ];
    prop::collection::vec(one, 1..120)
}

struct Bench {
    store: Arc<MemoryStore>,
    header: Header,
    alloc: Allocator,
    /// Clusters in use, by what: metadata of the new image, and runs handed out.
    held: Vec<Range<u64>>,
    used: BTreeMap<u64, u64>,
}

fn open(store: &Arc<MemoryStore>) -> (Header, Allocator) {
    let bytes = store.to_vec();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let store: Arc<dyn Store> = Arc::clone(store) as _;
    let flusher = Arc::new(Flusher::new(Arc::clone(&store)));
    let alloc = Allocator::open(store, flusher, &header, std::iter::empty(), bytes.len() as u64).unwrap();
    (header, alloc)
}

impl Bench {
    fn new(bits: u32, order: u32) -> Self {
        let options = CreateOptions {
            cluster_bits: ClusterBits::new(bits).unwrap(),
            refcount_order: RefcountOrder::new(order).unwrap(),
            ..CreateOptions::new(1 << 20)
        };
        let image = new_image(&options).unwrap();
        let store = Arc::new(MemoryStore::new());
        for (at, bytes) in &image.parts {
            store.write_all(bytes, *at).unwrap();
        }
        store.set_len(image.file_len).unwrap();
        let (header, alloc) = open(&store);
        // The refcount structures are the allocator's own business: it moves its table.
        let own = Self::own(&alloc);
        let clusters = image.file_len >> bits;
        let used =
            (0..clusters).filter(|cluster| !own.contains(cluster)).map(|cluster| (cluster, 1)).collect();
        Self { store, header, alloc, held: Vec::new(), used }
    }

    fn bits(&self) -> ClusterBits {
        self.header.cluster_bits
    }

    fn allocate(&mut self, clusters: u64) {
        let got = self.alloc.allocate(clusters).unwrap();
        self.use_up(got, clusters);
    }

    fn allocate_at_once(&mut self) {
        if let Some(got) = self.alloc.try_allocate() {
            self.use_up(got, 1);
        }
    }

    fn use_up(&mut self, got: Allocated, clusters: u64) {
        assert!((1..=clusters).contains(&got.clusters) && got.at.is_aligned(self.bits()));
        let first = got.at.get() >> self.bits().get();
        let len = (got.clusters << self.bits().get()) as usize;
        let mut bytes = vec![0xEE; len];
        self.store.read_padded(&mut bytes, got.at).unwrap();
        assert!(!got.zeroed || bytes.iter().all(|&byte| byte == 0), "said to be zeros, and is not");
        for cluster in first..first + got.clusters {
            assert!(self.used.insert(cluster, 1).is_none(), "cluster {cluster} was handed out twice");
        }
        self.store.write_all(&vec![0xDD; len], got.at).unwrap();
        self.held.push(first..first + got.clusters);
    }

    fn free(&mut self, which: usize) {
        if self.held.is_empty() {
            return;
        }
        let run = self.held.swap_remove(which % self.held.len());
        let bits = self.bits().get();
        self.alloc.free(HostOffset::new(run.start << bits), (run.end - run.start) << bits).unwrap();
        run.for_each(|cluster| assert_eq!(self.used.remove(&cluster), Some(1)));
    }

    /// Everything in use counts as used, and in the image too; structures that the allocator made for itself do not
    /// lie on anything in use.
    fn verify(&self) {
        let (_, fresh) = open(&self.store);
        for &cluster in self.used.keys() {
            let at = HostOffset::new(cluster << self.bits().get());
            assert_eq!(self.alloc.refcount(at).unwrap(), 1, "cluster {cluster} in memory");
            assert_eq!(fresh.refcount(at).unwrap(), 1, "cluster {cluster} in the image");
        }
        for run in &self.held {
            let mut bytes = vec![0; ((run.end - run.start) << self.bits().get()) as usize];
            self.store.read_exact(&mut bytes, HostOffset::new(run.start << self.bits().get())).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0xDD), "clusters {run:?} were written over");
        }
    }

    /// Clusters that count as used in the image.
    fn counted(&self) -> u64 {
        let (_, fresh) = open(&self.store);
        let clusters = self.store.to_vec().len() as u64 >> self.bits().get();
        let at = |cluster: u64| HostOffset::new(cluster << self.bits().get());
        (0..clusters + 8).filter(|&cluster| fresh.refcount(at(cluster)).unwrap() > 0).count() as u64
    }

    /// Clusters of the refcount table and blocks.
    fn own(alloc: &Allocator) -> BTreeSet<u64> {
        let state = alloc.state.lock();
        let bits = alloc.bits.get();
        let table = state.table_at.get() >> bits;
        let blocks = state.table.iter().flatten().map(|at| at.get() >> bits);
        blocks.chain(table..table + ((state.table.len() as u64 * 8) >> bits)).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn nothing_is_handed_out_twice_and_the_image_counts_all_that_is(
        bits in prop::sample::select(vec![9u32, 10, 12]),
        order in 0u32..=6,
        operations in operations(),
    ) {
        let mut bench = Bench::new(bits, order);
        for operation in operations {
            match operation {
                Operation::Allocate(clusters) => bench.allocate(clusters),
                Operation::AllocateAtOnce => bench.allocate_at_once(),
                Operation::Free(which) => bench.free(which),
                Operation::Release => bench.alloc.release_claimed().unwrap(),
                Operation::Reopen => {
                    bench.alloc.release_claimed().unwrap();
                    (bench.header, bench.alloc) = open(&bench.store);
                }
            }
        }
        bench.verify();
        bench.alloc.release_claimed().unwrap();
        bench.verify();
        let own = Bench::own(&bench.alloc);
        prop_assert!(own.iter().all(|cluster| !bench.used.contains_key(cluster)), "refcounts lie on data");
        prop_assert_eq!(bench.counted(), (bench.used.len() + own.len()) as u64, "leaked, or not counted");
    }
}

#[test]
fn a_cluster_is_had_at_once_wherever_its_refcounts_are_in_memory() {
    let mut bench = Bench::new(12, 4);
    assert!(bench.alloc.try_allocate().is_none(), "nothing has been read");
    bench.allocate(1);
    let per_block = bench.alloc.entries_per_block() as usize;
    let before = bench.held.len();
    (0..per_block).for_each(|_| bench.allocate_at_once());
    let got = bench.held.len() - before;
    assert!((per_block / 2..per_block).contains(&got), "up to the end of the block, not further: {got}");
    assert!(bench.alloc.try_allocate().is_none(), "the next block is yet to be made");
    bench.allocate(1);
    bench.allocate_at_once();
    assert_eq!(bench.held.len(), before + got + 2);
    bench.verify();
}
