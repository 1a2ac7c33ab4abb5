//! A disk moves to a flat copy while it is written: a raw file, or an export of a stock NBD server.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, assert_same, pattern, write};
use crate::common::io::Client;
use crate::common::ledger::Step;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::wait::wait_until;
use crate::common::{open_with, random, scratch};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{CreateOptions, Disk, Format, OpenOptions, ResourceOptions, Resources, Together, create};
use vmstrata_migrate::follow::Order;
use vmstrata_migrate::{Error, FlatMove, FlatOptions, Move as _, Moved, Phase, moved_to};
use vmstrata_nbd::Files;
use vmstrata_store::FaultPlan;

pub(crate) const SIZE: u64 = 16 << 20;
pub(crate) const BLOCK: usize = 4096;

/// A disk with a snapshot, and what it reads as.
pub(crate) fn disk_in(dir: &Path) -> (PathBuf, Arc<Disk>, Vec<u8>) {
    fs::create_dir_all(dir).unwrap();
    let path = dir.join("web.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &SIZE.to_string()]);
    let disk = open_with(&path, &OpenOptions::default());
    let (mut model, mut random) = (vec![0; SIZE as usize], random("flat", 0));
    for number in 0..16 {
        let at = random.random_range(0..SIZE - (1 << 20)) / 512 * 512;
        let bytes = pattern(&mut random, 200 << 10);
        write(&disk, at, &bytes).unwrap();
        model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        if number == 8 {
            disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
        }
    }
    (path, disk, model)
}

pub(crate) fn options(to: &Path) -> FlatOptions {
    FlatOptions {
        to: to.to_owned(),
        open: OpenOptions::default(),
        overwrite: false,
        skip_unreadable: false,
        order: Order::Predicted,
    }
}

pub(crate) fn finish(moving: &mut FlatMove) -> u64 {
    let mut sent = 0;
    while moving.phase() != Phase::Whole {
        sent += moving.step(256 << 10).unwrap();
    }
    sent
}

/// Ends the guest, however the test ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// As a guest does, through a queue, as fast as it can: writes blocks, checks them, and zeroes some, until told to stop and a while after
/// that. Returns what the disk must read as.
fn guest(disk: &Arc<Disk>, mut model: Vec<u8>, is_over: &AtomicBool) -> Vec<u8> {
    let mut queue = Client::new(disk, 8);
    let (mut random, mut left) = (random("guest", 0), 200);
    while left > 0 {
        let at = random.random_range(0..SIZE / BLOCK as u64) * BLOCK as u64;
        let here = at as usize..at as usize + BLOCK;
        let step = if random.random_bool(0.2) {
            model[here.clone()].fill(0);
            Step::Zeroes { at, len: BLOCK as u64, unmap: true }
        } else {
            let bytes = pattern(&mut random, BLOCK);
            model[here.clone()].copy_from_slice(&bytes);
            Step::Write { at, bytes }
        };
        queue.take(&[step]).pop().unwrap().unwrap();
        let found = queue.take(&[Step::Read { at, len: BLOCK as u64 }]).pop().unwrap().unwrap().unwrap();
        assert_same(&found, &model[here], at, "just written");
        left -= u32::from(is_over.load(Ordering::Relaxed));
    }
    model
}

/// Moves a disk with a guest on it, of which others take snapshots; returns what it must read as.
pub(crate) fn move_under_a_guest(
    disk: &Arc<Disk>,
    model: Vec<u8>,
    begin: impl FnOnce() -> Result<FlatMove, Error>,
) -> Vec<u8> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let guest = scope.spawn(|| guest(disk, model, &is_over));
        // What somebody else freezes must be copied, too.
        scope.spawn(|| {
            for number in 0..8 {
                std::thread::sleep(Duration::from_millis(5 * number));
                // A raw disk would become qcow2.
                let snapshot = Together::of(&[disk]);
                let info = SnapshotInfo { name: format!("their{number}"), ..SnapshotInfo::default() };
                if snapshot.check(&info, false).is_ok() {
                    snapshot.take(&info, || {}).unwrap();
                }
            }
        });
        let mut moving = begin().unwrap();
        let began = Instant::now();
        while moving.phase() != Phase::Whole {
            moving.step(256 << 10).unwrap();
            assert!(began.elapsed() < Duration::from_secs(60), "it does not end: {:?}", moving.report());
        }
        assert_eq!(moving.report().slowed_to, None, "its guest runs freely again");
        drop(over);
        guest.join().unwrap()
    })
}

/// A stock server of a raw file.
pub(crate) struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    pub(crate) fn of(file: &Path) -> Self {
        let socket = file.with_extension("sock");
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-x", "web", "-f", "raw", "-k"]).arg(&socket).arg(file);
        let server = Self { child: command.spawn().unwrap(), socket };
        wait_until("qemu-nbd listens", || server.socket.exists());
        server
    }

    pub(crate) fn address(&self) -> PathBuf {
        format!("nbd+unix:///web?socket={}", self.socket.display()).into()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_disk_that_is_written_becomes_a_raw_file() {
    let dir = scratch();
    let (path, disk, model) = disk_in(&dir.path().join("old"));
    let to = dir.path().join("web.raw");
    let model = move_under_a_guest(&disk, model, || FlatMove::begin(&disk, &options(&to)));
    assert_eq!((disk.path(), disk.format()), (&*to, Format::Raw));
    assert_eq!(moved_to(&path), Some(Moved { path: to.clone(), is_raw: true }));
    assert!(!path.exists());
    assert_reads(&disk, &model, "after the move");
    disk.close().unwrap();
    drop(disk);
    assert_same(&fs::read(&to).unwrap(), &model, 0, "to anybody");
    // What it was is left as stock tools leave their images.
    let names = fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let images: Vec<PathBuf> =
        names.filter(|path| path.extension().is_some_and(|end| end == "qcow2")).collect();
    assert!(images.len() >= 3, "{images:?}");
    images.iter().for_each(|image| assert_clean(image));
    let notes = fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(notes.into_iter().all(|name| !name.to_string_lossy().ends_with(".sending")));
}

#[test]
fn a_disk_that_is_written_goes_to_a_stock_nbd_server_and_is_served_from_there() {
    let dir = scratch();
    let (path, disk, model) = disk_in(&dir.path().join("old"));
    // What was there before is gone.
    let file = dir.path().join("there.raw");
    fs::write(&file, vec![0xee; SIZE as usize]).unwrap();
    let server = Server::of(&file);
    let to = server.address();
    let refused = FlatMove::begin(&disk, &options(&to)).unwrap_err();
    assert!(matches!(&refused, Error::Refused { why, .. } if why.contains("--yes")), "{refused}");
    let overwrite = FlatOptions { overwrite: true, ..options(&to) };
    let model = move_under_a_guest(&disk, model, || FlatMove::begin(&disk, &overwrite));
    assert_eq!(moved_to(&path), Some(Moved { path: to.clone(), is_raw: true }));
    assert_reads(&disk, &model, "through the server");
    disk.flush().unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_same(&fs::read(&file).unwrap(), &model, 0, "what the server has");
    // A process that is started anew opens it by its address.
    let resources = Resources::start_with(ResourceOptions::default(), Arc::new(Files::default())).unwrap();
    let open = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let disk = Disk::open(&to, &open, &resources).unwrap();
    assert_reads(&disk, &model, "opened again");
    write(&disk, 0, &[7; BLOCK]).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_eq!(fs::read(&file).unwrap()[..BLOCK], [7; BLOCK]);
}

#[test]
fn a_move_that_was_stopped_sends_only_what_differs() {
    let dir = scratch();
    let (_, disk, mut model) = disk_in(&dir.path().join("old"));
    let to = dir.path().join("web.raw");
    let mut moving = FlatMove::begin(&disk, &options(&to)).unwrap();
    let mut sent = 0;
    while sent < 1 << 20 {
        sent += moving.step(256 << 10).unwrap();
    }
    drop(moving);
    write(&disk, 0, &[7; BLOCK]).unwrap();
    model[..BLOCK].fill(7);
    let elsewhere = FlatMove::begin(&disk, &options(&dir.path().join("other.raw"))).map(drop);
    elsewhere.unwrap();
    let all = model.chunks(64 << 10).filter(|piece| piece.iter().any(|byte| *byte != 0)).count() as u64
        * (64 << 10);
    // To another target from the beginning, and that is not known any more as the one it goes to.
    let known = FlatMove::begin(&disk, &options(&to)).map(drop);
    assert!(matches!(known, Err(Error::Exists { .. })), "{known:?}");
    let to = dir.path().join("other.raw");
    let mut moving = FlatMove::begin(&disk, &options(&to)).unwrap();
    let mut first = 0;
    while first < 1 << 20 {
        first += moving.step(256 << 10).unwrap();
    }
    drop(moving);
    let mut moving = FlatMove::begin(&disk, &options(&to)).unwrap();
    let second = finish(&mut moving);
    assert!(second <= all - first + (64 << 10), "{first} and {second} of {all}");
    disk.close().unwrap();
    drop(disk);
    assert_same(&fs::read(&to).unwrap(), &model, 0, "the copy");
}

#[test]
fn a_target_that_changes_what_was_written_is_found_out() {
    let dir = scratch();
    let (path, disk, model) = disk_in(&dir.path().join("old"));
    let to = dir.path().join("web.raw");
    let mut moving = FlatMove::begin(&disk, &options(&to)).unwrap();
    let at = model.iter().position(|byte| *byte != 0).unwrap() as u64;
    let mut sent = 0;
    while sent == 0 {
        sent += moving.step(64 << 10).unwrap();
    }
    File::options().write(true).open(&to).unwrap().write_all_at(&[!model[at as usize]], at).unwrap();
    let found = loop {
        if let Err(error) = moving.step(256 << 10) {
            break error;
        }
        assert_eq!(moving.phase(), Phase::Copying);
    };
    assert!(matches!(found, Error::Untrue { .. }), "{found}");
    drop(moving);
    assert_eq!((disk.path(), moved_to(&path)), (&*path, None));
    assert_reads(&disk, &model, "where it was");
    disk.close().unwrap();
    drop(disk);
    assert_same(&content(&path, "qcow2"), &model, 0, "to stock tools");
}

/// Moves a small disk that is written, and has each operation on its files fail in turn: what was flushed is where the disk is. `before` brings
/// it to where that move begins.
pub(crate) fn fail_each_operation(
    before: impl Fn(&Arc<Disk>, &Path),
    begin: impl Fn(&Arc<Disk>, &Path, OpenOptions) -> Result<FlatMove, Error>,
) {
    const SIZE: u64 = 4 << 20;
    let mut nth = 0;
    loop {
        let dir = scratch();
        let path = dir.path().join("web.qcow2");
        create(&path, &CreateOptions { size: Some(SIZE), ..CreateOptions::default() }).unwrap();
        let faults = FaultPlan::new();
        let files = FaultyFiles::new(&faults);
        let resources = files.resources();
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
        let mut model = vec![0; SIZE as usize];
        let put = |model: &mut Vec<u8>, at: u64, byte: u8| {
            let written = write(&disk, at, &[byte; 5000]).and_then(|()| disk.flush());
            written.inspect(|()| model[at as usize..at as usize + 5000].fill(byte))
        };
        put(&mut model, 70_000, 1).unwrap();
        before(&disk, dir.path());
        put(&mut model, 74_000, 3).unwrap();
        faults.fail_nth(None, nth, 5);
        let done = faults.count(None);
        let open = OpenOptions { opener: files.clone(), ..OpenOptions::default() };
        let moved = begin(&disk, dir.path(), open).and_then(|mut moving| {
            while moving.phase() != Phase::Whole {
                moving.step(1 << 20)?;
            }
            Ok(())
        });
        let operations = faults.count(None) - done;
        faults.clear();
        let written = put(&mut model, 72_000, 2);
        assert_eq!(written.is_ok(), disk.failure().is_none(), "{nth}: {written:?}");
        if written.is_ok() {
            assert_reads(&disk, &model, &format!("failure {nth}"));
        }
        let _ = disk.close();
        drop((disk, resources));
        match moved_to(&path) {
            Some(Moved { path, .. }) => {
                assert_same(&fs::read(&path).unwrap(), &model, 0, &format!("after failure {nth}"));
            }
            None => {
                let again = open_with(&path, &OpenOptions::default());
                assert_reads(&again, &model, &format!("after failure {nth}"));
                again.close().unwrap();
            }
        }
        if operations <= nth {
            moved.unwrap();
            break;
        }
        nth += 1;
    }
    assert!(nth > 20, "{nth} operations of a move");
}

#[test]
fn no_failure_of_the_host_loses_what_was_flushed() {
    let begin = |disk: &Arc<Disk>, dir: &Path, open| {
        FlatMove::begin(disk, &FlatOptions { open, ..options(&dir.join("web.raw")) })
    };
    fail_each_operation(|_, _| {}, begin);
}

/// A compressed cluster that does not decompress.
#[test]
fn what_cannot_be_read_is_passed_over_where_asked_and_told_at_the_end() {
    const CLUSTER: usize = 64 << 10;
    const BAD: usize = 5;
    let dir = scratch();
    let [raw, path, to] = ["in", "web.qcow2", "web.raw"].map(|name| dir.path().join(name));
    let mut model: Vec<u8> = (0..16 * CLUSTER).map(|at| (at / CLUSTER + 1) as u8).collect();
    fs::write(&raw, &model).unwrap();
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&path)]);
    let image = fs::read(&path).unwrap();
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let table = word(word(40) as usize) & 0x00FF_FFFF_FFFF_FE00;
    let entry = word(table as usize + BAD * 8);
    assert_eq!(entry >> 62, 1, "it is compressed");
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0; 64], entry & ((1 << 54) - 1)).unwrap();
    let disk = open_with(&path, &OpenOptions::default());
    let moved = |skip_unreadable| -> Result<FlatMove, Error> {
        let mut moving = FlatMove::begin(&disk, &FlatOptions { skip_unreadable, ..options(&to) })?;
        while moving.phase() != Phase::Whole {
            moving.step(256 << 10)?;
        }
        Ok(moving)
    };
    assert!(matches!(moved(false), Err(Error::Disk(_))));
    let moving = moved(true).unwrap();
    let bad = moving.report().unreadable;
    assert_eq!(bad.iter().map(|bad| bad.len).sum::<u64>(), CLUSTER as u64, "{bad:?}");
    assert!(bad.iter().all(|bad| bad.offset / CLUSTER as u64 == BAD as u64), "{bad:?}");
    drop(moving);
    disk.close().unwrap();
    drop(disk);
    model[BAD * CLUSTER..(BAD + 1) * CLUSTER].fill(0);
    assert_same(&fs::read(&to).unwrap(), &model, 0, "the copy");
}

#[test]
fn targets_that_cannot_be_are_refused_by_name() {
    let dir = scratch();
    let (_, disk, _) = disk_in(&dir.path().join("old"));
    let there = dir.path().join("there.raw");
    fs::write(&there, b"something").unwrap();
    let refused = |to: &Path| {
        FlatMove::begin(&disk, &FlatOptions { overwrite: true, ..options(to) }).unwrap_err().to_string()
    };
    assert!(refused(&there).ends_with("there.raw: exists already"), "{}", refused(&there));
    let nobody = PathBuf::from(format!("nbd+unix:///web?socket={}", dir.path().join("no.sock").display()));
    assert!(refused(&nobody).contains("cannot take the export"), "{}", refused(&nobody));
    assert!(refused(Path::new("nbds://127.0.0.1/web")).contains("asks for TLS"));
    let small = dir.path().join("small.raw");
    fs::write(&small, vec![0; 1 << 20]).unwrap();
    let server = Server::of(&small);
    let too_small = refused(&server.address());
    assert!(too_small.contains("has 1048576 bytes free, and 16777216 are to be copied there"), "{too_small}");
    let unknown = PathBuf::from(server.address().to_str().unwrap().replace("///web", "///db"));
    assert!(refused(&unknown).contains("no such export"), "{}", refused(&unknown));
    disk.close().unwrap();
}
