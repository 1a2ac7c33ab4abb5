//! Power failures and failing hosts in the middle of merging. Whatever is left, every state reads as it did, nothing is
//! corrupt, and the same merge, begun again, is completed.

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::assert_reads;
use crate::common::stock::{assert_clean, assert_safe, content};
use crate::common::{open_read_only, random};
use crate::index_support::{Chain, Maker};
use rand::Rng as _;
use vmstrata_disk::merge::{Merge, MergeOptions, MergeRange, Removal};
use vmstrata_disk::{CheckOptions, Error, ResourceOptions, Resources, check};
use vmstrata_store::{Crash, CrashKind, Effect, Fault, FaultPlan, Moment, OperationKind, Survivors, When};
use vmstrata_types::{ClusterBits, LayerIndex};

const SIZE: u64 = 1 << 20;

/// Layers with data, zeros and holes, some over others, and indices.
fn small_chain(layers: usize, seed: u64, subclusters: bool) -> Chain {
    let mut random = random("merge crash", seed);
    let mut chain = Chain::new();
    for number in 0..layers {
        // Of mixed sizes: the middle layers are dropped, and one with subclusters is copied into.
        let (maker, bits) =
            if subclusters && number != 1 { (Maker::Subclusters, 14) } else { (Maker::Ours, 12) };
        chain.add(maker, SIZE, ClusterBits::new(bits).unwrap());
        let mut command = |zeros: bool| {
            let at = random.random_range(0..SIZE / 4096) * 4096;
            let len = (random.random_range(1..12) * 1024).min(SIZE - at);
            if zeros {
                format!("write -q -z {at} {len}")
            } else {
                format!("write -q -P {} {at} {len}", number + 1)
            }
        };
        let commands: Vec<String> = (0..14).map(|turn| command(turn % 5 == 4)).collect();
        chain.write(number, &commands.iter().map(String::as_str).collect::<Vec<_>>());
    }
    chain.build();
    chain
}

fn drop_middle(chain: &Chain, resources: &Arc<Resources>) -> Result<(), Error> {
    let range = MergeRange { first: LayerIndex::new(1), last: LayerIndex::new(2) };
    let options = MergeOptions { removal: Removal::Nothing, beyond_own: true, ..MergeOptions::default() };
    Merge::new(chain.top(), range, &options, resources)?.run().map(drop)
}

/// What each file reads as, as long as nothing is dropped.
fn states(chain: &Chain) -> Vec<(PathBuf, Vec<u8>)> {
    chain.files.iter().map(|file| (file.clone(), content(file, "qcow2"))).collect()
}

fn assert_sound(states: &[(PathBuf, Vec<u8>)], ask_stock: bool, what: &dyn std::fmt::Debug) {
    for (file, model) in states {
        let options = CheckOptions { force_share: true, ..CheckOptions::default() };
        let report = check(file, &options).expect("checks");
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what:?}: {:?}", report.findings);
        assert_reads(&open_read_only(file), model, &format!("{what:?}: {}", file.display()));
        if ask_stock {
            assert_safe(file);
            assert!(content(file, "qcow2") == *model, "{what:?}: {} for stock tools", file.display());
        }
    }
}

/// Begins again and completes; stock tools agree, and the layers are gone from the chain.
fn assert_completed(chain: &Chain, states: &[(PathBuf, Vec<u8>)], what: &dyn std::fmt::Debug) {
    let layers = open_read_only(chain.top()).layers().len();
    if layers == states.len() {
        drop_middle(chain, &Resources::new(ResourceOptions::default())).expect("completes");
    }
    assert_eq!(open_read_only(chain.top()).layers().len(), states.len() - 2, "{what:?}");
    assert_sound(states, true, what);
}

#[test]
fn merging_survives_the_death_of_the_host_at_any_moment() {
    // With a layer above the target, and with the target on top.
    for (layers, subclusters) in [(5, false), (4, false), (5, true)] {
        let chain = small_chain(layers, layers as u64, subclusters);
        let states = states(&chain);
        let before: Vec<Vec<u8>> = chain.files.iter().map(|file| std::fs::read(file).unwrap()).collect();
        let plan = FaultPlan::recording();
        let files = FaultyFiles::new(&plan);
        drop_middle(&chain, &files.resources()).expect("no faults here");
        chain.files.iter().for_each(|file| assert_clean(file));
        let log = plan.log();
        let end = log.iter().map(|record| record.completed.unwrap_or(record.issued)).max().expect("it wrote");
        for at in 0..=end.0 {
            let survivors = [Survivors::None, Survivors::All, Survivors::Seeded(at), Survivors::Seeded(!at)];
            // Some of them are enough for the other kind of clusters.
            for survivors in survivors.into_iter().step_by(if subclusters { 2 } else { 1 }) {
                let crash = Crash { kind: CrashKind::Power, at: Moment(at), survivors };
                for (file, before) in chain.files.iter().zip(&before) {
                    std::fs::write(file, crash.image(before, &log, files.id(file))).expect("writes");
                }
                assert_sound(&states, at % 16 == 0, &crash);
                if at % 9 == 0 {
                    assert_completed(&chain, &states, &crash);
                }
            }
        }
    }
}

/// Each operation in turn fails, for good or with a part of it done.
#[test]
fn no_failure_of_the_host_changes_what_is_read() {
    for kind in [OperationKind::Write, OperationKind::Flush, OperationKind::Read, OperationKind::Len] {
        for nth in 0.. {
            let subclusters = nth % 2 == 1;
            let chain = small_chain(4, 9, subclusters);
            let states = states(&chain);
            let plan = FaultPlan::new();
            let files = FaultyFiles::new(&plan);
            let effect = Effect::Tear { bytes: 700 * (nth as usize / 2 % 2), errno: 5 };
            plan.add(Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect });
            let done = drop_middle(&chain, &files.resources());
            let failed = plan.count(Some(kind)) > nth;
            assert!(failed || done.is_ok(), "{kind:?} {nth}: {done:?}");
            assert_sound(&states, nth % 8 == 0, &(kind, nth));
            if nth % 4 == 0 {
                assert_completed(&chain, &states, &(kind, nth));
            }
            if !failed || nth > 80 {
                break;
            }
        }
    }
}

/// A host that is full says so; the disk is as it was, and can be merged when there is room.
#[test]
fn a_full_host_leaves_the_disk_as_it_was() {
    for nth in [1, 5, 9] {
        let chain = small_chain(4, 3, nth == 5);
        let states = states(&chain);
        let plan = FaultPlan::new();
        let files = FaultyFiles::new(&plan);
        plan.fail_from(Some(OperationKind::Write), nth, 28);
        let full = drop_middle(&chain, &files.resources()).unwrap_err();
        assert_eq!(full.errno(), 28, "{full}");
        assert_sound(&states, true, &nth);
        assert_completed(&chain, &states, &nth);
    }
}
