//! A disk goes back from a flat copy to its history while it is written.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{assert_reads, assert_same, write};
use crate::common::scratch;
use crate::common::stock::{assert_clean, content};
use crate::flat::{BLOCK, Server, disk_in, fail_each_operation, finish, move_under_a_guest, options};
use vmstrata_disk::snapshot::list;
use vmstrata_disk::{Disk, Format, OpenOptions, Shrink};
use vmstrata_migrate::follow::Order;
use vmstrata_migrate::{BackOptions, Error, FlatMove, FlatOptions, Move as _, Moved, is_way_back, moved_to};

fn back_to(path: &Path) -> BackOptions {
    let open = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    BackOptions { to: path.to_owned(), open, skip_unreadable: false, order: Order::HotFirst }
}

fn flatten(disk: &Arc<Disk>, to: &Path) {
    finish(&mut FlatMove::begin(disk, &options(to)).unwrap());
}

fn names_in(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    fs::read_dir(dir).unwrap().map(name).collect()
}

/// Closes the disk, and looks at it as others do: at its old path, with its history.
fn assert_is_back(path: &Path, disk: Arc<Disk>, model: &[u8]) {
    assert_eq!((disk.path(), disk.format()), (path, Format::Qcow2));
    assert_eq!(moved_to(path), None);
    assert_reads(&disk, model, "back");
    disk.close().unwrap();
    drop(disk);
    assert_clean(path);
    assert_same(&content(path, "qcow2"), model, 0, "to stock tools");
    let states = list(path, &OpenOptions::default()).unwrap();
    assert!(states.iter().any(|state| state.name() == Some("mon")), "{states:?}");
    let names = names_in(path.parent().unwrap());
    assert!(!names.iter().any(|name| name.ends_with(".back") || name.ends_with(".moved")), "{names:?}");
}

#[test]
fn a_disk_that_is_written_goes_back_from_a_raw_file_and_both_paths_lead_there() {
    let dir = scratch();
    let (path, disk, model) = disk_in(&dir.path().join("old"));
    let to = dir.path().join("web.raw");
    let model = move_under_a_guest(&disk, model, || FlatMove::begin(&disk, &options(&to)));
    assert!(is_way_back(&to, &path) && !is_way_back(&dir.path().join("other.raw"), &path));
    let model = move_under_a_guest(&disk, model, || FlatMove::begin_back(&disk, &back_to(&path)));
    assert_eq!(
        moved_to(&to),
        Some(Moved { path: path.clone(), is_raw: false }),
        "of what is in a configuration"
    );
    assert_is_back(&path, disk, &model);
    // Another disk may have the name.
    fs::remove_file(&to).unwrap();
    fs::write(&to, [1; 512]).unwrap();
    assert_eq!(moved_to(&to), None);
}

#[test]
fn a_disk_that_is_written_goes_back_from_a_stock_nbd_server() {
    let dir = scratch();
    let (path, disk, model) = disk_in(&dir.path().join("old"));
    let file = dir.path().join("there.raw");
    fs::write(&file, vec![0; model.len()]).unwrap();
    let server = Server::of(&file);
    let there = FlatOptions { overwrite: true, ..options(&server.address()) };
    finish(&mut FlatMove::begin(&disk, &there).unwrap());
    let model = move_under_a_guest(&disk, model, || FlatMove::begin_back(&disk, &back_to(&path)));
    drop(server);
    assert_is_back(&path, disk, &model);
}

/// Also after one that was given up: it leaves nothing.
#[test]
fn only_what_was_written_since_it_left_is_sent_back() {
    let dir = scratch();
    let (path, disk, mut model) = disk_in(&dir.path().join("old"));
    let to = dir.path().join("web.raw");
    flatten(&disk, &to);
    let before = names_in(path.parent().unwrap());
    let mut given_up = FlatMove::begin_back(&disk, &back_to(&path)).unwrap();
    assert!(names_in(path.parent().unwrap()).contains(&".web.qcow2.back".to_owned()));
    given_up.step(1 << 20).unwrap();
    given_up.step(1 << 20).unwrap();
    drop(given_up);
    assert_eq!(names_in(path.parent().unwrap()), before);
    for at in [0, 5 << 20] {
        write(&disk, at, &[7; BLOCK]).unwrap();
        model[at as usize..at as usize + BLOCK].fill(7);
    }
    let mut moving = FlatMove::begin_back(&disk, &back_to(&path)).unwrap();
    let sent = finish(&mut moving);
    let report = moving.report();
    assert!((1..=2 * (64 << 10)).contains(&sent), "{sent} bytes");
    assert_eq!((report.is_flat, &report.to), (false, &path));
    assert!(report.kept_until_ns.is_some() && !report.froze.is_empty(), "{report:?}");
    drop(moving);
    assert_is_back(&path, disk, &model);
}

#[test]
fn no_failure_of_the_host_loses_what_was_flushed_on_the_way_back() {
    let before = |disk: &Arc<Disk>, dir: &Path| flatten(disk, &dir.join("web.raw"));
    let begin = |disk: &Arc<Disk>, dir: &Path, open: OpenOptions| {
        let back = back_to(&dir.join("web.qcow2"));
        FlatMove::begin_back(
            disk,
            &BackOptions { open: OpenOptions { opener: open.opener, ..back.open.clone() }, ..back },
        )
    };
    fail_each_operation(before, begin);
}

#[test]
fn ways_back_that_cannot_be_are_refused_by_name() {
    let dir = scratch();
    let (path, disk, _) = disk_in(&dir.path().join("old"));
    let to = dir.path().join("web.raw");
    let refused = |disk: &Arc<Disk>, to: &Path| FlatMove::begin_back(disk, &back_to(to)).unwrap_err();
    let there = refused(&disk, &path);
    assert!(matches!(there, Error::Exists { .. }), "{there}");
    flatten(&disk, &to);
    let elsewhere = refused(&disk, &dir.path().join("other.qcow2")).to_string();
    assert!(elsewhere.ends_with("it did not leave its history there"), "{elsewhere}");
    disk.resize(32 << 20, Shrink::Refuse).unwrap();
    let larger = refused(&disk, &path).to_string();
    assert!(larger.ends_with("its size has changed since it left"), "{larger}");
    assert_eq!(moved_to(&path), Some(Moved { path: to, is_raw: true }));
    let at = PathBuf::from(disk.path());
    disk.close().unwrap();
    drop(disk);
    assert_eq!(fs::metadata(at).unwrap().len(), 32 << 20);
}
