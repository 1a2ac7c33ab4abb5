//! Repairs that are interrupted: by a crash after any write, and by a store that fails at any operation.
//!
//! What must hold of the image that is left: the disk reads as before, no cluster that was safe has become free to
//! take while it is in use, and another repair finishes the work.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use crate::support::guest::*;
use crate::support::*;
use vmstrata_check::{ErrorKind, FindingKind, Options, Repair, check};
use vmstrata_store::{
    Crash, CrashKind, FaultPlan, FaultStore, MemoryStore, Moment, OperationKind, Store, StoreId, Survivors,
};

/// A name and what it does to an image.
type Damage = (&'static str, fn(&Editor));

/// Damage that takes a repair through each of its ways.
const DAMAGES: &[Damage] = &[
    ("refcounts in place", |image| {
        image.set_refcount(image.host(OWN), 0);
        image.set_refcount(image.host(SHARED), 1);
        image.set_refcount(image.snapshots(), 7);
    }),
    ("no refcount block", |image| image.put_u64(image.refcount_table(), 0)),
    ("shared refcount block", |image| {
        image.put_u64(image.l2_entry(NOTHING), image.block(0) | COPIED);
    }),
    ("flags and reserved bits", |image| {
        image.map(image.l2_entry(OWN), |raw| raw & !COPIED | 1 << 56);
        image.map(image.l2_entry(SHARED), |raw| raw | COPIED);
        image.map(image.l1_entry(0), |raw| raw & !COPIED);
        image.map(72, |bits| bits | 3);
    }),
    ("data on an L2 table", |image| {
        image.put_u64(image.l2_entry(NOTHING), image.l2(0) | COPIED);
    }),
    ("data on the L1 table", |image| {
        image.put_u64(image.l2_entry(NOTHING), image.l1() | COPIED);
        image.set_refcount(image.host(OWN), 9);
    }),
];

fn options(repair: Repair) -> Options {
    Options { repair, findings_max: 100_000, ..Options::default() }
}

/// Clusters whose refcount is lower than it should be.
fn too_low(store: &dyn Store) -> BTreeSet<u64> {
    let report = check(store, &options(Repair::None)).unwrap();
    let low =
        report.findings.iter().filter(|finding| matches!(finding.kind, FindingKind::RefcountTooLow { .. }));
    low.map(|finding| finding.at.get()).collect()
}

/// Holds what an interrupted repair left to its promises.
fn judge(name: &str, left: Vec<u8>, before: &Path, low_before: &BTreeSet<u64>) {
    let path = before.with_extension("left");
    std::fs::write(&path, &left).unwrap();
    let readable = is_readable(before);
    if readable {
        assert!(same_contents(before, &path), "{name}: the disk reads differently");
    }
    let store = MemoryStore::from_vec(left);
    let low = too_low(&store);
    assert!(low.is_subset(low_before), "{name}: {low:x?} were not too low before: {low_before:x?}");
    let report = check(&store, &options(Repair::All)).unwrap();
    assert!(report.is_clean(), "{name}: the next repair leaves {report:#?}");
    std::fs::write(&path, store.to_vec()).unwrap();
    assert_eq!(stock_rc(&path), Some(0), "{name}: stock after the next repair");
    if readable {
        assert!(same_contents(before, &path), "{name}: the disk reads differently after the next repair");
    }
}

/// A damaged image, as a file beside it and as bytes.
fn damaged(dir: &Path, golden: &Path, edit: fn(&Editor)) -> (std::path::PathBuf, Vec<u8>) {
    let path = dir.join("before.qcow2");
    std::fs::copy(golden, &path).unwrap();
    edit(&Editor::open(&path));
    let bytes = std::fs::read(&path).unwrap();
    (path, bytes)
}

#[test]
fn a_crash_at_any_point_of_a_repair_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let golden = dir.path().join("golden.qcow2");
    make_rich(&golden);
    for (name, edit) in DAMAGES {
        let (before, bytes) = damaged(dir.path(), &golden, *edit);
        let low_before = too_low(&MemoryStore::from_vec(bytes.clone()));
        let plan = FaultPlan::recording();
        let inner = Arc::new(MemoryStore::from_vec(bytes.clone()));
        let store = FaultStore::new(inner, &plan, StoreId(0));
        assert!(check(&store, &options(Repair::All)).unwrap().is_clean(), "{name}");
        let log = plan.log();
        let mut crashes = 0;
        for record in &log {
            for survivors in [Survivors::None, Survivors::All, Survivors::Seeded(record.issued.0)] {
                let crash = Crash { kind: CrashKind::Power, at: Moment(record.issued.0), survivors };
                let left = crash.image(&bytes, &log, StoreId(0));
                judge(&format!("{name}, {crash:?}"), left, &before, &low_before);
                crashes += 1;
            }
        }
        assert!(crashes >= 6, "{name}: only {crashes} crashes");
    }
}

#[test]
fn a_store_that_fails_at_any_operation_of_a_repair_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let golden = dir.path().join("golden.qcow2");
    make_rich(&golden);
    const EIO: i32 = 5;
    for (name, edit) in DAMAGES {
        let (before, bytes) = damaged(dir.path(), &golden, *edit);
        let low_before = too_low(&MemoryStore::from_vec(bytes.clone()));
        let mut changed = BTreeSet::new();
        for nth in 0.. {
            let plan = FaultPlan::new();
            plan.fail_from(None, nth, EIO);
            let inner = Arc::new(MemoryStore::from_vec(bytes.clone()));
            let store = FaultStore::new(Arc::clone(&inner) as Arc<dyn Store>, &plan, StoreId(0));
            let result = check(&store, &options(Repair::All));
            let left = inner.to_vec();
            let Err(error) = result else {
                assert!(nth > 10, "{name}: a repair in {nth} operations");
                break;
            };
            assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{name}: {error}");
            // Most operations are reads: what they leave was judged before.
            if left != bytes && changed.insert(left.clone()) {
                judge(&format!("{name}, operation {nth} failed"), left, &before, &low_before);
            }
        }
        assert!(!changed.is_empty(), "{name}: no failure came after a write");
    }
}

#[test]
fn a_device_that_cannot_grow_is_repaired_within_its_size() {
    const EINVAL: i32 = 22;
    let dir = tempfile::tempdir().unwrap();
    let golden = dir.path().join("golden.qcow2");
    make_rich(&golden);
    let image = Editor::open(&golden);
    image.set_len(image.len().next_multiple_of(65536) + 64 * 65536);
    for (name, edit) in DAMAGES {
        let (before, bytes) = damaged(dir.path(), &golden, *edit);
        let plan = FaultPlan::new();
        plan.fail_from(Some(OperationKind::SetLen), 0, EINVAL);
        let inner = Arc::new(MemoryStore::from_vec(bytes.clone()));
        let store = FaultStore::new(Arc::clone(&inner) as Arc<dyn Store>, &plan, StoreId(0));
        let report = check(&store, &options(Repair::All)).unwrap();
        assert!(report.is_clean(), "{name}: {report:#?}");
        let after = inner.to_vec();
        assert_eq!(after.len(), bytes.len(), "{name}");
        let path = dir.path().join("after.qcow2");
        std::fs::write(&path, after).unwrap();
        assert_eq!(stock_rc(&path), Some(0), "{name}");
        assert!(same_contents(&before, &path), "{name}");
    }
}
