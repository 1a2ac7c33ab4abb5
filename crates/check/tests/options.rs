//! How a check is asked: leaks only, dirty images, progress, limits on findings and memory.

use std::sync::{Arc, Mutex};

use crate::support::guest::*;
use crate::support::*;
use vmstrata_check::{ErrorKind, FindingKind, Options, Phase, Progress, Repair};

fn rich() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    make_rich(&path);
    (dir, path)
}

#[test]
fn giving_back_leaks_leaves_other_damage_alone() {
    let (_dir, path) = rich();
    let image = Editor::open(&path);
    image.set_refcount(image.host(OWN), 5);
    image.set_refcount(image.snapshots(), 2);
    image.set_refcount(image.host(SHARED), 1);
    let before = agree(&path, "leaks and more");
    assert_eq!((before.leaks, image.refcount(image.host(OWN))), (2, 5));
    let report = repair(&path, Repair::Leaks);
    assert_eq!((report.leaks, report.leaks_fixed), (0, 2), "{report:#?}");
    assert_eq!(image.refcount(image.host(OWN)), 1);
    assert_eq!(image.refcount(image.host(SHARED)), 1, "raising refcounts was not asked for");
    assert!(report.corruptions > 0);
    assert_eq!(Judgement::from(&report), Judgement::by_stock(&path).unwrap());
}

#[test]
fn a_cluster_that_is_no_longer_shared_gets_its_copied_flag_back() {
    let (_dir, path) = rich();
    let image = Editor::open(&path);
    // Stock forgets the flag together with the refcount: consistent, but leaked.
    image.set_refcount(image.host(OWN), 2);
    image.map(image.l2_entry(OWN), |raw| raw & !COPIED);
    assert_eq!(agree(&path, "leaked share").corruptions, 0);
    let report = repair(&path, Repair::Leaks);
    assert!(report.is_clean(), "{report:#?}");
    assert_eq!(image.u64_at(image.l2_entry(OWN)) & COPIED, COPIED);
    assert_eq!(stock_rc(&path), Some(0));
}

#[test]
fn repairs_of_leaks_do_what_stock_does() {
    let (dir, path) = rich();
    // QEMU 7.2 forgets the snapshots of an image with bitmaps when it repairs it.
    must("qemu-img", &["bitmap", "-f", "qcow2", "--remove", path.to_str().unwrap(), "b0"]);
    let image = Editor::open(&path);
    for (host, refcount) in
        [(image.host(OWN), 3), (image.host(OWN_TOO), 2), (image.l1(), 2), (image.snapshots(), 9)]
    {
        image.set_refcount(host, refcount);
    }
    let theirs = dir.path().join("theirs.qcow2");
    std::fs::copy(&path, &theirs).unwrap();
    must("qemu-img", &["check", "-q", "-r", "leaks", theirs.to_str().unwrap()]);
    assert!(repair(&path, Repair::Leaks).is_clean());
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&theirs).unwrap(), "other bytes than stock");
}

#[test]
fn an_image_left_dirty_by_a_killed_writer_is_made_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lazy.qcow2");
    let name = path.to_str().unwrap();
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", name, "1G"]);
    let writes: Vec<String> = (0..40).map(|n| format!("write -P {} {}M 1M", n + 1, n * 7)).collect();
    let mut args = vec!["-f", "qcow2"];
    writes.iter().for_each(|write| args.extend(["-c", write]));
    // Kills itself without closing anything.
    args.extend(["-c", "flush", "-c", "sigraise 9", name]);
    assert!(!run("qemu-io", &args).status.success());
    let report = agree(&path, "dirty");
    assert!(report.dirty && report.corruptions > 500, "{report:?}");
    let before = dir.path().join("before.qcow2");
    std::fs::copy(&path, &before).unwrap();
    let report = repair(&path, Repair::All);
    assert!(report.is_clean() && !report.dirty && report.corruptions_fixed > 500, "{report:?}");
    assert_eq!(stock_rc(&path), Some(0));
    assert!(same_contents(&before, &path));
    qemu_io(&path, &["read -P 40 273M 1M", "write -P 99 500M 1M", "read -P 1 0 1M"]);
    assert_eq!(stock_rc(&path), Some(0));
}

#[test]
fn the_first_findings_are_kept_and_all_are_counted() {
    let (_dir, path) = rich();
    let image = Editor::open(&path);
    image.put(image.block(0), &[0; 65536]);
    let all = check(&path, &Options { findings_max: 10_000, ..Options::default() }).unwrap();
    assert!(all.findings_total > 30 && all.findings.len() as u64 == all.findings_total);
    assert!(all.findings.is_sorted_by_key(|finding| finding.at));
    for findings_max in [0, 1, 7] {
        let some = check(&path, &Options { findings_max, ..Options::default() }).unwrap();
        assert_eq!(some.findings, all.findings[..findings_max]);
        assert_eq!((some.findings_total, some.corruptions), (all.findings_total, all.corruptions));
    }
}

#[test]
fn progress_reaches_the_end_of_each_phase() {
    let (_dir, path) = rich();
    let image = Editor::open(&path);
    image.set_refcount(image.host(OWN), 0);
    let seen = Arc::new(Mutex::new(Vec::<Progress>::new()));
    let log = Arc::clone(&seen);
    let options = Options {
        repair: Repair::All,
        progress: Some(Arc::new(move |progress| log.lock().unwrap().push(progress))),
        ..Options::default()
    };
    assert!(check(&path, &options).unwrap().is_clean());
    let seen = seen.lock().unwrap();
    assert!(seen.iter().all(|progress| progress.done <= progress.total));
    for phase in [Phase::Refcounts, Phase::Tables, Phase::Repair] {
        assert!(
            seen.iter().any(|progress| progress.phase == phase && progress.done == progress.total),
            "{phase:?}"
        );
    }
}

#[test]
fn a_memory_limit_is_an_error_that_says_so() {
    let (_dir, path) = rich();
    let error = check(&path, &Options { memory_bytes_max: 100, ..Options::default() }).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Memory { bytes_max: 100 }), "{error}");
    assert!(error.to_string().contains("100 bytes"), "{error}");
}

#[test]
fn a_raw_file_is_no_image_to_check() {
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("raw");
    std::fs::write(&raw, vec![0; 1 << 20]).unwrap();
    assert!(check(&raw, &Options::default()).unwrap_err().to_string().contains("not a qcow2 image"));
}

#[test]
fn findings_name_the_entry_and_the_cluster() {
    let (_dir, path) = rich();
    let image = Editor::open(&path);
    let (entry, host) = (image.l2_entry(OWN), image.host(OWN));
    image.map(entry, |raw| raw & !COPIED);
    image.set_refcount(image.host(OWN_TOO), 0);
    let report = ours(&path);
    let found = |at: u64| report.findings.iter().filter(move |finding| finding.at.get() == at);
    assert!(found(entry).any(|finding| finding.to_string().contains(&format!("{host:#x}"))), "{report:#?}");
    let low = FindingKind::RefcountTooLow { refcount: 0, references: 1 };
    assert!(found(image.host(OWN_TOO)).any(|finding| finding.kind == low), "{report:#?}");
}
