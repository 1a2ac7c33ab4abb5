//! A disk moves with its history while it is written, and nothing is lost, whatever happens on the way.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::flat::{assert_reads, assert_same, pattern, read, write};
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::{for_seeds, open_with, random, scratch, small_resources};
use rand::Rng as _;
use vmstrata_disk::merge::{Direction, Merge, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::{self, SnapshotInfo, list};
use vmstrata_disk::{Disk, NewHome, OpenOptions};
use vmstrata_migrate::follow::Order;
use vmstrata_migrate::{Error, FlatMove, FlatOptions, Move, MoveOptions, Moving, Phase, source_directory};
use vmstrata_types::LayerIndex;

const SIZE: u64 = 16 << 20;
const BLOCK: usize = 4096;
/// What the child finds its orders in: the disk's old path, and the target.
const ORDERS: &str = "VMSTRATA_TEST_MOVE_CHILD";
/// What the child says when its guest writes to the target.
const SWITCHED: &str = "switched";

fn options(to: &Path) -> MoveOptions {
    let order = Order::Predicted;
    MoveOptions { rest: 64 << 10, order, ..MoveOptions::new(to.to_owned(), OpenOptions::default()) }
}

fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

/// A directory with a disk of some snapshots, and what each of them reads as, the disk's own state last.
fn with_history(dir: &Path, snapshots: usize) -> (PathBuf, Vec<Vec<u8>>) {
    fs::create_dir_all(dir).unwrap();
    let path = dir.join("web.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &SIZE.to_string()]);
    let disk = open_with(&path, &OpenOptions::default());
    let (mut model, mut random) = (vec![0; SIZE as usize], random("history", snapshots as u64));
    let mut states = Vec::new();
    for number in 0..=snapshots {
        for _ in 0..8 {
            let at = random.random_range(0..SIZE - (1 << 20)) / 512 * 512;
            let bytes = pattern(&mut random, 200 << 10);
            write(&disk, at, &bytes).unwrap();
            model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        }
        states.push(model.clone());
        if number < snapshots {
            disk.snapshot(&named(&format!("s{number}"))).unwrap();
        }
    }
    disk.close().unwrap();
    (path, states)
}

/// Goes on until the disk is whole; returns the bytes sent.
fn finish(moving: &mut impl Move) -> u64 {
    let mut sent = 0;
    while moving.phase() != Phase::Whole {
        sent += moving.step(256 << 10).unwrap();
    }
    sent
}

/// Goes on until the guest writes to the target.
fn switch(moving: &mut impl Move) {
    while moving.phase() == Phase::Copying {
        moving.step(256 << 10).unwrap();
    }
}

fn moved_to(path: &Path) -> Option<PathBuf> {
    vmstrata_migrate::moved_to(path).map(|moved| moved.path)
}

fn directories(dir: &Path) -> (PathBuf, PathBuf) {
    let (old, new) = (dir.join("old"), dir.join("new"));
    fs::create_dir_all(&old).unwrap();
    fs::create_dir_all(&new).unwrap();
    (old, new)
}

fn files_in(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_disk_that_is_written_moves_with_all_its_snapshots() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 3);
    let disk = open_with(&path, &OpenOptions::default());
    let is_over = AtomicBool::new(false);
    let (moving, model) = std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let (mut random, mut model) = (random("guest", 0), states[3].clone());
            let mut written = 0;
            while !is_over.load(Ordering::Relaxed) || written < 1000 {
                let at = random.random_range(0..SIZE / BLOCK as u64) * BLOCK as u64;
                let bytes = pattern(&mut random, BLOCK);
                write(&disk, at, &bytes).unwrap();
                assert_same(&read(&disk, at, BLOCK).unwrap(), &bytes, at, "just written");
                model[at as usize..at as usize + BLOCK].copy_from_slice(&bytes);
                written += 1;
            }
            model
        });
        let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
        finish(&mut moving);
        is_over.store(true, Ordering::Relaxed);
        (moving, guest.join().unwrap())
    });
    let to = new.join("web.qcow2");
    assert_eq!((disk.path(), moved_to(&path)), (&*to, Some(to.clone())));
    assert!(!path.exists());
    assert_eq!(source_directory(&to), None, "nothing of it is needed");
    assert!(disk.layers().iter().all(|layer| layer.path.parent() == Some(&*new)), "{:?}", disk.layers());
    assert_reads(&disk, &model, "after the move");
    // The old files are not needed.
    let away = dir.path().join("away");
    fs::rename(&old, &away).unwrap();
    let froze = moving.report().froze;
    assert!(!froze.is_empty());
    for (number, state) in states[..3].iter().enumerate() {
        let found = snapshot::find(&to, &format!("s{number}"), &OpenOptions::default()).unwrap();
        assert_eq!(found.layer.parent(), Some(&*new));
        assert_same(&content(&found.layer, "qcow2"), state, 0, "a snapshot, to stock tools");
        assert_clean(&found.layer);
        assert!(found.is_own());
    }
    fs::rename(&away, &old).unwrap();
    let gone = moving.let_go().unwrap();
    assert!(gone.iter().all(|file| file.kept.is_none()), "{gone:?}");
    assert_eq!(files_in(&old), [".web.qcow2.moved"]);
    disk.close().unwrap();
    drop(disk);
    assert_clean(&to);
    assert_same(&content(&to, "qcow2"), &model, 0, "to stock tools");
    let parts = files_in(&new).into_iter().filter(|name| name.contains(".part") || name.contains(".moving"));
    assert_eq!(parts.count(), 0, "{:?}", files_in(&new));
}

#[test]
fn a_base_in_another_directory_moves_too_and_stays_for_those_who_need_it() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let bases = dir.path().join("bases");
    let (base, states) = with_history(&bases, 0);
    let make = |name: &str| {
        let path = old.join(name);
        let format = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&base), path_str(&path)];
        qemu_img(&format);
        path
    };
    let allowed = OpenOptions { allow_backing: vec![bases.clone()], ..OpenOptions::default() };
    for (number, name) in ["one.qcow2", "two.qcow2"].into_iter().enumerate() {
        let disk = open_with(&make(name), &allowed);
        write(&disk, 0, &[7; BLOCK]).unwrap();
        let how = MoveOptions { open: allowed.clone(), ..options(&new) };
        let mut moving = Moving::begin(&disk, &how).unwrap();
        let sent = finish(&mut moving);
        // The second disk finds its base there.
        assert_eq!(sent > 1 << 20, number == 0, "{sent} bytes");
        moving.let_go().unwrap();
        disk.close().unwrap();
        drop(disk);
        assert!(base.exists(), "it lies in no directory of the disk's");
        let mut model = states[0].clone();
        model[..BLOCK].fill(7);
        assert_same(&content(&new.join(name), "qcow2"), &model, 0, "to stock tools");
    }
}

#[test]
fn a_disk_that_moves_back_finds_its_old_files() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 2);
    let disk = open_with(&path, &OpenOptions::default());
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    let sent = finish(&mut moving);
    drop(moving);
    write(&disk, 0, &[7; BLOCK]).unwrap();
    let mut back = Moving::begin(&disk, &options(&old)).unwrap();
    assert!(finish(&mut back) * 4 < sent);
    back.let_go().unwrap();
    assert_eq!((disk.path(), moved_to(&path)), (&*path, None));
    let mut model = states[2].clone();
    model[..BLOCK].fill(7);
    assert_reads(&disk, &model, "moved there and back");
    disk.close().unwrap();
    drop(disk);
    assert_eq!(files_in(&new), [".web.qcow2.moved"]);
    assert_same(&content(&path, "qcow2"), &model, 0, "to stock tools");
    let own = list(&path, &OpenOptions::default()).unwrap();
    assert_eq!(
        own.iter().filter(|snapshot| snapshot.name().is_some_and(|name| name.starts_with('s'))).count(),
        2
    );
}

#[test]
fn what_cannot_be_moved_is_refused_and_stays_as_it_is() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 1);
    let disk = open_with(&path, &OpenOptions::default());
    let refused = |to: &Path| Moving::begin(&disk, &options(to)).unwrap_err().to_string();
    assert!(refused(&old).contains("it is there"));
    assert!(refused(Path::new("/")).contains("root directory"));
    assert!(refused(&dir.path().join("none")).contains("No such file"));
    assert!(refused(&path).contains("no directory"));
    fs::write(new.join("web.qcow2"), "somebody's").unwrap();
    assert!(refused(&new).contains("exists already"));
    fs::remove_file(new.join("web.qcow2")).unwrap();
    assert_eq!((disk.path(), disk.layers().len()), (&*path, 2));
    assert_reads(&disk, &states[1], "as before");
    disk.close().unwrap();
    drop(disk);
    let disk = open_with(&path, &OpenOptions { read_only: true, ..OpenOptions::default() });
    let error = Moving::begin(&disk, &options(&new)).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
}

/// Names at the target may be taken, by files of the same length, too.
#[test]
fn a_layer_whose_name_is_taken_gets_another() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 2);
    let disk = open_with(&path, &OpenOptions::default());
    let other = |number: usize, len: u64| {
        let name = disk.layers()[number].path.file_name().unwrap().to_owned();
        fs::File::create(new.join(name)).unwrap().set_len(len).unwrap();
    };
    other(0, fs::metadata(&disk.layers()[0].path).unwrap().len());
    other(1, 9);
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    finish(&mut moving);
    moving.let_go().unwrap();
    disk.close().unwrap();
    drop(disk);
    let names = files_in(&new);
    assert!(
        ["web.s0.2.qcow2", "web.s1.2.qcow2"].iter().all(|name| names.iter().any(|is| is == name)),
        "{names:?}"
    );
    assert_same(&content(&new.join("web.qcow2"), "qcow2"), &states[2], 0, "to stock tools");
    assert_same(&content(&new.join("web.s1.2.qcow2"), "qcow2"), &states[1], 0, "to stock tools");
}

/// The same bytes say something else over another base.
#[test]
fn a_layer_over_another_base_is_another_layer() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 2);
    let layers: Vec<PathBuf> = [0, 1].map(|number| old.join(format!("web.s{number}.qcow2"))).into();
    // Another disk with these names: its base is another, and what stands on that has the same bytes.
    let at = |layer: &Path| new.join(layer.file_name().unwrap());
    fs::copy(&layers[1], at(&layers[1])).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&at(&layers[0])), &SIZE.to_string()]);
    let disk = open_with(&path, &OpenOptions::default());
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    finish(&mut moving);
    moving.let_go().unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_same(&content(&new.join("web.qcow2"), "qcow2"), &states[2], 0, "to stock tools");
    assert_same(&content(&new.join("web.s1.2.qcow2"), "qcow2"), &states[1], 0, "the snapshot");
}

/// Layers of one name, from several directories.
#[test]
fn layers_of_one_name_do_not_meet() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let bases = dir.path().join("bases");
    let (base, states) = with_history(&bases, 0);
    let path = old.join("disk.qcow2");
    let middle = old.join("web.qcow2");
    for (below, above) in [(&base, &middle), (&middle, &path)] {
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(below), path_str(above)]);
    }
    let how = MoveOptions {
        open: OpenOptions { allow_backing: vec![bases], ..OpenOptions::default() },
        ..options(&new)
    };
    let disk = open_with(&path, &how.open);
    let mut moving = Moving::begin(&disk, &how).unwrap();
    finish(&mut moving);
    drop(moving);
    disk.close().unwrap();
    drop(disk);
    fs::rename(&old, dir.path().join("away")).unwrap();
    fs::rename(dir.path().join("bases"), dir.path().join("gone")).unwrap();
    assert_same(&content(&new.join("disk.qcow2"), "qcow2"), &states[0], 0, "to stock tools");
    assert!(new.join("web.qcow2").exists() && new.join("web.2.qcow2").exists(), "{:?}", files_in(&new));
}

/// Whenever that is: also while what was written last is copied, from a directory that the disk is not in any more.
#[test]
fn snapshots_that_are_taken_on_the_way_move_too_and_stay_held() {
    for_seeds(12, |seed| {
        let dir = scratch();
        let (old, new) = directories(dir.path());
        let (path, mut states) = with_history(&old, 1);
        let mut random = random("on the way", seed);
        let disk = open_with(&path, &OpenOptions::default());
        snapshot::hold(&path, "s0", "backup", &OpenOptions::default()).unwrap();
        let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
        let mut model = states.pop().unwrap();
        let mut taken = 0;
        while moving.phase() != Phase::Whole {
            moving.step(random.random_range(1..1 << 20)).unwrap();
            let at = random.random_range(0..SIZE / BLOCK as u64) * BLOCK as u64;
            let bytes = pattern(&mut random, BLOCK);
            write(&disk, at, &bytes).unwrap();
            model[at as usize..at as usize + BLOCK].copy_from_slice(&bytes);
            if random.random_range(0..12) == 0 {
                disk.snapshot(&named(&format!("way-{taken}"))).unwrap();
                states.push(model.clone());
                taken += 1;
            }
        }
        moving.let_go().unwrap();
        assert_reads(&disk, &model, "moved");
        disk.close().unwrap();
        drop(disk);
        assert_eq!(files_in(&old), [".web.qcow2.moved"]);
        let to = new.join("web.qcow2");
        assert_same(&content(&to, "qcow2"), &model, 0, "to stock tools");
        let names = (0..taken).map(|number| format!("way-{number}"));
        for (name, state) in std::iter::once("s0".to_owned()).chain(names).zip(&states) {
            let found = snapshot::find(&to, &name, &OpenOptions::default()).unwrap();
            assert_same(&content(&found.layer, "qcow2"), state, 0, &name);
            assert_clean(&found.layer);
            assert_eq!(found.holds().unwrap().len(), usize::from(name == "s0"));
        }
    });
}

/// As a merge does, or a retention rule that gives the name of a dropped snapshot to another.
#[test]
fn a_layer_that_has_changed_since_it_was_copied_is_copied_again() {
    for direction in [Direction::Stream, Direction::Commit] {
        let dir = scratch();
        let (old, new) = directories(dir.path());
        let (path, states) = with_history(&old, 3);
        let disk = open_with(&path, &OpenOptions::default());
        let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
        while !new.join("web.s2.qcow2").exists() {
            moving.step(1 << 20).unwrap();
        }
        assert_eq!(moving.phase(), Phase::Copying);
        drop(moving);
        let index = LayerIndex::new;
        let dropped = MergeRange { first: index(1), last: index(1) };
        let merge = MergeOptions { removal: Removal::All, direction, ..MergeOptions::default() };
        Merge::of_disk(&disk, dropped, &merge).unwrap().run().unwrap();
        let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
        finish(&mut moving);
        moving.let_go().unwrap();
        assert_reads(&disk, &states[3], "moved");
        disk.close().unwrap();
        drop(disk);
        let to = new.join("web.qcow2");
        assert_same(&content(&to, "qcow2"), &states[3], 0, "to stock tools");
        for number in [0, 2] {
            let found = snapshot::find(&to, &format!("s{number}"), &OpenOptions::default()).unwrap();
            assert_same(&content(&found.layer, "qcow2"), &states[number], 0, "a snapshot");
        }
    }
}

/// A disk whose switch to another directory was cut short by a kill: what was made there, its second name here, and its states.
fn half_switched(old: &Path, new: &Path) -> (Arc<Disk>, PathBuf, PathBuf, Vec<Vec<u8>>) {
    let (path, states) = with_history(old, 1);
    let disk = open_with(&path, &OpenOptions::default());
    drop(Moving::begin(&disk, &options(new)).unwrap());
    let (to, frozen) = (new.join("web.qcow2"), old.join("web.move-1.qcow2"));
    let note = format!("{{\"version\":1,\"to\":\"{}\"}}", to.display());
    let file = File::options().write(true).create_new(true).mode(0o600).open(old.join(".web.qcow2.moved"));
    file.unwrap().write_all(note.as_bytes()).unwrap();
    fs::hard_link(&path, &frozen).unwrap();
    let home = NewHome { overlay: to.clone(), frozen: frozen.clone(), options: OpenOptions::default() };
    home.make(&disk, &named("move-1")).unwrap();
    (disk, to, frozen, states)
}

/// The old path and the new one both lead to the disk, also after it has gone back.
#[test]
fn what_a_killed_switch_left_is_not_the_disk() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (disk, to, frozen, states) = half_switched(&old, &new);
    let path = disk.path().to_owned();
    for snapshots in 0..2 {
        assert_eq!((moved_to(&to), moved_to(&path)), (Some(path.clone()), None), "{snapshots} snapshots");
        assert_eq!(source_directory(&to), None, "it is no disk");
        disk.snapshot(&named("meanwhile")).map_or_else(|_| assert_eq!(snapshots, 1), drop);
    }
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    assert!(!to.exists() && !frozen.exists(), "{:?}", files_in(&old));
    finish(&mut moving);
    moving.let_go().unwrap();
    assert_eq!(files_in(&old), [".web.qcow2.moved"], "links beside a name go with it");
    assert_reads(&disk, &states[1], "moved");
    // Another disk may have the old path.
    fs::copy(&to, &path).unwrap();
    assert_eq!(moved_to(&to), None);
    disk.close().unwrap();
}

/// Its name may be taken while layers are copied.
#[test]
fn a_file_at_the_target_stays_where_the_switch_fails() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 1);
    let disk = open_with(&path, &OpenOptions::default());
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    let to = new.join("web.qcow2");
    fs::copy(&path, &to).unwrap();
    let other = fs::read(&to).unwrap();
    let error = (0..10_000).find_map(|_| moving.step(1 << 20).err()).expect("the name is taken");
    assert!(error.to_string().contains(to.to_str().unwrap()), "{error}");
    assert_eq!(fs::read(&to).unwrap(), other);
    assert_reads(&disk, &states[1], "not moved");
    drop(moving);
    fs::remove_file(&to).unwrap();
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    finish(&mut moving);
    moving.let_go().unwrap();
    assert_eq!(files_in(&old), [".web.qcow2.moved"]);
    assert_reads(&disk, &states[1], "moved");
    disk.close().unwrap();
}

/// Else it would be taken for the disk once nothing is at the old path.
#[test]
fn what_a_killed_switch_left_goes_wherever_the_disk_moves_next() {
    for is_flat in [false, true] {
        let dir = scratch();
        let (old, new) = directories(dir.path());
        let (disk, to, frozen, states) = half_switched(&old, &new);
        let third = dir.path().join("third");
        fs::create_dir(&third).unwrap();
        if is_flat {
            let (to, open) = (third.join("web.raw"), OpenOptions::default());
            let options =
                FlatOptions { to, open, overwrite: false, skip_unreadable: false, order: Order::Nearest };
            finish(&mut FlatMove::begin(&disk, &options).unwrap());
        } else {
            finish(&mut Moving::begin(&disk, &options(&third)).unwrap());
        }
        assert!(!to.exists() && !frozen.exists(), "{:?}", files_in(&old));
        assert_eq!(moved_to(&old.join("web.qcow2")).unwrap(), disk.path());
        assert_reads(&disk, &states[1], "moved");
        disk.close().unwrap();
    }
}

/// Such as the copy of a layer that changed meanwhile, and that a merge then took away.
#[test]
fn copies_that_lack_what_they_stand_on_are_made_again() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 3);
    let disk = open_with(&path, &OpenOptions::default());
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    switch(&mut moving);
    fs::remove_file(new.join("web.s0.qcow2")).unwrap();
    finish(&mut moving);
    drop(moving);
    assert_reads(&disk, &states[3], "moved");
    disk.close().unwrap();
    drop(disk);
    assert_clean(&new.join("web.s0.qcow2"));
    assert_same(&content(&new.join("web.qcow2"), "qcow2"), &states[3], 0, "to stock tools");
}

/// A file system of so many bytes, in memory; `None` without the right to mount one.
struct Mounted(PathBuf);

impl Mounted {
    fn new(at: &Path, bytes: u64) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "vmstrata-test"]).arg(at);
        mount.status().unwrap().success().then(|| Self(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_target_that_is_full_ends_the_move_and_not_the_disk() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 1);
    let disk = open_with(&path, &OpenOptions::default());
    let Some(small) = Mounted::new(&new, 1 << 20) else {
        return eprintln!("not tested: it takes the right to mount");
    };
    let error = Moving::begin(&disk, &options(&new)).unwrap_err();
    assert!(matches!(error, Error::NoRoom { needed: 2_000_000.., .. }), "{error}");
    drop(small);
    let _large = Mounted::new(&new, 16 << 20).unwrap();
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    fs::write(new.join("somebody's"), vec![7; 15 << 20]).unwrap();
    let error = loop {
        match moving.step(256 << 10) {
            Ok(_) => {}
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("write the copy at offset") && error.contains("No space left"), "{error}");
    assert_eq!((moving.phase(), disk.path()), (Phase::Copying, &*path));
    write(&disk, 0, &[7; BLOCK]).unwrap();
    fs::remove_file(new.join("somebody's")).unwrap();
    finish(&mut moving);
    moving.let_go().unwrap();
    let mut model = states[1].clone();
    model[..BLOCK].fill(7);
    assert_reads(&disk, &model, "moved");
    disk.close().unwrap();
}

/// Somebody who can write beside a disk could have its server open any file.
#[test]
fn notes_that_others_can_write_are_not_believed() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, _) = with_history(&old, 0);
    let disk = open_with(&path, &OpenOptions::default());
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    switch(&mut moving);
    let to = new.join("web.qcow2");
    assert_eq!((moved_to(&path), source_directory(&to)), (Some(to.clone()), Some(old.clone())));
    for note in [old.join(".web.qcow2.moved"), new.join(".web.qcow2.moving")] {
        fs::set_permissions(note, fs::Permissions::from_mode(0o666)).unwrap();
    }
    assert_eq!((moved_to(&path), source_directory(&to)), (None, None));
    let error = Moving::resume(&disk, &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("not this user's alone"), "{error}");
    disk.close().unwrap();
}

/// The target's storage lies, or somebody writes there.
#[test]
fn a_copy_that_reads_otherwise_is_no_copy() {
    let dir = scratch();
    let (old, new) = directories(dir.path());
    let (path, states) = with_history(&old, 1);
    let disk = open_with(&path, &OpenOptions::default());
    let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
    let part = |new: &Path| files_in(new).into_iter().find(|name| name.ends_with(".part"));
    while moving.step(1 << 20).unwrap() == 0 {}
    let torn = fs::File::options().write(true).open(new.join(part(&new).unwrap())).unwrap();
    torn.write_all_at(b"torn", 70_000).unwrap();
    let error = loop {
        match moving.step(64 << 20) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert_eq!(part(&new), None, "it is not gone on with");
    finish(&mut moving);
    moving.let_go().unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_same(&content(&new.join("web.qcow2"), "qcow2"), &states[1], 0, "to stock tools");
}

/// Block `number` of the child's writes, and where it goes.
fn numbered(number: u64) -> (u64, Vec<u8>) {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(BLOCK, number as u8);
    ((number * 37) % (SIZE / BLOCK as u64) * BLOCK as u64, bytes)
}

fn follow(path: &Path) -> PathBuf {
    moved_to(path).unwrap_or_else(|| path.to_owned())
}

/// With a journal for what is not flushed, beside the disk's old directory.
fn open_where_it_is(path: &Path) -> Arc<Disk> {
    let journal = path.parent().unwrap().with_file_name("journal");
    fs::create_dir_all(&journal).unwrap();
    let path = follow(path);
    let allow_backing = source_directory(&path).into_iter().collect();
    let options = OpenOptions { allow_backing, ..OpenOptions::default() };
    Disk::open(&path, &options, &small_resources(Some(&journal))).unwrap()
}

/// Moves the disk, and writes one numbered block after the other, each told once it is written.
fn child(orders: &str) {
    let (path, to) = orders.split_once('\n').unwrap();
    let (path, to) = (Path::new(path), Path::new(to));
    let disk = open_where_it_is(path);
    let first = std::env::args().count() as u64;
    let from = std::env::var("VMSTRATA_TEST_MOVE_FIRST").map_or(first, |first| first.parse().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in from.. {
                let (at, bytes) = numbered(number);
                write(&disk, at, &bytes).unwrap();
                println!("{number}");
            }
        });
        let mut moving = Moving::begin(&disk, &options(to)).unwrap();
        switch(&mut moving);
        println!("{SWITCHED}");
        finish(&mut moving);
        std::thread::park();
    });
}

/// Whatever was written before is there, by the one path that is the disk; the move goes on, and sends little again.
#[test]
fn a_move_that_is_killed_loses_nothing_and_goes_on() {
    if let Ok(orders) = std::env::var(ORDERS) {
        return child(&orders);
    }
    let dir = scratch();
    for_seeds(17, |seed| {
        let mut random = random("killed", seed);
        let (old, new) = directories(&dir.path().join(seed.to_string()));
        let (path, mut states) = with_history(&old, 2);
        let mut model = states.pop().unwrap();
        let mut next = 0;
        for round in 0..3 {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([
                "--exact",
                "moving::a_move_that_is_killed_loses_nothing_and_goes_on",
                "--nocapture",
            ]);
            command.env(ORDERS, format!("{}\n{}", path.display(), new.display()));
            command.env("VMSTRATA_TEST_MOVE_FIRST", next.to_string()).stdout(Stdio::piped());
            let mut running = command.spawn().unwrap();
            let (mut out, mut said) = (BufReader::new(running.stdout.take().unwrap()), String::new());
            // The last time soon after the switch.
            while round == 2 && !said.ends_with(&format!("{SWITCHED}\n")) {
                assert!(out.read_line(&mut said).unwrap() > 0, "it has ended: {said}");
            }
            let most = if round == 2 { 20 } else { 250 };
            std::thread::sleep(Duration::from_millis(random.random_range(0..most)));
            running.kill().unwrap();
            out.read_to_string(&mut said).unwrap();
            running.wait().unwrap();
            let whole = said.rfind('\n').map_or("", |end| &said[..end]);
            let told = whole.lines().rev().find_map(|line| line.trim().parse::<u64>().ok());
            let disk = open_where_it_is(&path);
            let to = new.join("web.qcow2");
            assert!(!(path.exists() && disk.path() == to), "one path is the disk");
            let written = told.map_or(next, |told| told + 1);
            for number in next..written {
                let (at, bytes) = numbered(number);
                model[at as usize..at as usize + BLOCK].copy_from_slice(&bytes);
            }
            // The next one may be written, and not told.
            let (at, bytes) = numbered(written);
            if read(&disk, at, BLOCK).unwrap() == bytes {
                model[at as usize..at as usize + BLOCK].copy_from_slice(&bytes);
            }
            next = written;
            assert_reads(&disk, &model, "after it was killed");
            assert!(round < 2 || disk.path() == to, "it had switched");
            disk.close().unwrap();
        }
        let disk = open_where_it_is(&path);
        let mut moving = Moving::begin(&disk, &options(&new)).unwrap();
        finish(&mut moving);
        moving.let_go().unwrap();
        assert_reads(&disk, &model, "moved");
        disk.close().unwrap();
        drop(disk);
        assert_eq!(files_in(&old), [".web.qcow2.moved"]);
        let to = new.join("web.qcow2");
        assert_clean(&to);
        assert_same(&content(&to, "qcow2"), &model, 0, "to stock tools");
        for (number, state) in states.iter().enumerate() {
            let found = snapshot::find(&to, &format!("s{number}"), &OpenOptions::default()).unwrap();
            assert_same(&content(&found.layer, "qcow2"), state, 0, "a snapshot");
        }
    });
}

/// Its layers are then named by ways that lead up and down again.
#[test]
fn a_disk_moves_to_a_directory_below_its_own() {
    let dir = scratch();
    let (path, states) = with_history(dir.path(), 1);
    let below = dir.path().join("below");
    fs::create_dir(&below).unwrap();
    let disk = open_with(&path, &OpenOptions::default());
    let how = MoveOptions { rest: u64::MAX, ..options(&below) };
    let mut moving = Moving::begin(&disk, &how).unwrap();
    finish(&mut moving);
    moving.let_go().unwrap();
    assert_reads(&disk, &states[1], "below");
    disk.close().unwrap();
    drop(disk);
    assert_same(&content(&below.join("web.qcow2"), "qcow2"), &states[1], 0, "to stock tools");
}
