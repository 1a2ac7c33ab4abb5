//! Files behind a log, in memory, with a record of all that reached them, and what each sector may hold after a crash.

#![allow(unreachable_pub, missing_docs, reason = "shared by tests only")]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use vmstrata_flushlog::{FlushLog, Host, LogError, LoggedStore, Recovered, Subject, Targets};
use vmstrata_store::{
    Crash, FaultPlan, FaultStore, Logged as _, MemoryStore, Moment, Record, Store, StoreId,
};
use vmstrata_types::HostOffset;

pub const SECTOR: u64 = 512;
/// The least that a log may have.
pub const LOG_LEN: u64 = 136 << 10;
pub const LOG: StoreId = StoreId(0);
/// What marks all files.
pub const MARK: u64 = 11;
/// What a sector holds that was never written.
const BEFORE: u64 = u64::MAX;

pub fn boot(number: u8) -> Host {
    Host { id: [7; 16], boot: [number; 16] }
}

pub fn random(seed: u64) -> SmallRng {
    SmallRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

pub fn path_of(file: usize) -> PathBuf {
    PathBuf::from(format!("/vms/{file}.qcow2"))
}

/// Opens files by their number.
pub struct Files(pub Vec<Arc<dyn Store>>);

impl Targets for Files {
    fn open(&self, subject: &Subject, marks: &[u64]) -> io::Result<Option<Arc<dyn Store>>> {
        assert_eq!(marks, [MARK]);
        assert_eq!(subject.path, path_of(subject.ino as usize));
        self.0.get(subject.ino as usize).cloned().map(Some).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

pub fn open_log(
    store: &Arc<dyn Store>,
    host: Host,
    files: &Files,
) -> Result<(Arc<FlushLog>, Recovered), LogError> {
    FlushLog::open(Arc::clone(store), Path::new("/log"), host, files)
}

/// What a step wrote: a sector of this number over and over.
pub fn sectors_of(value: u64, len: u64) -> Vec<u8> {
    value.to_le_bytes().repeat((len / 8) as usize)
}

/// A log and files, each behind a store that records.
pub struct Rig {
    pub plan: Arc<FaultPlan>,
    pub log_store: Arc<dyn Store>,
    /// As others see them.
    pub raw: Vec<Arc<dyn Store>>,
    pub log: Arc<FlushLog>,
    pub files: Vec<Arc<LoggedStore>>,
}

pub fn zeros(len: u64) -> Vec<u8> {
    vec![0; len as usize]
}

pub fn before(len: u64) -> Vec<u8> {
    sectors_of(BEFORE, len)
}

pub fn memory(bytes: Vec<u8>) -> Arc<dyn Store> {
    Arc::new(MemoryStore::from_vec(bytes))
}

/// A file behind the log.
fn joined(store: &Arc<dyn Store>, number: usize, log: &Arc<FlushLog>) -> Arc<LoggedStore> {
    let store = LoggedStore::new(Arc::clone(store), path_of(number), number as u64, log);
    store.join(MARK).unwrap();
    store
}

impl Rig {
    pub fn new(files: usize, len: u64) -> Self {
        Self::on(memory(zeros(LOG_LEN)), (0..files).map(|_| memory(before(len))).collect())
    }

    pub fn on(log: Arc<dyn Store>, files: Vec<Arc<dyn Store>>) -> Self {
        let plan = FaultPlan::recording();
        let faulty = |store, id| -> Arc<dyn Store> { Arc::new(FaultStore::new(store, &plan, id)) };
        let log_store = faulty(log, LOG);
        let raw: Vec<_> = (1..).zip(files).map(|(id, store)| faulty(store, StoreId(id))).collect();
        let (log, _) = open_log(&log_store, boot(1), &Files(raw.clone())).unwrap();
        let join = |(number, store): (usize, &Arc<dyn Store>)| joined(store, number, &log);
        let files = raw.iter().enumerate().map(join).collect();
        Self { plan, log_store, raw, log, files }
    }
}

#[derive(Clone, Debug)]
pub enum Step {
    Write {
        at: u64,
        len: u64,
    },
    Punch {
        at: u64,
        len: u64,
    },
    Flush,
    /// A flush, and writes that must not be there before what was written earlier.
    Commit {
        places: Vec<u64>,
    },
    Checkpoint,
    Advance,
    /// The file leaves the log, another program writes to it, and it joins again.
    Elsewhere {
        at: u64,
    },
}

impl Step {
    pub fn some(random: &mut SmallRng, len: u64) -> Self {
        // Most of the work goes to one part of the file, so that writes meet.
        let end = if random.random_ratio(2, 3) { len / 8 } else { len };
        let at = random.random_range(0..end / SECTOR) * SECTOR;
        let some_len =
            |random: &mut SmallRng, most: u64| (random.random_range(1..=most) * SECTOR).min(len - at);
        match random.random_range(0..40) {
            0..18 => Self::Write { at, len: some_len(random, 8) },
            18..20 => Self::Write { at, len: some_len(random, 160) },
            20..23 => Self::Punch { at, len: some_len(random, 40) },
            23..30 => Self::Flush,
            30..36 => {
                let place = |_| random.random_range(0..len / SECTOR) * SECTOR;
                Self::Commit { places: (0..3).map(place).collect() }
            }
            36..38 => Self::Checkpoint,
            38 => Self::Advance,
            _ => Self::Elsewhere { at },
        }
    }
}

/// A step that was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    pub file: usize,
    pub step: Step,
    pub began: Moment,
    pub ended: Moment,
}

/// All that happened to some files.
pub struct History {
    pub len: u64,
    pub files: usize,
    pub steps: Vec<Taken>,
    pub records: Vec<Record>,
    pub end: Moment,
}

impl History {
    /// Takes `count` random steps on some files.
    pub fn make(seed: u64, files: usize, len: u64, count: usize) -> Self {
        let mut random = random(seed);
        let mut rig = Rig::new(files, len);
        let mut steps = Vec::new();
        while steps.len() < count {
            let file = random.random_range(0..files);
            let step = Step::some(&mut random, len);
            let began = rig.plan.now();
            rig.take(file, &step, steps.len() as u64 + 1);
            steps.push(Taken { file, step, began, ended: rig.plan.now() });
        }
        let (records, end) = (rig.plan.log(), rig.plan.now());
        Self { len, files, steps, records, end }
    }

    /// What a crash leaves of the log and the files.
    pub fn left(&self, crash: &Crash) -> (Vec<u8>, Vec<Vec<u8>>) {
        let image = |base: &[u8], id| crash.image(base, &self.records, StoreId(id));
        let files = (0..self.files).map(|file| image(&before(self.len), file as u32 + 1)).collect();
        (image(&zeros(LOG_LEN), 0), files)
    }

    /// Makes sure that each sector of a file holds what it may: a value from that at the last flush that ended before `at` on.
    pub fn check(&self, file: usize, bytes: &[u8], at: Moment, all_completed: bool) {
        self.check_between(file, bytes, [at, at], all_completed);
    }

    /// As [`History::check`], by flushes that ended before the first moment, and writes that began before the second.
    pub fn check_between(
        &self,
        file: usize,
        bytes: &[u8],
        [flushed_by, at]: [Moment; 2],
        all_completed: bool,
    ) {
        let steps: Vec<(u64, &Taken)> =
            (1..).zip(&self.steps).filter(|(_, taken)| taken.file == file).collect();
        // A checkpoint is none: what was not flushed may be undone by older records.
        let is_flush =
            |step: &Step| matches!(step, Step::Flush | Step::Commit { .. } | Step::Elsewhere { .. });
        let mut flushed = 0;
        let mut sectors = vec![vec![(0_u64, BEFORE)]; (self.len / SECTOR) as usize];
        for (number, taken) in &steps {
            if taken.began > at {
                break;
            }
            taken.step.enter(*number, &mut sectors);
            if taken.ended <= flushed_by && (all_completed || is_flush(&taken.step)) {
                flushed = *number;
            }
        }
        let found = |place: u64| {
            let sector = &bytes[place as usize..(place + SECTOR) as usize];
            let value = u64::from_le_bytes(sector[..8].try_into().unwrap());
            assert!(sector == sectors_of(value, SECTOR), "file {file}: sector {place:#x} is torn");
            value
        };
        for (number, taken) in &steps {
            // What a commit wrote last is there only if all before it is.
            if let Step::Commit { places } = &taken.step
                && taken.began <= at
                && places.iter().any(|place| found(*place) == *number)
            {
                flushed = flushed.max(*number - 1);
            }
        }
        for (number, history) in sectors.iter().enumerate() {
            let place = number as u64 * SECTOR;
            let first = history.iter().rposition(|(step, _)| *step <= flushed).unwrap();
            let value = found(place);
            let allowed = &history[first..];
            assert!(
                allowed.iter().any(|(_, allowed)| *allowed == value),
                "file {file}, crash at {at:?}: sector {place:#x} holds {value}, not one of {allowed:?}; flushed at step {flushed}"
            );
        }
    }
}

impl Step {
    fn enter(&self, number: u64, sectors: &mut [Vec<(u64, u64)>]) {
        let mut put = |at: u64, len: u64, value| {
            for sector in at / SECTOR..(at + len) / SECTOR {
                sectors[sector as usize].push((number, value));
            }
        };
        match self {
            Self::Write { at, len } => put(*at, *len, number),
            Self::Punch { at, len } => put(*at, *len, 0),
            Self::Commit { places } => places.iter().for_each(|place| put(*place, SECTOR, number)),
            Self::Elsewhere { at } => put(*at, SECTOR, number),
            Self::Flush | Self::Checkpoint | Self::Advance => {}
        }
    }
}

impl Rig {
    pub fn take(&mut self, file: usize, step: &Step, number: u64) {
        let store = Arc::clone(&self.files[file]);
        match step {
            Step::Write { at, len } => {
                store.write_all(&sectors_of(number, *len), HostOffset::new(*at)).unwrap();
            }
            Step::Punch { at, len } => store.punch_hole(HostOffset::new(*at), *len).unwrap(),
            Step::Flush => store.flush().unwrap(),
            Step::Commit { places } => {
                let bytes = sectors_of(number, SECTOR);
                let writes: Vec<_> =
                    places.iter().map(|place| (HostOffset::new(*place), bytes.clone())).collect();
                store.commit(&writes).unwrap();
            }
            Step::Checkpoint => store.checkpoint().unwrap(),
            Step::Advance => self.log.advance().unwrap(),
            Step::Elsewhere { at } => {
                store.leave().unwrap();
                drop(store);
                let raw = &self.raw[file];
                raw.write_all(&sectors_of(number, SECTOR), HostOffset::new(*at)).unwrap();
                raw.flush().unwrap();
                self.files[file] = joined(raw, file, &self.log);
            }
        }
    }
}
