//! A model of journal, pending changes and image: whatever is written, discarded, committed and refused, a killed process
//! loses nothing that completed.
//!
//! A sequence runs on an image in memory over a base in memory, through the same [`Layers`] that serve guests. Journals meet
//! full file systems, failing and torn writes; the base cannot be read for a while; processes are killed between two
//! operations, or between two writes of one. What the next process finds must be what the model allows, block by block, and
//! the image must be free of corruption before and after.
//!
//! `VMSTRATA_SEQUENCES=N` runs so many, `VMSTRATA_SEED=N` begins with that one.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use vmstrata_qcow2::{CreateOptions, RawEntry, new_image};
use vmstrata_store::{
    Effect, Fault, FaultPlan, FaultStore, FileId, FileIdentity, Gate, MemoryStore, OperationKind, Segment,
    Store, StoreId, When,
};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, HostOffset};

use crate::active::session::leave_clean;
use crate::chain::{Unflushed, open_layer};
use crate::disk::open_top;
use crate::layers::{Layers, Top, index_of};
use crate::map::FrozenMap;
use crate::zero::Purpose;
use crate::{Format, Opened, Opener, ResourceOptions, Resources, Role};

/// Blocks of the disk: each holds one number.
const BLOCK: u64 = 32;
/// Clusters of the disk. With those of 512 bytes they need three L2 tables.
const CLUSTERS: u64 = 136;
/// Of those, as many are used: what is done meets.
const USED: u64 = 12;

const IMAGE: StoreId = StoreId(0);
const JOURNAL: StoreId = StoreId(1);
const NO_SPACE: i32 = 28;
const IO: i32 = 5;

/// The files of one sequence.
#[derive(Debug)]
struct Files {
    image: Mutex<Arc<MemoryStore>>,
    halves: Mutex<[Arc<MemoryStore>; 2]>,
    base: Arc<Base>,
    /// Bytes that the halves together may have.
    quota: AtomicU64,
    plan: Mutex<Arc<FaultPlan>>,
}

/// The base, which cannot be read for a while. One for all sequences.
#[derive(Debug)]
struct Base {
    bytes: MemoryStore,
    fails: AtomicBool,
}

impl Store for Base {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(IO));
        }
        self.bytes.read_segments(segments, at)
    }
    fn write_segments(&self, _segments: &[Segment<'_>], _at: HostOffset) -> io::Result<()> {
        panic!("a frozen layer is written")
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn punch_hole(&self, _at: HostOffset, _len: u64) -> io::Result<()> {
        panic!("a frozen layer is written")
    }
    fn len(&self) -> io::Result<u64> {
        self.bytes.len()
    }
    fn set_len(&self, _len: u64) -> io::Result<()> {
        panic!("a frozen layer is written")
    }
}

/// Half of a journal on a file system that may be full.
#[derive(Debug)]
struct Half {
    bytes: Arc<MemoryStore>,
    other: Arc<MemoryStore>,
    files: Arc<Files>,
}

impl Store for Half {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.bytes.read_segments(segments, at)
    }
    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        let end = at.get() + vmstrata_store::total_len(segments) as u64;
        let grows = end > self.bytes.len()?;
        if grows && end + self.other.len()? > self.files.quota.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(NO_SPACE));
        }
        self.bytes.write_segments(segments, at)
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn punch_hole(&self, _at: HostOffset, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn len(&self) -> io::Result<u64> {
        self.bytes.len()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes.set_len(len)
    }
}

#[derive(Debug)]
struct MemoryFiles(Mutex<Option<Arc<Files>>>);

impl Opener for MemoryFiles {
    fn open(&self, path: &Path, role: Role, _gate: &Gate) -> crate::Result<Opened> {
        let files = Arc::clone(self.0.lock().as_ref().expect("a sequence runs"));
        let name = path.file_name().unwrap().to_str().unwrap();
        let opened = |ino, store: Arc<dyn Store>, faults: Option<StoreId>| {
            let len = store.len().unwrap();
            let identity = FileIdentity { file: FileId { dev: 1, ino }, len, mtime_ns: 1, ctime_ns: 1 };
            let store = match faults {
                Some(id) => Arc::new(FaultStore::new(store, &files.plan.lock(), id)),
                None => store,
            };
            Ok(Opened { store, identity })
        };
        match (role, name) {
            (Role::Journal, _) => {
                let [first, second] = files.halves.lock().clone();
                let (bytes, other) =
                    if name.ends_with(".0.journal") { (first, second) } else { (second, first) };
                opened(3, Arc::new(Half { bytes, other, files: Arc::clone(&files) }), Some(JOURNAL))
            }
            (_, "image") => opened(1, Arc::clone(&*files.image.lock()) as _, Some(IMAGE)),
            (_, "base") => opened(2, Arc::clone(&files.base) as _, None),
            _ => panic!("{name} is opened as {role:?}"),
        }
    }
}

/// What blocks may hold.
#[derive(Debug)]
struct Model {
    bits: ClusterBits,
    /// `[block]`: more than one after a request that failed.
    allowed: Vec<BTreeSet<u32>>,
    last: u32,
}

/// What a block holds of which nothing was written to the active layer.
fn of_base(block: usize) -> u32 {
    0x8000_0000 | block as u32
}

impl Model {
    fn blocks(&self, at: u64, len: u64) -> std::ops::Range<usize> {
        (at / BLOCK) as usize..((at + len) / BLOCK) as usize
    }

    /// A request that completes, or fails, makes these blocks `value`.
    fn put(&mut self, blocks: std::ops::Range<usize>, value: u32, completes: bool) {
        for allowed in &mut self.allowed[blocks] {
            if completes {
                allowed.clear();
            }
            allowed.insert(value);
        }
    }

    fn cluster_blocks(&self, cluster: u64) -> std::ops::Range<usize> {
        self.blocks(cluster << self.bits.get(), self.bits.size())
    }
}

/// The steps of a sequence, printed when it fails.
type Log = Arc<Mutex<Vec<String>>>;

/// The process that serves the disk.
struct World {
    files: Arc<Files>,
    layers: Layers,
    model: Model,
    random: SmallRng,
    log: Log,
}

struct Shared {
    opener: Arc<MemoryFiles>,
    resources: Arc<Resources>,
    map: RefCell<Option<Arc<FrozenMap>>>,
    empty: Vec<u8>,
    base: Arc<Base>,
    bits: ClusterBits,
    subclusters: bool,
}

impl Shared {
    fn new(bits: u32, subclusters: bool) -> Self {
        let bits = ClusterBits::new(bits).unwrap();
        let size = CLUSTERS << bits.get();
        let opener = Arc::new(MemoryFiles(Mutex::new(None)));
        let options = ResourceOptions {
            metadata_cache_bytes: 0,
            max_open_files: 16,
            workers: 1,
            journal_dir: Some(std::env::temp_dir()),
        };
        let resources = Resources::with_opener(options, Arc::clone(&opener) as _);
        let options = CreateOptions { cluster_bits: bits, subclusters, ..CreateOptions::new(size) };
        let image = new_image(&options).unwrap();
        let mut empty = vec![0; image.file_len as usize];
        for (at, bytes) in &image.parts {
            empty[at.get() as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        let base = (0..size / BLOCK).flat_map(|block| of_base(block as usize).to_le_bytes().repeat(8));
        let base =
            Arc::new(Base { bytes: MemoryStore::from_vec(base.collect()), fails: AtomicBool::new(false) });
        Self { opener, resources, map: RefCell::default(), empty, base, bits, subclusters }
    }

    /// The base as a map: one for all sequences.
    fn map(&self) -> Arc<FrozenMap> {
        let mut map = self.map.borrow_mut();
        let made = map.get_or_insert_with(|| {
            let opener = &**self.resources.files().opener();
            let base =
                open_layer(Path::new("base"), Role::Frozen, Some(Format::Raw), &Gate::unrestricted(), opener);
            let layer = crate::loading::freeze(base.unwrap(), &self.resources);
            self.resources.share_map(vec![layer], None).unwrap()
        });
        Arc::clone(made)
    }

    fn open(&self, unflushed: Unflushed) -> crate::Result<Layers> {
        let map = self.map();
        let opener = &**self.resources.files().opener();
        let role = Role::Active(vmstrata_store::CacheMode::Host);
        let top = open_layer(Path::new("image"), role, Some(Format::Qcow2), &Gate::unrestricted(), opener)?;
        let size = top.size;
        let top = open_top(top, (index_of(1), unflushed), &self.resources)?;
        Ok(Layers::new(size, top, Some(map), &self.resources))
    }

    fn world(&self, seed: u64, log: &Log) -> World {
        let files = Arc::new(Files {
            image: Mutex::new(Arc::new(MemoryStore::from_vec(self.empty.clone()))),
            halves: Mutex::default(),
            base: Arc::clone(&self.base),
            quota: AtomicU64::new(u64::MAX),
            plan: Mutex::new(FaultPlan::new()),
        });
        *self.opener.0.lock() = Some(Arc::clone(&files));
        let blocks = (CLUSTERS << self.bits.get()) / BLOCK;
        let allowed = (0..blocks as usize).map(|block| BTreeSet::from([of_base(block)])).collect();
        let model = Model { bits: self.bits, allowed, last: 0 };
        let layers = self.open(Unflushed::Keep).unwrap();
        World { files, layers, model, random: SmallRng::seed_from_u64(seed), log: Arc::clone(log) }
    }
}

impl World {
    fn plan(&self) -> Arc<FaultPlan> {
        Arc::clone(&self.files.plan.lock())
    }

    fn fault(&mut self, store: Option<StoreId>, kind: Option<OperationKind>, when: When, effect: Effect) {
        self.log.lock().push(format!("fault {store:?} {kind:?} {when:?} {effect:?}"));
        self.plan().add(Fault { kind, store, when, effect });
    }

    /// A disk takes no more requests once a flush or the journal failed: [`crate::Disk`] sees to that.
    fn is_lost(&self) -> bool {
        self.active().is_lost()
    }

    /// Does one thing that a guest, the server or the host does.
    fn step(&mut self) {
        if self.is_lost() {
            return;
        }
        match self.random.random_range(0..32) {
            0..12 => self.write(),
            12..17 => self.clear(),
            17..20 => self.tend(),
            20..25 => drop(self.commit()),
            25 => {
                let left = [0, 64, 4096, 20480][self.random.random_range(0..4)];
                let halves = self.files.halves.lock().clone();
                let used: u64 = halves.iter().map(|half| half.len().unwrap()).sum();
                self.files.quota.store(used + left, Ordering::Relaxed);
                self.log.lock().push(format!("the journal's file system has {left} bytes left"));
            }
            26 => {
                let (bytes, errno) = ([0, 16, 32, 64, 1 << 20][self.random.random_range(0..5)], IO);
                let nth = self.random.random_range(0..4);
                let when = if self.random.random_bool(0.8) { When::Nth(nth) } else { When::From(nth) };
                self.fault(Some(JOURNAL), Some(OperationKind::Write), when, Effect::Tear { bytes, errno });
            }
            27 => {
                self.files.base.fails.store(true, Ordering::Relaxed);
                self.log.lock().push("the base cannot be read".to_owned());
            }
            28 => {
                let (bytes, errno) = ([0, 64, 512][self.random.random_range(0..3)], NO_SPACE);
                let nth = self.random.random_range(0..6);
                self.fault(
                    Some(IMAGE),
                    Some(OperationKind::Write),
                    When::Nth(nth),
                    Effect::Tear { bytes, errno },
                );
            }
            _ => {
                self.plan().clear();
                self.files.base.fails.store(false, Ordering::Relaxed);
                self.files.quota.store(u64::MAX, Ordering::Relaxed);
                self.log.lock().push("all is well".to_owned());
            }
        }
    }

    fn write(&mut self) {
        let cluster = self.model.bits.size();
        let part = cluster / 8;
        let (at, len) = match self.random.random_range(0..8) {
            0 => (0, cluster),
            1 => (0, 2 * cluster),
            2 => (self.random.random_range(0..cluster / BLOCK) * BLOCK, BLOCK),
            3 => (cluster - part, 2 * part),
            _ => {
                let first = self.random.random_range(0..8);
                (first * part, self.random.random_range(1..=8 - first) * part)
            }
        };
        let at = (self.cluster() << self.model.bits.get()) + at;
        self.model.last += 1;
        let value = self.model.last;
        let mut bytes = value.to_le_bytes().repeat(len as usize / 4);
        let written = self.layers.write(GuestOffset::new(at), &[Segment::from_mut(&mut bytes)]);
        self.log.lock().push(format!(
            "write {value:#x} to {at:#x}, {len:#x}: {:?}",
            written.as_ref().err().map(ToString::to_string)
        ));
        let blocks = self.model.blocks(at, len);
        self.model.put(blocks, value, written.is_ok());
    }

    /// One of the few clusters that are used, now and then of another L2 table.
    fn cluster(&mut self) -> u64 {
        let cluster = self.random.random_range(0..USED - 1);
        let table = if self.random.random_bool(0.2) { self.random.random_range(0..2) } else { 0 };
        cluster + 64 * table
    }

    fn clear(&mut self) {
        let purpose = [Purpose::Discard, Purpose::ZeroAndFree, Purpose::Zero][self.random.random_range(0..3)];
        let (first, bits) = (self.cluster() << self.model.bits.get(), self.active().tables.geometry.unit());
        let units = self.model.bits.size() / bits.size();
        let (unit, count) = (self.random.random_range(0..units), self.random.random_range(1..=units + 1));
        let range = GuestRange::new(GuestOffset::new(first + (unit << bits.get())), count << bits.get());
        let cleared = self.layers.clear(range, purpose);
        self.log
            .lock()
            .push(format!("{purpose:?} {range}: {:?}", cleared.as_ref().err().map(ToString::to_string)));
        let blocks = self.model.blocks(range.start.get(), range.len);
        self.model.put(blocks, 0, cleared.is_ok());
    }

    fn active(&self) -> &Arc<crate::active::Active> {
        match &self.layers.top {
            Top::Qcow2(active) => active,
            _ => panic!("the top is the image"),
        }
    }

    fn commit(&mut self) -> crate::Result<()> {
        let committed = self.active().changes.commit(&**self.active());
        self.log.lock().push(format!("commit: {:?}", committed.as_ref().err().map(ToString::to_string)));
        committed
    }

    fn tend(&mut self) {
        let reclaimed = self.active().reclaim(|| ());
        self.log.lock().push(format!("reclaim: {:?}", reclaimed.err().map(|error| error.to_string())));
    }

    /// Everything that can be read is what it may be; what was read may not change any more.
    fn verify(&mut self) {
        let mut bytes = vec![0; self.model.bits.size() as usize];
        let clusters = (0..USED).chain(64..64 + USED);
        for cluster in clusters {
            let at = GuestOffset::new(cluster << self.model.bits.get());
            let segment = [Segment::from_mut(&mut bytes)];
            self.layers.read_runs(at, &segment, |at, len| self.layers.locate(at, len)).expect("all is well");
            for (block, held) in self.model.cluster_blocks(cluster).zip(bytes.chunks(BLOCK as usize)) {
                let value = u32::from_le_bytes(held[..4].try_into().unwrap());
                assert!(held.chunks(4).all(|word| word == &held[..4]), "block {block} is torn: {held:x?}");
                let allowed = &mut self.model.allowed[block];
                assert!(
                    allowed.contains(&value),
                    "block {block} of cluster {cluster} holds {value:#x}, not {allowed:x?}"
                );
                *allowed = BTreeSet::from([value]);
            }
        }
    }

    fn check(&self) {
        let image = self.files.image.lock().clone();
        let report = vmstrata_check::check(&*image, &vmstrata_check::Options::default()).unwrap();
        assert!(report.corruptions == 0 && report.check_errors == 0, "{report:?}");
    }

    /// The process is gone, now or in the middle of something; what it wrote is there. Another one goes on.
    fn kill(mut self, shared: &Shared) -> Self {
        if self.random.random_bool(0.7) {
            let nth = self.random.random_range(0..12);
            let bytes = [0, 32, 64][self.random.random_range(0..3)];
            self.fault(None, None, When::From(nth), Effect::Tear { bytes, errno: IO });
            for _ in 0..3 {
                self.step_of_guest();
            }
        }
        // Requests under way had not completed: that they failed is not known to anybody.
        self.restart(shared)
    }

    fn step_of_guest(&mut self) {
        if self.is_lost() {
            return;
        }
        match self.random.random_range(0..4) {
            0 => self.write(),
            1 => self.clear(),
            2 => drop(self.commit()),
            _ => self.tend(),
        }
    }

    fn restart(self, shared: &Shared) -> Self {
        let Self { files, layers, model, mut random, log } = self;
        drop(layers);
        files.quota.store(u64::MAX, Ordering::Relaxed);
        files.base.fails.store(false, Ordering::Relaxed);
        let copy = |store: &MemoryStore| Arc::new(MemoryStore::from_vec(store.to_vec()));
        let image = copy(&files.image.lock());
        *files.image.lock() = image;
        let halves = files.halves.lock().clone().map(|half| copy(&half));
        *files.halves.lock() = halves;
        *files.plan.lock() = FaultPlan::new();
        // The successor may be killed, too, before it has begun.
        if random.random_bool(0.3) {
            let nth = random.random_range(0..24);
            log.lock().push(format!("killed, and killed again at operation {nth}"));
            files.plan.lock().add(Fault {
                kind: None,
                store: None,
                when: When::From(nth),
                effect: Effect::Tear { bytes: 32, errno: IO },
            });
            drop(shared.open(Unflushed::Keep));
            *files.plan.lock() = FaultPlan::new();
        } else {
            log.lock().push("killed".to_owned());
        }
        let layers = shared.open(Unflushed::Keep);
        let layers = layers.unwrap_or_else(|error| {
            let image = files.image.lock().to_vec();
            let session =
                u64::from_be_bytes(image[88..96].try_into().unwrap()) & crate::session::SESSION_MASK;
            let boot = crate::session::BootId::now().unwrap();
            let subject = crate::journal::Subject {
                image: FileId { dev: 1, ino: 1 },
                boot,
                session,
                is_extended: shared.subclusters,
            };
            let [first, second] = files.halves.lock().clone().map(|half| half.to_vec());
            panic!(
                "the disk is refused: {error}; the journal has {:x?}",
                subject.read([&first, &second]).0.records
            )
        });
        Self { files, layers, model, random, log }
    }
}

fn run(shared: &Shared, seed: u64, log: &Log) {
    let mut world = shared.world(seed, log);
    let lives = world.random.random_range(1..4);
    for _ in 0..lives {
        for _ in 0..world.random.random_range(2..24) {
            world.step();
        }
        world = world.kill(shared);
        // A check takes longer than all else: one sequence of eight has it, of all kinds.
        if seed / 8 % 8 == seed % 8 {
            world.check();
        }
        world.verify();
    }
    if world.random.random_bool(0.5) {
        world.commit().unwrap();
        leave_clean(world.active(), || ()).unwrap();
        world.check();
        world = world.restart(shared);
        world.verify();
    }
}

fn variable(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().expect("a number"))
}

#[test]
fn a_killed_process_loses_nothing_that_completed() {
    let first = variable("VMSTRATA_SEED").unwrap_or(0);
    let count = variable("VMSTRATA_SEQUENCES").unwrap_or(1_000);
    let shared =
        [(9, false), (9, false), (9, false), (12, false), (9, false), (9, false), (14, true), (12, false)];
    let shared = shared.map(|(bits, subclusters)| Shared::new(bits, subclusters));
    for seed in first..first + count {
        let log = Log::default();
        let shared = &shared[seed as usize % shared.len()];
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(shared, seed, &log)));
        if let Err(panic) = ran {
            println!("VMSTRATA_SEED={seed}\n{}", log.lock().join("\n"));
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn two_entries_that_lead_to_one_cluster_are_not_taken_up() {
    use crate::journal::{Record, Slot};
    let shared = Shared::new(9, false);
    let world = shared.world(0, &Log::default());
    let mut bytes = vec![7; world.model.bits.size() as usize];
    world.layers.write(GuestOffset::ZERO, &[Segment::from_mut(&mut bytes)]).unwrap();
    let new = world.active().entry(0).unwrap();
    let record = |cluster| Record { slot: Slot::L2(cluster), old: RawEntry::EMPTY, new };
    assert_eq!(world.active().take_up(&[record(0)]).unwrap(), Ok(()));
    let refused = world.active().take_up(&[record(0), record(1)]).unwrap();
    assert!(matches!(refused, Err(crate::active::Mismatch::Shared { .. })), "{refused:?}");
}

#[test]
fn a_cluster_that_an_older_version_wrote_in_part_is_refused_by_name() {
    use crate::journal::{Record, Slot};
    let shared = Shared::new(12, false);
    let world = shared.world(0, &Log::default());
    let slot = Slot::L2(3);
    let new = RawEntry::standard(1 << 61 | 0x5000 | 0b1);
    let refused = world.active().take_up(&[Record { slot, old: RawEntry::EMPTY, new }]).unwrap();
    assert_eq!(refused, Err(crate::active::Mismatch::Partial { slot }));
    assert!(refused.unwrap_err().to_string().contains("open the disk once with that version"));
}
