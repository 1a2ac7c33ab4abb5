//! Races of the engine, each brought about on purpose: files stop at the worst moment until the test lets them go on.

use crate::common;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_same, range, read, write};
use crate::common::io::Client;
use crate::common::stock::{path_str, qemu_img};
use crate::common::{open_read_only, scratch, stock, wait_until};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{
    Disk, ErrorKind, LocalFiles, Op, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
    snapshot_together,
};
use vmstrata_store::{
    Crash, CrashKind, Effect, Fault, FaultPlan, Gate, Operation, OperationKind, Record, Segment, Store,
    Survivors, When, total_len,
};
use vmstrata_types::HostOffset;

const PATIENCE: Duration = Duration::from_secs(20);

/// Holds the next read of a given length back after it has read, until it is let go.
#[derive(Debug, Default)]
struct Barrier {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Hold the next read of this many bytes.
    wanted: Option<usize>,
    holding: bool,
    let_go: bool,
}

impl Barrier {
    fn hold_next(&self, len: usize) {
        *self.state.lock().unwrap() = State { wanted: Some(len), ..State::default() };
    }

    fn after_read(&self, len: usize) {
        let mut state = self.state.lock().unwrap();
        if state.wanted != Some(len) {
            return;
        }
        state.wanted = None;
        state.holding = true;
        self.changed.notify_all();
        let (mut state, waited) =
            self.changed.wait_timeout_while(state, PATIENCE, |state| !state.let_go).unwrap();
        assert!(!waited.timed_out(), "nobody let the read go");
        state.holding = false;
    }

    fn wait_until_held(&self) {
        let state = self.state.lock().unwrap();
        let (_state, waited) =
            self.changed.wait_timeout_while(state, PATIENCE, |state| !state.holding).unwrap();
        assert!(!waited.timed_out(), "no read came");
    }

    fn let_go(&self) {
        self.state.lock().unwrap().let_go = true;
        self.changed.notify_all();
    }
}

#[derive(Debug)]
struct HeldStore {
    inner: Arc<dyn Store>,
    barrier: Arc<Barrier>,
}

impl Store for HeldStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> std::io::Result<usize> {
        let read = self.inner.read_segments(segments, at)?;
        self.barrier.after_read(total_len(segments));
        Ok(read)
    }
    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> std::io::Result<()> {
        self.inner.write_segments(segments, at)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.inner.flush()
    }
    fn punch_hole(&self, at: HostOffset, len: u64) -> std::io::Result<()> {
        self.inner.punch_hole(at, len)
    }
    fn len(&self) -> std::io::Result<u64> {
        self.inner.len()
    }
    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.inner.set_len(len)
    }
}

#[derive(Debug)]
struct HeldFiles(Arc<Barrier>);

impl Opener for HeldFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = LocalFiles.open(path, role, gate)?;
        let store = HeldStore { inner: opened.store, barrier: Arc::clone(&self.0) };
        Ok(Opened { store: Arc::new(store), identity: opened.identity })
    }
}

/// Housekeeping that was giving clusters back when the disk was closed must not go on after the close: the file may
/// have another writer by then.
#[test]
fn nothing_is_written_after_a_close() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "16M"]);
    let plan = FaultPlan::new();
    let disk = Disk::open(&path, &OpenOptions::default(), &FaultyFiles::new(&plan).resources()).unwrap();
    write(&disk, 0, &vec![0x11; 8 << 20]).unwrap();
    disk.flush().unwrap();
    for number in 0..64 {
        disk.discard(range(number << 17, 65536)).unwrap();
    }
    disk.flush().unwrap();
    let kind = Some(OperationKind::Write);
    plan.add(Fault { kind, store: None, when: When::Nth(0), effect: Effect::Hold });
    assert!(plan.wait_until_held(1, PATIENCE), "housekeeping gave nothing back");
    std::thread::scope(|scope| {
        let close = scope.spawn(|| disk.close());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!close.is_finished(), "the close did not wait");
        plan.release();
        close.join().unwrap().unwrap();
    });
    let writes = plan.count(kind);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(plan.count(kind), writes, "written after the close");
    drop(disk);
    stock::assert_clean(&path);
}

/// A guest that never flushes loses a few seconds of work to a power failure, not all of it.
#[test]
fn changes_that_no_one_flushes_are_committed_after_a_while() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1M"]);
    let before = std::fs::read(&path).unwrap();
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    let disk = Disk::open(&path, &OpenOptions::default(), &files.resources()).unwrap();
    write(&disk, 0, &[0x11; 65536]).unwrap();
    let after_power_failure = || {
        let crash = Crash { kind: CrashKind::Power, at: plan.now(), survivors: Survivors::None };
        let copy = dir.path().join("copy");
        std::fs::write(&copy, crash.image(&before, &plan.log(), files.id(&path))).unwrap();
        read(&open_read_only(&copy), 0, 65536).unwrap()
    };
    assert_same(&after_power_failure(), &[0; 65536], 0, "at once");
    wait_until("a commit", || after_power_failure() == [0x11; 65536]);
    disk.close().unwrap();
}

#[test]
fn a_closed_disk_refuses_everything_and_closes_twice() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1M"]);
    let disk = common::open(&path);
    disk.close().unwrap();
    let results = [
        read(&disk, 0, 512).map(drop),
        write(&disk, 0, &[1; 512]),
        disk.flush(),
        disk.discard(range(0, 65536)),
        disk.write_zeroes(range(0, 512), true),
        disk.extents(range(0, 512), 1).map(drop),
    ];
    for result in results {
        assert!(matches!(result.unwrap_err().kind(), ErrorKind::Closed));
    }
    let mut client = Client::new(&disk, 8);
    client.push(Op::Read, 0, 512, None);
    client.push(Op::Flush, 0, 0, None);
    assert!(client.drain().iter().all(|done| done.result.is_err()));
    disk.close().unwrap();
}

/// A page that is read from the image just before a commit writes it, and filled just after the commit has
/// forgotten its changes, must show the changes.
#[test]
fn a_page_filled_while_its_changes_are_committed_is_not_stale() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", path_str(&path), "16M"]);
    let barrier = Arc::new(Barrier::default());
    let options = ResourceOptions { metadata_cache_bytes: 0, ..ResourceOptions::default() };
    let resources = Resources::with_opener(options, Arc::new(HeldFiles(Arc::clone(&barrier))));
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    // An L2 table of 512-byte clusters covers 32 KiB, and a page of the cache 256 KiB: 64 pages in a cache of 32.
    write(&disk, 512, &[0x11; 512]).unwrap();
    disk.flush().unwrap();
    write(&disk, 0, &[0x22; 512]).unwrap();
    for page in 1..64 {
        read(&disk, page << 18, 512).unwrap();
    }
    barrier.hold_next(512);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&disk, 0, 512).unwrap());
        barrier.wait_until_held();
        disk.flush().unwrap();
        barrier.let_go();
        assert_same(&reader.join().unwrap(), &[0x22; 512], 0, "the read that filled the page");
    });
    assert_same(&read(&disk, 0, 512).unwrap(), &[0x22; 512], 0, "a later read");
    disk.close().unwrap();
    drop(disk);
    stock::assert_clean(&path);
}

/// A reader that is about to read compressed clusters, and a first write that takes one of them away.
#[test]
fn a_compressed_cluster_that_is_written_to_meanwhile_is_read_where_it_is_now() {
    const CLUSTER: usize = 65536;
    let dir = scratch();
    let (raw, path) = (dir.path().join("raw"), dir.path().join("disk"));
    let mut model: Vec<u8> = (0..4 * CLUSTER).map(|byte| (byte / 512) as u8).collect();
    std::fs::write(&raw, &model).unwrap();
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&path)]);
    let plan = FaultPlan::new();
    let disk = Disk::open(&path, &OpenOptions::default(), &FaultyFiles::new(&plan).resources()).unwrap();
    disk.warm_map().unwrap();
    // The first cluster's bytes.
    let kind = Some(OperationKind::Read);
    plan.add(Fault { kind, store: None, when: When::Nth(0), effect: Effect::Hold });
    let found = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&disk, 0, model.len()));
        assert!(plan.wait_until_held(1, PATIENCE), "the cluster was not read");
        write(&disk, 2 * CLUSTER as u64, &[7; 4096]).unwrap();
        disk.discard(range(3 * CLUSTER as u64, CLUSTER as u64)).unwrap();
        plan.release();
        reader.join().unwrap().unwrap()
    });
    model[2 * CLUSTER..][..4096].fill(7);
    model[3 * CLUSTER..].fill(0);
    assert_same(&found, &model, 0, "what was there before the reader came to it");
    disk.close().unwrap();
}

/// Housekeeping that has taken clusters to give back waits for readers; a snapshot that ends meanwhile must wait for it.
#[test]
fn nothing_is_written_to_a_layer_after_it_was_frozen() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1M"]);
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    let disk = Disk::open(&path, &OpenOptions::default(), &files.resources()).unwrap();
    write(&disk, 0, &vec![0x11; 1 << 20]).unwrap();
    disk.flush().unwrap();
    let kind = Some(OperationKind::Read);
    plan.add(Fault { kind, store: None, when: When::Nth(0), effect: Effect::Hold });
    let written = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&disk, 0, 4096));
        assert!(plan.wait_until_held(1, PATIENCE), "nothing was read");
        disk.discard(range(65536, 65536)).unwrap();
        disk.flush().unwrap();
        // If housekeeping comes later, it is the snapshot that waits for the reader: as well.
        std::thread::sleep(Duration::from_millis(1500));
        let snapshot = scope.spawn(|| {
            let info = SnapshotInfo { name: "state".into(), ..SnapshotInfo::default() };
            snapshot_together(&[&disk], &info).unwrap();
            plan.now()
        });
        std::thread::sleep(Duration::from_millis(100));
        plan.release();
        reader.join().unwrap().unwrap();
        let frozen_at = snapshot.join().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let is_late = |record: &&Record| {
            let changes = matches!(record.operation, Operation::Write { .. } | Operation::PunchHole { .. });
            record.store == files.id(&path) && record.issued > frozen_at && changes
        };
        plan.log().iter().filter(is_late).count()
    });
    assert_eq!(written, 0, "written after it was frozen");
    disk.close().unwrap();
}

/// A long request takes its turns with others at the workers, and is carried out whole nevertheless.
#[test]
fn who_asks_for_much_at_once_lets_others_pass() {
    const LEN: usize = 11 << 20;
    const AT: u64 = (2 << 20) - 512;
    let dir = scratch();
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    // One worker for both.
    let resources = files.resources();
    let open = |name: &str| {
        let path = dir.path().join(name);
        qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "32M"]);
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
        (Client::new(&disk, 8), disk, files.id(&path))
    };
    let (mut greedy, greedy_disk, greedy_id) = open("greedy");
    let (mut modest, modest_disk, modest_id) = open("modest");
    let bytes: Vec<u8> = (0..LEN).map(|byte| (byte / 512) as u8).collect();
    let kind = Some(OperationKind::Write);
    plan.add(Fault { kind, store: Some(greedy_id), when: When::Nth(0), effect: Effect::Hold });
    greedy.push(Op::Write { fua: true }, AT, LEN as u64, Some(&bytes));
    greedy.submit();
    assert!(plan.wait_until_held(1, PATIENCE), "nothing was written");
    // More than a small write, which could be made without a worker.
    modest.push(Op::Discard, 0, 1 << 20, None);
    modest.push(Op::Flush, 0, 0, None);
    modest.submit();
    plan.release();
    for done in modest.drain().into_iter().chain(greedy.drain()) {
        done.result.unwrap();
    }
    let last_of = |id, found: fn(&Operation) -> bool| {
        plan.log().iter().rposition(|record| record.store == id && found(&record.operation)).unwrap()
    };
    let flushed = last_of(modest_id, |operation| matches!(operation, Operation::Flush));
    let written = last_of(
        greedy_id,
        |operation| matches!(operation, Operation::Write { bytes, .. } if bytes.len() > 65536),
    );
    assert!(flushed < written, "one disk waited for all of the other's request");
    assert_same(&read(&greedy_disk, AT, LEN).unwrap(), &bytes, AT, "written in pieces");
    for disk in [greedy_disk, modest_disk] {
        disk.close().unwrap();
    }
}

/// The image alone has what a killed process leaves of a disk of version 2.
#[test]
fn a_write_into_a_cluster_that_is_not_in_the_image_yet_is_not_done_before_it_is() {
    let dir = scratch();
    let path = dir.path().join("old.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "compat=0.10", path_str(&path), "1M"]);
    let plan = FaultPlan::new();
    let resources = FaultyFiles::new(&plan).resources_with(Some(dir.path().join("journals")));
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    write(&disk, 0, &[1; 512]).unwrap();
    let hold = |kind| Fault { kind: Some(kind), store: None, when: When::From(0), effect: Effect::Hold };
    plan.add(hold(OperationKind::Flush));
    let left = dir.path().join("left.qcow2");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| write(&disk, 65536, &[2; 512]));
        assert!(plan.wait_until_held(1, PATIENCE));
        let seen = read(&disk, 65536, 1).unwrap();
        let second = scope.spawn(|| {
            write(&disk, 65536 + 8192, &[3; 512]).unwrap();
            std::fs::copy(&path, &left).unwrap();
        });
        plan.clear();
        first.join().unwrap().unwrap();
        second.join().unwrap();
        assert_eq!(seen, [0], "a request that sees the cluster writes into it, and is answered");
        let found = read(&open_read_only(&left), 65536 + 8192, 1).unwrap();
        assert_eq!(found, [3], "it was answered, and a killed process loses it");
    });
    disk.close().unwrap();
}
