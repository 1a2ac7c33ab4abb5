//! Where a disk's own history ends: what lies below belongs to others, who have not said that it may go.

use crate::common;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::stock::{content, path_str, qemu_img, qemu_io};
use vmstrata_disk::merge::{
    Direction, Kept, LayerRef, Merge, MergeOptions, MergeRange, Merged, Removal, Selection, ranges_of,
};
use vmstrata_disk::snapshot::{self, PrepareOptions, Pruning, RevertOptions, SnapshotInfo, list};
use vmstrata_disk::{
    CreateOptions, Error, Format, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
    create, probe_chain,
};
use vmstrata_store::Gate;
use vmstrata_types::LayerIndex;

fn resources() -> std::sync::Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

/// Written, then frozen under each name in turn.
fn take(disk: &Path, names: &[&str]) {
    for (number, name) in (1..).zip(names) {
        qemu_io(disk, &[format!("write -q -P {number} {number}M 64k")]);
        let info = SnapshotInfo { name: (*name).to_owned(), taken_ns: number, ..SnapshotInfo::default() };
        let (open, prepare) = (OpenOptions::default(), PrepareOptions::default());
        snapshot::create(&[disk.to_owned()], &info, &open, &prepare, &resources()).unwrap();
    }
}

fn new_disk(path: &Path, backing: Option<&str>) {
    let backing = backing.map(|name| (PathBuf::from(name), Format::Qcow2));
    let options = CreateOptions { size: Some(16 << 20), backing, ..CreateOptions::default() };
    create(path, &options).unwrap();
}

fn stock_overlay(path: &Path, backing: &str) {
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", backing, path_str(path)]);
}

fn open(allowed: &Path) -> OpenOptions {
    OpenOptions { allow_backing: vec![allowed.to_owned()], ..OpenOptions::default() }
}

fn names(disk: &Path, options: &OpenOptions) -> Vec<(Option<String>, bool)> {
    let found = list(disk, options).unwrap();
    found.iter().map(|found| (found.name().map(str::to_owned), found.is_own())).collect()
}

fn seen(named: &[(&str, bool)]) -> Vec<(Option<String>, bool)> {
    let name = |name: &str| Some(name.to_owned()).filter(|name| name != "-");
    named.iter().map(|&(text, is_own)| (name(text), is_own)).collect()
}

fn delete(disk: &Path, name: &str, open: &OpenOptions) -> Result<Vec<Merged>, Error> {
    let options = MergeOptions { open: open.clone(), ..MergeOptions::default() };
    let ranges = ranges_of(disk, &[name.to_owned()], open)?;
    ranges.into_iter().map(|range| Merge::new(disk, range, &options, &resources())?.run()).collect()
}

fn assert_refused(disk: &Path, name: &str, open: &OpenOptions, owner: &str) {
    let refused = delete(disk, name, open).unwrap_err().to_string();
    assert!(refused.contains(&format!("belong to {owner}")), "{refused}");
}

/// A plain overlay stands on another disk: that one's snapshots are not its own, whoever made it.
#[test]
fn rules_of_a_plain_overlay_leave_the_snapshots_of_the_disk_below() {
    for is_stock in [true, false] {
        let dir = common::scratch();
        let (golden, vm) = (dir.path().join("golden.qcow2"), dir.path().join("vm1.qcow2"));
        new_disk(&golden, None);
        take(&golden, &["jan"]);
        if is_stock {
            stock_overlay(&vm, "golden.qcow2");
        } else {
            new_disk(&vm, Some("golden.qcow2"));
        }
        take(&vm, &["a", "b", "c"]);
        let options = OpenOptions::default();
        let expected = seen(&[("c", true), ("b", true), ("a", true), ("-", false), ("jan", false)]);
        assert_eq!(names(&vm, &options), expected, "stock: {is_stock}");
        let found = list(&vm, &options).unwrap();
        let keep = "last=2".parse().unwrap();
        assert_eq!(Pruning::of(&found, &keep, &[], u64::MAX).delete, ["a"]);
        assert_refused(&vm, "jan", &options, "golden.qcow2");
        // Its own first one goes, and the end of its history stays where it was.
        let before = content(&vm, "qcow2");
        for name in ["a", "b", "c"] {
            delete(&vm, name, &options).unwrap();
        }
        assert!(content(&vm, "qcow2") == before);
        assert_eq!(names(&vm, &options), seen(&[("-", false), ("jan", false)]));
        assert_refused(&vm, "jan", &options, "golden.qcow2");
        // Gone back to, it is no more its own than before.
        snapshot::revert(&vm, "jan", &RevertOptions::default(), &resources()).unwrap();
        assert_eq!(names(&vm, &options), seen(&[("jan", false)]));
        let merged = delete(&vm, "jan", &options).unwrap().remove(0);
        assert_eq!(merged.kept[0].1, Kept::NotASnapshot);
        assert_eq!(names(&golden, &options), seen(&[("jan", true)]));
    }
}

/// The same in another directory, on a snapshot's file.
#[test]
fn a_disk_made_on_a_snapshot_elsewhere_does_not_delete_what_is_below_that() {
    let dir = common::scratch();
    let (golden_dir, vms) = (dir.path().join("golden"), dir.path().join("vms"));
    std::fs::create_dir(&golden_dir).unwrap();
    std::fs::create_dir(&vms).unwrap();
    let (golden, vm) = (golden_dir.join("golden.qcow2"), vms.join("vm2.qcow2"));
    new_disk(&golden, None);
    take(&golden, &["jan", "feb"]);
    new_disk(&vm, Some("../golden/golden.feb.qcow2"));
    let options = open(&golden_dir);
    assert_eq!(names(&vm, &options), seen(&[("-", false), ("jan", false)]));
    assert_refused(&vm, "jan", &options, "golden.feb.qcow2");
    // Nor by its number, nor if all files may go.
    for beyond_own in [false, true] {
        let all = MergeOptions {
            open: options.clone(),
            removal: Removal::All,
            beyond_own,
            ..MergeOptions::default()
        };
        let lowest = MergeRange { first: LayerIndex::new(0), last: LayerIndex::new(0) };
        let refused = Merge::new(&vm, lowest, &all, &resources()).unwrap_err().to_string();
        assert!(refused.contains("belong to golden.feb.qcow2"), "{refused}");
    }
    assert_eq!(names(&golden, &OpenOptions::default()), seen(&[("feb", true), ("jan", true)]));
}

/// A clone's layers stay its origin's when the layer that said so is dropped and the next one has no name.
#[test]
fn whose_the_layers_are_is_kept_where_the_next_one_has_no_name() {
    let dir = common::scratch();
    let (web, clone) = (dir.path().join("web.qcow2"), dir.path().join("clone.qcow2"));
    let options = OpenOptions::default();
    new_disk(&web, None);
    take(&web, &["old"]);
    let frozen = dir.path().join("web.unnamed.qcow2");
    std::fs::rename(&web, &frozen).unwrap();
    stock_overlay(&web, "web.unnamed.qcow2");
    take(&web, &["mon"]);
    snapshot::clone(&web, "mon", &clone, &options).unwrap();
    assert_refused(&clone, "old", &options, "web.qcow2");
    let before = content(&clone, "qcow2");
    delete(&clone, "mon", &options).unwrap();
    let found = list(&clone, &options).unwrap();
    assert_eq!(found[0].origin.as_deref(), Some("web.qcow2"), "{found:?}");
    assert_refused(&clone, "old", &options, "web.qcow2");
    assert!(content(&clone, "qcow2") == before);
    assert_eq!(names(&web, &options), seen(&[("mon", true), ("-", false), ("old", false)]));
}

/// Layers without names are meant by number or by file as they were when that was said, and dropped only by who says so.
#[test]
fn layers_chosen_by_number_are_the_same_when_numbers_have_moved() {
    let dir = common::scratch();
    let path = |number: usize| dir.path().join(format!("{number}.qcow2"));
    let options = OpenOptions::default();
    new_disk(&path(0), None);
    (1..6).for_each(|number| stock_overlay(&path(number), &format!("{}.qcow2", number - 1)));
    let disk = path(5);
    let range = |first, last| MergeRange { first: LayerIndex::new(first), last: LayerIndex::new(last) };
    let drop = |range, beyond_own| {
        let options = MergeOptions { removal: Removal::Nothing, beyond_own, ..MergeOptions::default() };
        Merge::new(&disk, range, &options, &resources()).and_then(Merge::run)
    };
    let (two, three) = (LayerRef::Number(2), LayerRef::File(path(3)));
    let between = Selection::between(&disk, &three, &two, &options).unwrap();
    let above = Selection::above(&disk, &two, &options).unwrap();
    assert_eq!(between.ranges(&disk, &options).unwrap(), [range(2, 3)]);
    assert_eq!(above.ranges(&disk, &options).unwrap(), [range(3, 4)]);
    assert!(drop(range(1, 1), false).is_err(), "not of the disk's own history");
    drop(range(1, 1), true).unwrap();
    take(&disk, &["meanwhile"]);
    assert_eq!(between.ranges(&disk, &options).unwrap(), [range(1, 2)]);
    assert_eq!(above.ranges(&disk, &options).unwrap(), [range(2, 3)]);
    for other in [LayerRef::Number(5), LayerRef::File(disk.clone()), LayerRef::File(path(1))] {
        let refused = [
            Selection::between(&disk, &two, &other, &options).unwrap_err(),
            Selection::above(&disk, &other, &options).unwrap_err(),
        ];
        for refused in refused {
            assert!(refused.fault::<vmstrata_disk::merge::MergeFault>().is_some(), "{refused}");
        }
    }
}

/// A name that has become free may be given again, and a disk in use gets layers: what was meant is what it was.
#[test]
fn what_is_meant_is_known_by_its_files() {
    let dir = common::scratch();
    let (disk, options) = (dir.path().join("web.qcow2"), OpenOptions::default());
    new_disk(&disk, None);
    take(&disk, &["older", "nightly"]);
    let named = Selection::named(&disk, &["nightly".to_owned(), "older".to_owned()], &options).unwrap();
    let below = Selection::below(&disk, &options).unwrap();
    delete(&disk, "nightly", &options).unwrap();
    take(&disk, &["nightly"]);
    let lowest = MergeRange { first: LayerIndex::new(0), last: LayerIndex::new(0) };
    assert_eq!(named.ranges(&disk, &options).unwrap(), [lowest]);
    // Nor does who flattens ask for a snapshot to go that was taken since.
    assert_eq!(below.ranges(&disk, &options).unwrap(), [lowest]);
    delete(&disk, "older", &options).unwrap();
    assert_eq!(named.ranges(&disk, &options).unwrap(), []);
    assert_eq!(names(&disk, &options), seen(&[("nightly", true)]));
}

/// Committed, a dropped layer's file goes on as that of the one above, which nobody meant.
#[test]
fn the_layer_that_got_the_file_of_a_dropped_one_is_not_meant() {
    let dir = common::scratch();
    let (disk, options) = (dir.path().join("web.qcow2"), OpenOptions::default());
    let range = |layer| MergeRange { first: LayerIndex::new(layer), last: LayerIndex::new(layer) };
    let merge = |layer| {
        let down = MergeOptions { direction: Direction::Commit, beyond_own: true, ..MergeOptions::default() };
        Merge::new(&disk, range(layer), &down, &resources()).and_then(Merge::run).unwrap();
    };
    new_disk(&disk, None);
    take(&disk, &["one", "two", "three", "four"]);
    let named = Selection::named(&disk, &["one".to_owned(), "three".to_owned()], &options).unwrap();
    assert_eq!(named.ranges(&disk, &options).unwrap(), [range(2), range(0)]);
    merge(2);
    assert_eq!(names(&disk, &options), seen(&[("four", true), ("two", true), ("one", true)]));
    assert_eq!(named.ranges(&disk, &options).unwrap(), [range(0)]);
    merge(0);
    assert_eq!(named.ranges(&disk, &options).unwrap(), []);
    // Nor is one without a name, which only its place tells.
    let path = |number: usize| dir.path().join(format!("{number}.qcow2"));
    new_disk(&path(0), None);
    (1..4).for_each(|number| stock_overlay(&path(number), &format!("{}.qcow2", number - 1)));
    let disk = path(3);
    let lowest = LayerRef::Number(0);
    let meant = Selection::between(&disk, &lowest, &lowest, &options).unwrap();
    let down = MergeOptions {
        direction: Direction::Commit,
        removal: Removal::All,
        beyond_own: true,
        ..MergeOptions::default()
    };
    Merge::new(&disk, range(0), &down, &resources()).and_then(Merge::run).unwrap();
    assert_eq!(meant.ranges(&disk, &options).unwrap(), []);
}

/// Local files, of which one is merged away just when it is opened for the first time.
#[derive(Debug)]
struct MergedMeanwhile {
    disk: PathBuf,
    name: &'static str,
    /// Whether it can still be opened that time.
    is_opened: bool,
    is_done: AtomicBool,
}

impl Opener for MergedMeanwhile {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened, Error> {
        let is_victim = path.to_str().unwrap().contains(self.name);
        let merge = || {
            if is_victim && !self.is_done.swap(true, Ordering::Relaxed) {
                delete(&self.disk, self.name, &OpenOptions::default()).unwrap();
            }
        };
        if self.is_opened {
            let opened = LocalFiles.open(path, role, gate);
            merge();
            opened
        } else {
            merge();
            LocalFiles.open(path, role, gate)
        }
    }
}

/// A served disk is listed while its layers are merged.
#[test]
fn a_chain_that_a_merge_shortens_meanwhile_is_read_again() {
    for is_opened in [false, true] {
        let dir = common::scratch();
        let disk = dir.path().join("web.qcow2");
        new_disk(&disk, None);
        take(&disk, &["s1", "s2", "s3"]);
        let opener = || {
            let (disk, is_done) = (disk.clone(), AtomicBool::new(false));
            Arc::new(MergedMeanwhile { disk, name: "s2", is_opened, is_done })
        };
        let options = OpenOptions { opener: opener(), ..OpenOptions::default() };
        let expected = seen(&[("s3", true), ("s1", true)]);
        assert_eq!(names(&disk, &options), expected, "opened: {is_opened}");
        take(&disk, &["s2"]);
        let options = OpenOptions { opener: opener(), ..OpenOptions::default() };
        assert_eq!(probe_chain(&disk, &options).unwrap().len(), 3, "opened: {is_opened}");
    }
}

#[test]
fn a_layer_that_is_missing_for_good_is_named() {
    let dir = common::scratch();
    let disk = dir.path().join("web.qcow2");
    new_disk(&disk, None);
    take(&disk, &["s1", "s2"]);
    let layer = list(&disk, &OpenOptions::default()).unwrap().remove(1).layer;
    std::fs::remove_file(&layer).unwrap();
    let error = list(&disk, &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains(path_str(&layer)), "{error}");
}
