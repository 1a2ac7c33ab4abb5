//! Power failures and failing hosts while indices are written, replaced and removed. Whatever is left, stock tools find
//! every layer clean, no index says anything wrong, and building again mends it.

mod common;
mod index_support;

use std::path::PathBuf;
use std::sync::Arc;

use common::faulty::FaultyFiles;
use common::stock::{assert_clean, path_str, qemu_img};
use index_support::{Chain, Maker, name_of};
use vmstrata_disk::index::{IndexOptions, build, remove, verify};
use vmstrata_disk::{CheckOptions, Opener, check};
use vmstrata_store::{Crash, CrashKind, Effect, Fault, FaultPlan, Moment, OperationKind, Survivors, When};
use vmstrata_types::ClusterBits;

/// Three frozen layers of small clusters, and a disk on top.
fn small_chain() -> Chain {
    let mut chain = Chain::new();
    for number in 0..3 {
        chain.add(Maker::Ours, 3 << 20, ClusterBits::MIN);
        chain.write(number, &[&format!("write -q -P 5 {number}M 3k"), "write -q -z 2M 1k"]);
    }
    chain.add(Maker::Ours, 3 << 20, ClusterBits::MIN);
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
    let chain = small_chain();
    chain.build();
    qemu_img(&["commit", "-q", "-d", "-b", path_str(&chain.files[0]), path_str(&chain.files[1])]);
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

/// Each operation in turn fails, for good or with half of it done.
#[test]
fn no_failure_of_the_host_leaves_an_index_that_lies() {
    let kinds = [OperationKind::Write, OperationKind::Flush, OperationKind::SetLen, OperationKind::Read];
    for kind in kinds {
        for nth in 0.. {
            let chain = small_chain();
            let plan = FaultPlan::recording();
            let files = FaultyFiles::new(&plan);
            let effect = Effect::Tear { bytes: 700, errno: 5 };
            plan.add(Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect });
            let _ = build(chain.top(), &options(&files));
            let failed = plan.count(Some(kind)) > nth;
            assert_sound(&chain, nth % 16 == 0, &(kind, nth));
            if !failed || nth > 60 {
                break;
            }
        }
    }
}

/// A sidecar appears whole or not at all.
#[test]
fn no_half_written_sidecar_is_left_under_its_name() {
    let mut chain = Chain::new();
    (0..3).for_each(|_| drop(chain.add(Maker::Stock, 3 << 20, ClusterBits::DEFAULT)));
    chain.build();
    let names = || {
        let entries = chain.dir.path().read_dir().expect("a directory");
        let mut names: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
        names.sort();
        names
    };
    assert!(names().iter().all(|name| !name.to_string_lossy().contains(".new")), "{:?}", names());
}
