//! Power failures and failing hosts while indices are written, replaced and removed. Whatever is left, stock tools find
//! every layer clean, no index says anything wrong, and building again mends it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::faulty::FaultyFiles;
use crate::common::killed::is_killed;
use crate::common::stock::{assert_clean, path_str, qemu_img};
use crate::index_support::{Chain, Maker, name_of};
use vmstrata_disk::index::{IndexOptions, IndexOutcome, IndexedFile, build, remove, verify};
use vmstrata_disk::{CheckOptions, LocalFiles, Opened, Opener, Role, check};
use vmstrata_store::{
    Crash, CrashKind, Effect, Fault, FaultPlan, FileIdentity, Gate, Moment, OperationKind, Survivors, When,
};
use vmstrata_types::ClusterBits;

/// What a child finds its orders in.
const CHILD: &str = "VMSTRATA_TEST_INDEX_CHILD";

/// Three frozen layers of small clusters, and a disk on top.
fn small_chain() -> Chain {
    small_chain_by(Maker::Ours)
}

fn small_chain_by(maker: Maker) -> Chain {
    let mut chain = Chain::new();
    for number in 0..3 {
        chain.add(maker, 3 << 20, ClusterBits::MIN);
        chain.write(number, &[&format!("write -q -P 5 {number}M 3k"), "write -q -z 2M 1k"]);
    }
    chain.add(Maker::Ours, 3 << 20, ClusterBits::MIN);
    chain
}

/// The same with indices of which none holds any more: they reach further than the new ones will.
fn outdated(maker: Maker) -> Chain {
    let chain = small_chain_by(maker);
    chain.build();
    qemu_img(&["commit", "-q", "-d", "-b", path_str(&chain.files[0]), path_str(&chain.files[1])]);
    chain
}

fn options(files: &Arc<FaultyFiles>) -> IndexOptions {
    IndexOptions { opener: Some(Arc::clone(files) as Arc<dyn Opener>), ..IndexOptions::default() }
}

/// What is left is sound, and can be mended.
fn assert_sound(chain: &Chain, ask_stock: bool, what: &dyn std::fmt::Debug) {
    for file in &chain.files {
        let report =
            check(file, &CheckOptions { force_share: true, ..CheckOptions::default() }).expect("checks");
        let found = (report.corruptions, report.leaks, report.check_errors);
        assert_eq!(found, (0, 0, 0), "{what:?}: {}: {:?}", file.display(), report.findings);
        if ask_stock {
            assert_clean(file);
        }
    }
    for file in verify(chain.top(), &IndexOptions::default()).expect("reads") {
        name_of(&file.verdict);
    }
}

fn assert_mended(chain: &Chain) {
    chain.build();
    assert!(chain.verify().iter().all(|&verdict| verdict == "good"));
    chain.assert_clean();
}

/// Runs `act`, then lets the host die at every operation of it.
fn die_everywhere(chain: &Chain, act: impl FnOnce(&IndexOptions)) {
    let before: Vec<Vec<u8>> = chain.files.iter().map(|file| std::fs::read(file).expect("reads")).collect();
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    act(&options(&files));
    let log = plan.log();
    let end = log.iter().map(|record| record.completed.unwrap_or(record.issued)).max().expect("it wrote");
    for at in 0..=end.0 {
        for survivors in [Survivors::None, Survivors::All, Survivors::Seeded(at), Survivors::Seeded(!at)] {
            let crash = Crash { kind: CrashKind::Power, at: Moment(at), survivors };
            for (file, before) in chain.files.iter().zip(&before) {
                std::fs::write(file, crash.image(before, &log, files.id(file))).expect("writes");
            }
            assert_sound(chain, at % 8 == 0, &crash);
            if at % 5 == 0 {
                assert_mended(chain);
            }
        }
    }
}

#[test]
fn building_survives_the_death_of_the_host_at_any_moment() {
    let chain = small_chain();
    die_everywhere(&chain, |options| {
        assert_eq!(build(chain.top(), options).expect("builds").layers.len(), 3)
    });
}

#[test]
fn replacing_survives_the_death_of_the_host_at_any_moment() {
    let chain = outdated(Maker::Ours);
    die_everywhere(&chain, |options| {
        assert_eq!(build(chain.top(), options).expect("builds").layers.len(), 3)
    });
}

#[test]
fn removing_survives_the_death_of_the_host_at_any_moment() {
    let chain = small_chain();
    chain.build();
    die_everywhere(&chain, |options| assert_eq!(remove(chain.top(), options).expect("removes").len(), 4));
}

/// A chain to begin with again and again: the names in its directory, and what they hold.
struct Start {
    chain: Chain,
    files: BTreeMap<PathBuf, Vec<u8>>,
}

impl Start {
    fn new(chain: Chain) -> Self {
        let names = names(&chain);
        let files = names.into_iter().map(|name| (name.clone(), std::fs::read(name).expect("reads")));
        Self { files: files.collect(), chain }
    }

    fn restore(&self) {
        for name in names(&self.chain).iter().filter(|name| !self.files.contains_key(*name)) {
            std::fs::remove_file(name).expect("removed");
        }
        for (name, bytes) in &self.files {
            std::fs::write(name, bytes).expect("writes");
        }
    }

    /// Nothing lies about but layers and whole indices, and building mends what is missing.
    fn assert_recovers(&self, ask_stock: bool, what: &dyn std::fmt::Debug) {
        let chain = &self.chain;
        for name in names(chain) {
            let layer = name.with_extension("");
            assert!(
                chain.files.contains(&layer) && name.extension().is_none_or(|end| end == "vmsx"),
                "{name:?}"
            );
        }
        assert_sound(chain, ask_stock, what);
        assert!(!chain.verify().contains(&"damaged"), "{what:?}: an index that is not whole is not found");
        chain.build();
        assert_eq!(chain.verify(), ["good"; 3], "{what:?}");
        if ask_stock {
            chain.assert_clean();
        }
    }
}

fn names(chain: &Chain) -> BTreeSet<PathBuf> {
    let entries = chain.dir.path().read_dir().expect("a directory");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// Lets the `nth` operation of `kind` fail with half of it done; whether there was one.
fn fails_at(start: &Start, kind: OperationKind, nth: u64) -> bool {
    start.restore();
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    let effect = Effect::Tear { bytes: 700, errno: 5 };
    plan.add(Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect });
    let built = build(start.chain.top(), &options(&files));
    if plan.count(Some(kind)) <= nth {
        return false;
    }
    // What it says of each layer is so. That an old index cannot be read is nothing to tell of.
    let verdicts = start.chain.verify();
    let layers = built.map(|built| built.layers).unwrap_or_default();
    let is_failed = |layer: &IndexedFile| matches!(layer.outcome, IndexOutcome::Failed(_));
    for (layer, verdict) in layers.iter().zip(verdicts) {
        assert!(is_failed(layer) || verdict == "good", "{kind:?} {nth}: {layer:?} is {verdict}");
    }
    // What could not be written takes no room.
    for (name, bytes) in &start.files {
        let now = std::fs::metadata(name).expect("exists").len();
        let layer = layers.iter().find(|layer| layer.path == *name);
        assert!(now <= bytes.len() as u64 || !layer.is_some_and(is_failed), "{kind:?} {nth}: {name:?}");
    }
    let is_told = layers.is_empty() || layers.iter().any(is_failed);
    assert!(is_told || kind == OperationKind::Read, "{kind:?} {nth} failed: {layers:?}");
    start.assert_recovers(nth.is_multiple_of(16), &(kind, nth));
    true
}

/// Each operation in turn fails, with nothing in the way and over indices that are outdated.
fn fails_everywhere(maker: Maker, kinds: &[OperationKind]) {
    for chain in [small_chain_by(maker), outdated(maker)] {
        let start = Start::new(chain);
        for &kind in kinds {
            let failed = (0..).take_while(|&nth| fails_at(&start, kind, nth)).count();
            assert!(failed >= 3, "{kind:?}: only {failed} of them for three layers");
        }
    }
}

#[test]
fn no_failure_of_the_host_leaves_an_index_in_a_file_that_lies() {
    use OperationKind::{Flush, Read, Write};
    fails_everywhere(Maker::Ours, &[Write, Flush, Read]);
}

/// Sidecars appear whole or not at all. (Their own writes go to files that nobody opens by name.)
#[test]
fn no_failure_of_the_host_leaves_a_sidecar_that_lies() {
    fails_everywhere(Maker::Stock, &[OperationKind::Read]);
}

/// Files of this host, of which the process that opens them lives to see a certain number.
#[derive(Debug)]
struct Deadly(AtomicU64);

impl Deadly {
    fn count(&self) {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 0 {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}

impl Opener for Deadly {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        self.count();
        LocalFiles.open(path, role, gate)
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<FileIdentity> {
        self.count();
        LocalFiles.identity(path, gate)
    }
}

/// Builds the indices of a disk, and dies when it looks at a file for the n-th time: "N DISK".
#[test]
#[ignore = "the process that the other test starts"]
fn child_that_dies_while_it_builds() {
    let Ok(orders) = std::env::var(CHILD) else { return };
    let (looks, disk) = orders.split_once(' ').expect("a number and a disk");
    let opener = Arc::new(Deadly(AtomicU64::new(looks.parse().expect("a number"))));
    build(Path::new(disk), &IndexOptions { opener: Some(opener), ..IndexOptions::default() })
        .expect("builds");
}

#[test]
fn a_killed_build_leaves_whole_indices_or_none() {
    for (maker, is_outdated) in
        [(Maker::Ours, false), (Maker::Ours, true), (Maker::Stock, false), (Maker::Stock, true)]
    {
        let start = Start::new(if is_outdated { outdated(maker) } else { small_chain_by(maker) });
        let mut seen = BTreeSet::new();
        for looks in 0u64.. {
            start.restore();
            let orders = format!("{looks} {}", path_str(start.chain.top()));
            if !is_killed("index_crash::child_that_dies_while_it_builds", CHILD, orders) {
                break;
            }
            let good = start.chain.verify().iter().filter(|&&verdict| verdict == "good").count();
            let sidecars = names(&start.chain).len() - start.chain.files.len();
            assert!(
                is_outdated || maker == Maker::Ours || sidecars == good,
                "{looks}: one that is not whole"
            );
            seen.insert(good);
            start.assert_recovers(looks.is_multiple_of(16), &(maker, is_outdated, looks));
        }
        // It was killed before, between and after layers.
        assert!((0..3).all(|good| seen.contains(&good)), "{maker:?}: {seen:?}");
    }
}
