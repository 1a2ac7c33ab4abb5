//! Images made to cost as much as they can: time and memory must stay in proportion to what is really there.

use std::time::{Duration, Instant};

use crate::support::*;
use vmstrata_check::{ErrorKind, FindingKind, Options, Repair, Report};

/// Generous for a debug build on a busy machine; what the images are made to cost is hours.
const PATIENCE: Duration = Duration::from_secs(60);

fn timed(path: &std::path::Path, repair: Repair) -> Result<Report, vmstrata_check::Error> {
    let start = Instant::now();
    let result = check(path, &Options { repair, ..Options::default() });
    assert!(start.elapsed() < PATIENCE, "took {:?}", start.elapsed());
    result
}

fn empty(options: &str, size: &str) -> (tempfile::TempDir, Editor) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, path.to_str().unwrap(), size]);
    let image = Editor::open(&path);
    (dir, image)
}

/// Peak memory of this process so far.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn four_million_l1_entries_of_one_full_l2_table() {
    // 2 MiB clusters: the table has 262,144 entries, walked entry by entry that is 10^12.
    let (_dir, image) = empty("cluster_size=2M", "2048P");
    let table = image.len().next_multiple_of(2 << 20);
    let data = table + (2 << 20);
    image.set_len(data + (2 << 20));
    image.put(table, &(data | COPIED).to_be_bytes().repeat((2 << 20) / 8));
    let entries = u64::from(image.u32_at(36));
    assert!(entries > 4_000_000, "{entries}");
    image.put(image.l1(), &(table | COPIED).to_be_bytes().repeat(entries as usize));
    let report = timed(&image.path, Repair::None).unwrap();
    assert!(report.corruptions > entries && report.findings_total > entries, "{report:#?}");
    assert_eq!(report.allocated_clusters, entries << 18);
}

#[test]
fn a_refcount_table_of_a_million_entries_for_one_block() {
    let (_dir, image) = empty("cluster_size=2M", "1G");
    let table = image.len().next_multiple_of(2 << 20);
    image.set_len(table + (8 << 20));
    image.put(table, &image.block(0).to_be_bytes().repeat(1 << 20));
    image.put_u64(48, table);
    image.put_u32(56, 4);
    let report = timed(&image.path, Repair::None).unwrap();
    assert!(report.corruptions >= (1 << 20) - 1, "{report:#?}");
    let report = timed(&image.path, Repair::All).unwrap();
    assert!(report.is_clean(), "{report:#?}");
    assert_eq!(stock_rc(&image.path), Some(0));
}

#[test]
fn a_petabyte_of_holes() {
    let (_dir, image) = empty("cluster_size=64k", "1G");
    qemu_io(&image.path, &["write -P 1 0 1M"]);
    // As far out as the file system lets files reach, in clusters that can be counted.
    let far = [1u64 << 46, 1 << 43]
        .into_iter()
        .find(|&len| std::fs::OpenOptions::new().write(true).open(&image.path).unwrap().set_len(len).is_ok());
    let far = far.expect("a file of 8 TiB");
    image.put_u64(image.l2_entry(20), far - 65536);
    image.put_u64(image.l1_entry(1), (far / 2) | COPIED);
    let report = timed(&image.path, Repair::None).unwrap();
    assert_eq!(report.image_end_offset.get(), far);
    assert!(report.corruptions > 0);
    assert!(peak_bytes() < 512 << 20, "{} bytes", peak_bytes());
}

#[test]
fn more_clusters_than_can_be_counted() {
    let (_dir, image) = empty("cluster_size=512", "1M");
    image.set_len(1 << 41);
    let error = timed(&image.path, Repair::None).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("qemu-img convert"), "{error}");
}

#[test]
fn sixty_thousand_snapshots_of_one_huge_l1_table() {
    let (_dir, image) = empty("cluster_size=64k", "1T");
    let count = 60_000u32;
    let (l1, table) = (image.len().next_multiple_of(65536), image.len().next_multiple_of(65536) + (32 << 20));
    let mut entry = [0; 64];
    entry[..8].copy_from_slice(&l1.to_be_bytes());
    entry[8..12].copy_from_slice(&(4u32 << 20).to_be_bytes());
    entry[12..16].copy_from_slice(&[0, 4, 0, 4]);
    entry[36..40].copy_from_slice(&16u32.to_be_bytes());
    image.set_len(table + (64 << 20));
    image.put(table, &entry.repeat(count as usize));
    image.put_u64(64, table);
    image.put_u32(60, count);
    let report = timed(&image.path, Repair::None).unwrap();
    assert!(
        report.findings.iter().any(|finding| finding.kind == FindingKind::SnapshotsOverlap),
        "{report:#?}"
    );
    assert_eq!(report.check_errors, 1);
    // Who knows what they hold: nothing is given back.
    let before = std::fs::read(&image.path).unwrap();
    timed(&image.path, Repair::All).unwrap();
    assert!(std::fs::read(&image.path).unwrap() == before, "repaired on a guess");
}

#[test]
fn thousands_of_l2_tables_off_their_boundaries() {
    let (_dir, image) = empty("cluster_size=2M", "2048P");
    let start = image.len().next_multiple_of(2 << 20);
    image.set_len(start + (1 << 30));
    // Data there, so that they are not holes.
    image.put(start + (1 << 20), &vec![0xff; 64 << 20]);
    let entries: Vec<u8> = (0..100_000u64).flat_map(|n| (start + 512 + n * 1024).to_be_bytes()).collect();
    image.put(image.l1(), &entries);
    let report = timed(&image.path, Repair::None).unwrap();
    assert!(report.corruptions >= 100_000, "{report:?}");
}
