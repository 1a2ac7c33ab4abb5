//! A disk moves while it is written: nothing is lost, whatever fails on the way, and its old file is a layer that stays as it is.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, assert_same, pattern, read, write};
use crate::common::stock::{assert_clean, content};
use crate::common::{open_with, random, scratch};
use vmstrata_disk::merge::MergeFault;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{CreateOptions, Disk, Error, Format, NewHome, OpenOptions, create};
use vmstrata_store::{FaultPlan, FileError};

const SIZE: u64 = 4 << 20;
const EIO: i32 = 5;

/// A disk, and where it moves to.
struct Move {
    path: PathBuf,
    to: NewHome,
}

impl Move {
    fn new(dir: &Path) -> Self {
        let (old, new) = (dir.join("old"), dir.join("new"));
        fs::create_dir(&old).unwrap();
        fs::create_dir(&new).unwrap();
        let path = old.join("web.qcow2");
        create(&path, &CreateOptions { size: Some(SIZE), ..CreateOptions::default() }).unwrap();
        let options = OpenOptions { allow_backing: vec![old.clone()], ..OpenOptions::default() };
        let to = NewHome { overlay: new.join("web.qcow2"), frozen: old.join("frozen.qcow2"), options };
        Self { path, to }
    }

    /// Gives the disk's file its second name, and makes the overlay.
    fn prepare(&self) {
        fs::hard_link(&self.path, &self.to.frozen).unwrap();
        self.overlay(&self.to.overlay);
    }

    fn overlay(&self, path: &Path) {
        let backing = Some((self.to.frozen.clone(), Format::Qcow2));
        create(path, &CreateOptions { size: Some(SIZE), backing, ..CreateOptions::default() }).unwrap();
    }

    fn go(&self, disk: &Disk) -> Result<(), Error> {
        let draft = self.path.with_extension("draft");
        self.overlay(&draft);
        disk.move_to(&self.to, || {
            fs::rename(&draft, &self.path).unwrap();
            Ok::<_, Error>(())
        })?;
        disk.finalize()
    }

    /// The file that has the disk's newest state.
    fn newest(&self) -> &Path {
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        if inode(&self.path) == inode(&self.to.frozen) { &self.path } else { &self.to.overlay }
    }

    fn reopened(&self) -> Arc<Disk> {
        open_with(self.newest(), &self.to.options)
    }
}

fn failure(why: &str) -> Error {
    FileError::Examine { path: PathBuf::from("old"), source: std::io::Error::other(why) }.into()
}

#[test]
fn a_disk_that_is_written_moves_and_reads_as_before() {
    let dir = scratch();
    let plan = Move::new(dir.path());
    let disk = open_with(&plan.path, &OpenOptions::default());
    plan.prepare();
    let (is_over, chunk) = (AtomicBool::new(false), 4096);
    // Each writes a part of its own again and again, and knows what it wrote last.
    let work = |part: u64| {
        let (disk, mut random) = (&disk, random("moves", part));
        let (mut model, len) = (vec![0; SIZE as usize / 2], SIZE / 2);
        let mut at = 0;
        while !is_over.load(Ordering::Relaxed) || at < 2 * len {
            let (place, bytes) = (at % len, pattern(&mut random, chunk));
            write(disk, part * len + place, &bytes).unwrap();
            assert_same(&read(disk, part * len + place, chunk).unwrap(), &bytes, place, "just written");
            model[place as usize..place as usize + chunk].copy_from_slice(&bytes);
            at += 3 * chunk as u64;
        }
        model
    };
    let model = std::thread::scope(|scope| {
        let writers = [0, 1].map(|part| scope.spawn(move || work(part)));
        plan.go(&disk).unwrap();
        assert_eq!(disk.path(), plan.to.overlay);
        is_over.store(true, Ordering::Relaxed);
        writers.map(|writer| writer.join().unwrap()).concat()
    });
    assert_reads(&disk, &model, "after the move");
    let taken = disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
    assert_eq!(taken.layer.parent(), plan.to.overlay.parent());
    disk.close().unwrap();
    drop(disk);
    for file in [&plan.to.frozen, &plan.path, &taken.layer, &plan.to.overlay] {
        assert_clean(file);
    }
    assert_same(&content(&plan.to.overlay, "qcow2"), &model, 0, "to stock tools");
    assert_reads(&plan.reopened(), &model, "opened again");
}

#[test]
fn a_move_that_is_refused_changes_nothing() {
    let dir = scratch();
    let plan = Move::new(dir.path());
    let disk = open_with(&plan.path, &OpenOptions::default());
    plan.prepare();
    let refused = disk.move_to(&plan.to, || Err(failure("no more of it")));
    assert!(refused.unwrap_err().to_string().contains("no more of it"));
    let odd = NewHome { overlay: dir.path().join("new/odd.qcow2"), ..plan.to.clone() };
    create(&odd.overlay, &CreateOptions { size: Some(SIZE / 2), ..CreateOptions::default() }).unwrap();
    let refused = disk.move_to(&odd, || -> Result<(), Error> { panic!("nothing is published") });
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("they must be of one size"), "{refused}");
    assert_eq!((disk.path(), disk.layers().len()), (&*plan.path, 1));
    write(&disk, 0, &[7; 512]).unwrap();
    plan.go(&disk).unwrap();
    assert_eq!(read(&disk, 0, 512).unwrap(), [7; 512]);
    disk.close().unwrap();
}

/// The overlay must stand on the newest layer, or it lacks what the guest wrote before the snapshot.
#[test]
fn a_snapshot_just_before_a_move_is_seen() {
    let dir = scratch();
    let plan = Move::new(dir.path());
    let disk = open_with(&plan.path, &OpenOptions::default());
    plan.prepare();
    disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
    write(&disk, 0, &[7; 512]).unwrap();
    let refused = disk.move_to(&plan.to, || -> Result<(), Error> { panic!("nothing is published") });
    assert!(matches!(refused.unwrap_err().fault(), Some(MergeFault::LayersChanged)));
    assert_eq!((disk.path(), disk.layers().len()), (&*plan.path, 2));
    write(&disk, 512, &[8; 512]).unwrap();
    disk.close().unwrap();
}

/// A name that leads elsewhere already, and a disk that goes on with its old file, would be two disks.
#[test]
fn a_disk_whose_name_leads_elsewhere_takes_no_more_writes_unless_it_has_moved() {
    let dir = scratch();
    let plan = Move::new(dir.path());
    let disk = open_with(&plan.path, &OpenOptions::default());
    write(&disk, 0, &[7; 512]).unwrap();
    disk.flush().unwrap();
    plan.prepare();
    let refused = disk.move_to(&plan.to, || {
        fs::remove_file(&plan.path).unwrap();
        plan.overlay(&plan.path);
        Err(failure("the directory cannot be flushed"))
    });
    assert!(refused.is_err() && write(&disk, 0, &[8; 512]).is_err());
    assert!(disk.close().is_err());
    drop(disk);
    assert_eq!(read(&plan.reopened(), 0, 512).unwrap(), [7; 512]);
}

#[test]
fn no_failure_of_the_host_during_a_move_loses_what_was_flushed() {
    let mut nth = 0;
    loop {
        let dir = scratch();
        let plan = Move::new(dir.path());
        let faults = FaultPlan::new();
        let resources = FaultyFiles::new(&faults).resources();
        let disk = Disk::open(&plan.path, &OpenOptions::default(), &resources).unwrap();
        let mut model = vec![0; SIZE as usize];
        let put = |model: &mut Vec<u8>, at: u64, byte: u8| {
            let written = write(&disk, at, &[byte; 5000]).and_then(|()| disk.flush());
            written.inspect(|()| model[at as usize..at as usize + 5000].fill(byte))
        };
        put(&mut model, 70_000, 1).unwrap();
        plan.prepare();
        faults.fail_nth(None, nth, EIO);
        let before = faults.count(None);
        let moved = plan.go(&disk);
        let operations = faults.count(None) - before;
        faults.clear();
        let written = put(&mut model, 72_000, 2);
        assert_eq!(written.is_ok(), disk.failure().is_none(), "{nth}: {written:?}");
        if written.is_ok() {
            assert_reads(&disk, &model, &format!("failure {nth}"));
        }
        let _ = disk.close();
        drop((disk, resources));
        let again = plan.reopened();
        assert_same(&read(&again, 0, SIZE as usize).unwrap(), &model, 0, &format!("after failure {nth}"));
        again.close().unwrap();
        if operations <= nth {
            moved.unwrap();
            break;
        }
        nth += 1;
    }
    assert!(nth > 5, "{nth} operations of a move");
}
