//! Layers that other disks stand on: nothing that they need is removed, or changed while they use it, wherever they are.
//!
//! Disks in use are in child processes, which are this test binary again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::common::flat::{assert_same, read};
use crate::common::stock::{content, path_str, qemu_img, qemu_io};
use crate::common::{open_read_only, patiently, scratch};
use vmstrata_disk::index::{IndexOptions, build};
use vmstrata_disk::merge::{
    Action, Kept, Merge, MergeFault, MergeOptions, Merged, Removal, all_of, ranges_of,
};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo, list};
use vmstrata_disk::{
    CreateOptions, Disk, Error, OpenOptions, ResourceOptions, Resources, create, unfinished_copy,
};

const SIZE: usize = 8 << 20;

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

/// `golden/web.qcow2` with the snapshots s0 to s3, and an empty directory `vms`.
struct Golden {
    dir: tempfile::TempDir,
    disk: PathBuf,
}

impl Golden {
    fn new() -> Self {
        let dir = scratch();
        for sub in ["golden", "vms"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        let disk = dir.path().join("golden/web.qcow2");
        create(&disk, &CreateOptions { size: Some(SIZE as u64), ..CreateOptions::default() }).unwrap();
        for number in 0..4 {
            qemu_io(&disk, &[format!("write -q -P {} {number}M 300k", number + 1)]);
            take(&disk, &format!("s{number}"), &OpenOptions::default());
        }
        Self { dir, disk }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    fn layer(&self, name: &str) -> PathBuf {
        self.disk.with_file_name(format!("web.{name}.qcow2"))
    }

    /// How disks in `vms` are opened.
    fn open(&self) -> OpenOptions {
        OpenOptions { allow_backing: vec![self.path("golden")], ..OpenOptions::default() }
    }

    fn clone(&self, snapshot: &str, name: &str) -> PathBuf {
        self.clone_of(&self.disk, snapshot, name)
    }

    fn clone_of(&self, disk: &Path, snapshot: &str, name: &str) -> PathBuf {
        let clone = self.path(name);
        patiently(|| snapshot::clone(disk, snapshot, &clone, &self.open())).expect("a clone is made");
        clone
    }

    /// Deletes snapshots, the newest range first.
    fn delete(&self, names: &[&str], options: &MergeOptions) -> Vec<Merged> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let ranges = ranges_of(&self.disk, &names, &OpenOptions::default()).unwrap();
        let merge = |range| Merge::new(&self.disk, range, options, &resources())?.run();
        ranges.into_iter().map(|range| merge(range).unwrap()).collect()
    }

    /// Takes a disk in `vms` back to a snapshot; `keep` is another name for what it was.
    fn revert(&self, disk: &Path, snapshot: &str, keep: Option<&str>) {
        let keep = keep.map(|name| self.path(name));
        let options =
            snapshot::RevertOptions { keep, open: self.open(), ..snapshot::RevertOptions::default() };
        snapshot::revert(disk, snapshot, &options, &resources()).unwrap();
    }

    /// Lets a disk in `vms` stand on nothing.
    fn flatten(&self, disk: &Path, removal: Removal) {
        let all = all_of(list(disk, &self.open()).unwrap().len() + 1).unwrap();
        let options = MergeOptions { open: self.open(), removal, ..MergeOptions::default() };
        Merge::new(disk, all, &options, &resources()).unwrap().run().unwrap();
    }

    /// Begins to delete a snapshot of files; or says why not.
    fn begin(&self, name: &str) -> Result<Merge, Error> {
        let ranges = ranges_of(&self.disk, &[name.to_owned()], &OpenOptions::default()).unwrap();
        Merge::new(&self.disk, ranges[0], &MergeOptions::default(), &resources())
    }

    /// Names of what is in a directory.
    fn files(&self, dir: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(dir)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn take(disk: &PathBuf, name: &str, open: &OpenOptions) {
    let info = SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() };
    snapshot::create(std::slice::from_ref(disk), &info, open, &PrepareOptions::default(), &resources())
        .unwrap();
}

fn kept(merged: &Merged) -> Vec<(&Path, &Kept)> {
    merged.kept.iter().map(|(path, why)| (path.as_path(), why)).collect()
}

#[test]
fn a_clone_in_another_directory_keeps_what_it_stands_on() {
    let golden = Golden::new();
    let clone = golden.clone("s1", "vms/ci.qcow2");
    qemu_io(&clone, &["write -q -P 77 5M 100k".to_owned()]);
    let before = content(&clone, "qcow2");
    let merged = golden.delete(&["s0", "s1", "s2"], &MergeOptions::default()).remove(0);
    assert_eq!(merged.removed, [golden.layer("s2")]);
    let (s1, s0) = (golden.layer("s1"), golden.layer("s0"));
    let by_s1 = Kept::Needed { by: s1.canonicalize().unwrap() };
    assert_eq!(kept(&merged), [(s1.as_path(), &Kept::Needed { by: clone.clone() }), (s0.as_path(), &by_s1)]);
    assert_same(&content(&clone, "qcow2"), &before, 0, "the clone");
}

/// Its own snapshots lie between it and the layer.
#[test]
fn a_clone_with_snapshots_of_its_own_keeps_what_it_stands_on() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    take(&clone, "own", &golden.open());
    let merged = golden.delete(&["s2"], &MergeOptions::default()).remove(0);
    let by = golden.path("vms/ci.own.qcow2");
    assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by })]);
}

#[test]
fn a_clone_that_went_back_keeps_what_it_stands_on_then() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    golden.revert(&clone, "s1", None);
    let merged = golden.delete(&["s1"], &MergeOptions::default()).remove(0);
    assert_eq!(kept(&merged), [(golden.layer("s1").as_path(), &Kept::Needed { by: clone })]);
}

/// Nobody comes to them from the disk any more: to its snapshot, or to what it was under another name.
#[test]
fn what_a_clone_leaves_when_it_goes_back_keeps_what_it_stands_on() {
    for (keep, by) in [(None, "vms/ci.own.qcow2"), (Some("vms/kept.qcow2"), "vms/kept.qcow2")] {
        let golden = Golden::new();
        let clone = golden.clone("s2", "vms/ci.qcow2");
        if keep.is_none() {
            take(&clone, "own", &golden.open());
        }
        golden.revert(&clone, "s1", keep);
        let before = content(&golden.path(by), "qcow2");
        let merged = golden.delete(&["s2"], &MergeOptions::default()).remove(0);
        assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by: golden.path(by) })]);
        assert_same(&content(&golden.path(by), "qcow2"), &before, 0, by);
    }
}

/// The clone is deleted by hand, and said to be gone; its snapshots are there still.
#[test]
fn what_a_deleted_clone_leaves_keeps_what_it_stands_on() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    take(&clone, "own", &golden.open());
    std::fs::remove_file(&clone).unwrap();
    let by = golden.path("vms/ci.own.qcow2");
    let before = content(&by, "qcow2");
    let options = MergeOptions { forget_missing: true, ..MergeOptions::default() };
    let merged = golden.delete(&["s2"], &options).remove(0);
    assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by: by.clone() })]);
    assert_same(&content(&by, "qcow2"), &before, 0, "its snapshot");
}

/// A layer that told of itself and is removed keeps nothing, and is not missed.
#[test]
fn a_removed_layer_takes_back_what_it_told() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    take(&clone, "own", &golden.open());
    golden.revert(&clone, "s1", Some("vms/kept.qcow2"));
    let (disk, open) = (golden.path("vms/kept.qcow2"), golden.open());
    let drop_own = ranges_of(&disk, &["own".to_owned()], &open).unwrap()[0];
    let options = MergeOptions { open, ..MergeOptions::default() };
    let merged = Merge::new(&disk, drop_own, &options, &resources()).unwrap().run().unwrap();
    assert_eq!(merged.removed, [golden.path("vms/ci.own.qcow2")]);
    let merged = golden.delete(&["s2"], &MergeOptions::default()).remove(0);
    assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by: disk.clone() })]);
    golden.flatten(&disk, Removal::Snapshots);
    // What was kept goes at the next chance.
    let merged = golden.delete(&["s3"], &MergeOptions::default()).remove(0);
    assert_eq!(merged.removed, [golden.layer("s3"), golden.layer("s2")]);
}

#[test]
fn a_dropped_layer_that_is_to_stay_keeps_what_it_stands_on() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    take(&clone, "own", &golden.open());
    golden.flatten(&clone, Removal::Nothing);
    let merged = golden.delete(&["s2"], &MergeOptions::default()).remove(0);
    let by = golden.path("vms/ci.own.qcow2");
    assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by })]);
}

/// What the clone left when it went back stands on it.
#[test]
fn a_dropped_layer_that_is_needed_keeps_what_it_stands_on() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    for name in ["one", "two"] {
        take(&clone, name, &golden.open());
    }
    golden.revert(&clone, "one", None);
    golden.flatten(&clone, Removal::Snapshots);
    let merged = golden.delete(&["s2"], &MergeOptions::default()).remove(0);
    let by = golden.path("vms/ci.one.qcow2");
    assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by })]);
}

/// It is let go of, and to be removed by whoever uses the disk next.
#[test]
fn what_a_killed_merge_left_stays_where_a_disk_elsewhere_stands_on_it() {
    let golden = Golden::new();
    let clone = golden.clone("s1", "vms/ci.qcow2");
    let before = content(&clone, "qcow2");
    let mut merge = golden.begin("s1").unwrap();
    while let Some(action) = merge.select().filter(|&action| action != Action::Remove) {
        merge.apply(action).unwrap();
    }
    drop(merge);
    take(&golden.disk, "later", &OpenOptions::default());
    Disk::open(&golden.disk, &OpenOptions::default(), &resources()).unwrap().close().unwrap();
    assert!(golden.layer("s1").exists(), "it is removed");
    assert_same(&content(&clone, "qcow2"), &before, 0, "the clone");
}

/// Where its chain leaves the directory, it stands on another clone's layer.
#[test]
fn a_clone_of_a_clone_keeps_what_both_stand_on() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    take(&clone, "own", &golden.open());
    golden.clone_of(&clone, "own", "vms/second.qcow2");
    std::fs::remove_file(&clone).unwrap();
    let forget = MergeOptions { forget_missing: true, ..MergeOptions::default() };
    let merged = golden.delete(&["s2"], &forget).remove(0);
    let by = golden.path("vms/ci.own.qcow2");
    assert_eq!(kept(&merged), [(golden.layer("s2").as_path(), &Kept::Needed { by })]);
}

#[test]
fn a_disk_that_is_not_where_it_was_keeps_layers_until_it_is_said_to_be_gone() {
    let golden = Golden::new();
    let clones = [golden.clone("s2", "vms/a.qcow2"), golden.clone("s2", "vms/b.qcow2")];
    assert_eq!(golden.files("golden/.web.s2.qcow2.clones").len(), 2);
    std::fs::rename(&clones[0], golden.path("moved.qcow2")).unwrap();
    std::fs::remove_file(&clones[1]).unwrap();
    let keep_chain = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
    let merged = golden.delete(&["s2"], &keep_chain).remove(0);
    let [(path, Kept::Missing { by })] = kept(&merged)[..] else { panic!("{merged:?}") };
    assert!(path == golden.layer("s2") && clones.contains(by), "{by:?}");
    assert!(content(&golden.path("moved.qcow2"), "qcow2").len() == SIZE, "it is still whole");
    let golden = Golden::new();
    std::fs::remove_file(golden.clone("s1", "vms/gone.qcow2")).unwrap();
    let forget = MergeOptions { forget_missing: true, ..MergeOptions::default() };
    let merged = golden.delete(&["s1"], &forget).remove(0);
    assert_eq!((merged.removed.as_slice(), merged.kept.len()), (&[golden.layer("s1")][..], 0));
    assert!(!golden.files("golden").iter().any(|name| name.starts_with(".web.s1")), "what was told of it");
}

#[test]
fn a_disk_that_stands_on_the_layer_no_more_does_not_keep_it() {
    let golden = Golden::new();
    let clone = golden.clone("s1", "vms/ci.qcow2");
    golden.flatten(&clone, Removal::Snapshots);
    let merged = golden.delete(&["s1"], &MergeOptions::default()).remove(0);
    assert_eq!(merged.removed, [golden.layer("s1")]);
    assert!(golden.files("golden").iter().all(|name| !name.ends_with(".clones")));
}

/// Relinked to a layer further down, a disk tells of itself there.
#[test]
fn a_clone_that_lets_go_of_a_layer_is_known_where_it_stands_then() {
    let golden = Golden::new();
    let clone = golden.clone("s2", "vms/ci.qcow2");
    let range = ranges_of(&clone, &["s2".to_owned()], &golden.open()).unwrap()[0];
    let options = MergeOptions { open: golden.open(), ..MergeOptions::default() };
    Merge::new(&clone, range, &options, &resources()).unwrap().run().unwrap();
    let merged = golden.delete(&["s1"], &MergeOptions::default()).remove(0);
    assert_eq!(kept(&merged), [(golden.layer("s1").as_path(), &Kept::Needed { by: clone })]);
}

#[test]
fn a_disk_of_other_tools_is_known_once_it_was_opened_for_writing() {
    let golden = Golden::new();
    let overlay = golden.path("vms/stock.qcow2");
    let base = golden.layer("s1").canonicalize().unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&base), path_str(&overlay)]);
    Disk::open(&overlay, &golden.open(), &resources()).unwrap().close().unwrap();
    let merged = golden.delete(&["s1"], &MergeOptions::default()).remove(0);
    assert_eq!(kept(&merged), [(golden.layer("s1").as_path(), &Kept::Needed { by: overlay })]);
}

/// Each image beside the layers, made by stock tools, and how it says what it stands on.
#[test]
fn images_that_vmstrata_cannot_use_keep_what_they_name() {
    let golden = Golden::new();
    let base = golden.layer("s1").canonicalize().unwrap();
    let json =
        format!(r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{}"}}}}"#, base.display());
    let extended = ["-o", "extended_l2=on,cluster_size=128k"];
    for (name, options, backing) in
        [("ext.qcow2", &extended[..], path_str(&base)), ("json.qcow2", &[], json.as_str())]
    {
        let image = golden.path("golden").join(name);
        let mut args = vec!["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", backing];
        args.extend(options);
        args.push(path_str(&image));
        qemu_img(&args);
        let ranges = ranges_of(&golden.disk, &["s1".to_owned()], &OpenOptions::default()).unwrap();
        let merge = Merge::new(&golden.disk, ranges[0], &MergeOptions::default(), &resources()).unwrap();
        let merged = merge.run().unwrap();
        assert_eq!(kept(&merged), [(base.as_path(), &Kept::Needed { by: image.clone() })], "{name}");
        // The next one finds it as it was.
        std::fs::remove_file(&image).unwrap();
        put_back(&golden, "s1", "s2");
    }
    // A link in the directory leads to one elsewhere.
    let elsewhere = golden.path("vms/elsewhere.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&base), path_str(&elsewhere)]);
    std::os::unix::fs::symlink(&elsewhere, golden.path("golden/link.qcow2")).unwrap();
    let merged = golden.delete(&["s1"], &MergeOptions::default()).remove(0);
    assert_eq!(kept(&merged), [(base.as_path(), &Kept::Needed { by: elsewhere })]);
}

/// A link to an image in another directory: its relative name holds where the link is, as it does for every tool.
#[test]
fn a_link_to_an_overlay_elsewhere_keeps_what_it_names_beside_the_link() {
    let golden = Golden::new();
    let (link, elsewhere) = (golden.path("golden/ci.qcow2"), golden.path("vms/ci.qcow2"));
    golden.clone("s1", "golden/ci.qcow2");
    std::fs::rename(&link, &elsewhere).unwrap();
    std::os::unix::fs::symlink("../vms/ci.qcow2", &link).unwrap();
    let before = content(&link, "qcow2");
    let merged = golden.delete(&["s1"], &MergeOptions::default()).remove(0);
    assert_eq!(kept(&merged), [(golden.layer("s1").as_path(), &Kept::Needed { by: link.clone() })]);
    assert!(content(&link, "qcow2") == before);
    // With the link the reason goes.
    std::fs::remove_file(&link).unwrap();
    let mut merged = golden.delete(&["s2"], &MergeOptions::default()).remove(0);
    merged.removed.sort();
    assert_eq!(merged.removed, [golden.layer("s1"), golden.layer("s2")]);
}

/// Files that are no images do not count, however many there are, nor does what only root may look into.
#[test]
fn a_directory_full_of_other_files_hides_nobody() {
    let golden = Golden::new();
    for number in 0..50_001 {
        std::fs::File::create(golden.path("vms").join(number.to_string())).unwrap();
    }
    std::fs::create_dir(golden.path("golden/lost+found")).unwrap();
    let options = MergeOptions {
        open: OpenOptions { allow_backing: vec![golden.path("vms")], ..OpenOptions::default() },
        ..MergeOptions::default()
    };
    let merged = golden.delete(&["s1"], &options).remove(0);
    assert_eq!(merged.removed, [golden.layer("s1")]);
}

/// A base in another directory may be anybody's: it goes only if that is said.
#[test]
fn a_base_in_another_directory_is_removed_only_if_it_may_go_everywhere() {
    for (removal, goes) in [(Removal::All, false), (Removal::Everywhere, true)] {
        let golden = Golden::new();
        let base = golden.path("golden/base.qcow2");
        create(&base, &CreateOptions { size: Some(SIZE as u64), ..CreateOptions::default() }).unwrap();
        let disk = golden.path("vms/disk.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&base), path_str(&disk)]);
        golden.flatten(&disk, removal);
        assert_eq!(base.exists(), !goes, "{removal:?}");
    }
}

/// Puts a layer that was dropped, and whose file stayed, back below the one above it.
fn put_back(golden: &Golden, name: &str, above: &str) {
    let (layer, above) = (golden.layer(name), golden.layer(above));
    qemu_img(&["rebase", "-q", "-u", "-F", "qcow2", "-b", path_str(&layer), path_str(&above)]);
    let record = std::fs::read(&above).unwrap();
    assert!(record.windows(4).any(|window| window == b"VMSN"), "its name is in the header above");
    rename_record(&above, "s0", name);
}

/// Gives the snapshot below an image another name of the same length.
fn rename_record(path: &Path, old: &str, new: &str) {
    let info = list(path, &OpenOptions::default()).unwrap().remove(0).info.unwrap();
    if info.name == new {
        return;
    }
    assert_eq!(info.name, old);
    let encode = |name: &str| SnapshotInfo { name: name.to_owned(), ..info.clone() }.encode().unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let before = encode(old);
    let at = bytes.windows(before.len()).position(|window| window == before).unwrap();
    bytes[at..at + before.len()].copy_from_slice(&encode(new));
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_image_that_cannot_be_read_keeps_everything() {
    let golden = Golden::new();
    // Its header says that its backing file's name lies past its end.
    let mut header = b"QFI\xfb\0\0\0\x03".to_vec();
    header.extend((1u64 << 20).to_be_bytes());
    header.extend(20u32.to_be_bytes());
    let torn = golden.path("golden/torn.qcow2");
    std::fs::write(&torn, header).unwrap();
    // Before anything is copied: no file could be removed after that.
    let refused = golden.begin("s1").unwrap_err();
    let Some(MergeFault::Overlooked { why: Kept::Unread { path, reason } }) = refused.fault() else {
        panic!("{refused}")
    };
    assert!(*path == torn && !reason.is_empty(), "{path:?}: {reason}");
    let served = Disk::open(&golden.disk, &OpenOptions::default(), &resources()).unwrap();
    for name in ["s1", "s3"] {
        let ranges = ranges_of(&golden.disk, &[name.to_owned()], &OpenOptions::default()).unwrap();
        let refused = Merge::of_disk(&served, ranges[0], &MergeOptions::default()).unwrap_err().to_string();
        assert!(refused.contains("no file could be removed") && refused.contains("torn.qcow2"), "{refused}");
    }
    served.close().unwrap();
    drop(served);
    // The unfinished copy of a layer is none yet.
    let part = unfinished_copy(&golden.path("golden/copy.qcow2"));
    std::fs::rename(&torn, &part).unwrap();
    drop(golden.begin("s1").unwrap());
    std::fs::rename(&part, &torn).unwrap();
    // Who wants none removed is not kept from it.
    let keep = MergeOptions { removal: Removal::Nothing, ..MergeOptions::default() };
    assert_eq!(kept(&golden.delete(&["s1"], &keep)[0])[0].1, &Kept::Asked);
}

const ORDERS: &str = "VMSTRATA_TEST_SHARED";

/// Opens a disk ("rw" or "ro" by its index, "at" to read without one; then its path), says so, reads all of it when told to, and says what came of that.
#[test]
#[ignore = "the process that other tests start"]
fn child_that_uses_a_disk() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let (how, path) = orders.split_once(' ').unwrap();
    let path = Path::new(path);
    let allow_backing = vec![path.parent().unwrap().with_file_name("golden")];
    let options = OpenOptions { read_only: how != "rw", allow_backing, ..OpenOptions::default() };
    let resources = resources();
    let disk = Disk::open(path, &options, &resources).unwrap();
    if how != "at" {
        // The newest frozen one, which has the index.
        assert_eq!(resources.usage().open_files, 1, "lower layers are open, no index was used");
    }
    let said = |text: &str| {
        println!("\n>{text}");
        std::io::stdout().flush().unwrap();
    };
    said("open");
    for line in std::io::stdin().lines() {
        assert_eq!(line.unwrap(), "read");
        match read(&disk, 0, SIZE) {
            Ok(bytes) => said(&format!("{:?}", [0, 1, 2, 3].map(|mib: usize| bytes[mib << 20]))),
            Err(error) => said(&error.to_string()),
        }
    }
    disk.close().unwrap();
}

struct User {
    child: Child,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl User {
    fn of(how: &str, path: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "merge_shared::child_that_uses_a_disk", "--include-ignored", "--nocapture"])
            .env(ORDERS, format!("{how} {}", path.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut user = Self { child, said };
        assert_eq!(user.answer(), "open");
        user
    }

    fn answer(&mut self) -> String {
        let lines = self.said.by_ref().map(|line| line.unwrap());
        lines.filter_map(|line| line.strip_prefix('>').map(str::to_owned)).next().expect("it answers")
    }

    fn reads(&mut self) -> String {
        self.child.stdin.as_mut().unwrap().write_all(b"read\n").unwrap();
        self.answer()
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

/// Neither has opened the file that would be written: both know of it by their index.
#[test]
fn a_layer_is_not_changed_while_another_process_uses_a_disk_on_it() {
    for (how, name) in [("rw", "vms/ci.qcow2"), ("ro", "golden/web.s3.qcow2")] {
        let golden = Golden::new();
        build(&golden.disk, &IndexOptions::default()).unwrap();
        golden.clone("s3", "vms/ci.qcow2");
        let mut user = User::of(how, &golden.path(name));
        let refused = golden.begin("s1").map(drop).unwrap_err().to_string();
        assert!(refused.contains("in use by") && refused.contains("web.s2.qcow2"), "{how}: {refused}");
        assert_eq!(user.reads(), "[1, 2, 3, 4]", "{how}");
        // Below what is in use nothing is written: s3 is on top of all.
        user.end();
        golden.begin("s1").unwrap().run().unwrap();
        let mut user = User::of(how, &golden.path(name));
        assert_eq!(user.reads(), "[1, 2, 3, 4]", "{how}, merged");
        user.end();
    }
}

#[test]
fn a_served_disk_does_not_change_a_layer_that_another_process_uses() {
    let golden = Golden::new();
    build(&golden.disk, &IndexOptions::default()).unwrap();
    golden.clone("s3", "vms/ci.qcow2");
    let disk = Disk::open(&golden.disk, &OpenOptions::default(), &resources()).unwrap();
    let begin = |name: &str| {
        let ranges = ranges_of(&golden.disk, &[name.to_owned()], &OpenOptions::default()).unwrap();
        Merge::of_disk(&disk, ranges[0], &MergeOptions::default())
    };
    let mut user = User::of("rw", &golden.path("vms/ci.qcow2"));
    let refused = begin("s1").map(drop).unwrap_err().to_string();
    assert!(refused.contains("in use by"), "{refused}");
    assert_eq!(user.reads(), "[1, 2, 3, 4]");
    // What is copied into the disk's own file is nobody else's.
    let merged = begin("s3").unwrap().run().unwrap();
    assert_eq!(kept(&merged)[0].0, golden.layer("s3"));
    assert_eq!(user.reads(), "[1, 2, 3, 4]");
    user.end();
    let merged = begin("s1").unwrap().run().unwrap();
    assert_eq!(merged.removed, [golden.layer("s1")]);
    disk.close().unwrap();
}

/// The very layer that is to be copied into is somebody's disk, without an index: nothing else says that it is in use.
#[test]
fn a_served_disk_does_not_copy_into_a_layer_that_another_process_reads() {
    let golden = Golden::new();
    vmstrata_disk::index::remove(&golden.disk, &IndexOptions::default()).unwrap();
    let disk = Disk::open(&golden.disk, &OpenOptions::default(), &resources()).unwrap();
    let begin = || {
        let ranges = ranges_of(&golden.disk, &["s1".to_owned()], &OpenOptions::default()).unwrap();
        Merge::of_disk(&disk, ranges[0], &MergeOptions::default())
    };
    let mut user = User::of("at", &golden.layer("s2"));
    let refused = begin().map(drop).unwrap_err().to_string();
    assert!(refused.contains("in use by") && refused.contains("web.s2.qcow2"), "{refused}");
    assert_eq!(user.reads(), "[1, 2, 3, 0]");
    user.end();
    let merged = begin().unwrap().run().unwrap();
    assert_eq!(merged.removed, [golden.layer("s1")]);
    disk.close().unwrap();
}

/// The disk is opened after the merge has begun, by an index that was right a moment before.
#[test]
fn a_disk_that_is_opened_during_a_merge_is_refused_or_whole() {
    let golden = Golden::new();
    build(&golden.disk, &IndexOptions::default()).unwrap();
    let clone = golden.clone("s3", "vms/ci.qcow2");
    let open = || Disk::open(&clone, &golden.open(), &resources());
    let whole = |disk: &Disk| {
        let bytes = read(disk, 0, SIZE).unwrap();
        assert_eq!([0, 1, 2, 3].map(|mib: usize| bytes[mib << 20]), [1, 2, 3, 4]);
    };
    let merge = golden.begin("s1").unwrap();
    let refused = open().map(drop).unwrap_err().to_string();
    assert!(refused.contains("web.s2.qcow2") && refused.contains("in use"), "{refused}");
    merge.run().unwrap();
    whole(&open().unwrap());
    let served = Disk::open(&golden.disk, &OpenOptions::default(), &resources()).unwrap();
    let ranges = ranges_of(&golden.disk, &["s0".to_owned()], &OpenOptions::default()).unwrap();
    let merge = Merge::of_disk(&served, ranges[0], &MergeOptions::default()).unwrap();
    let refused = open().map(drop).unwrap_err().to_string();
    assert!(refused.contains("web.s2.qcow2") && refused.contains("being merged"), "{refused}");
    // Who reads further down is in nobody's way, but what it may need stays until the next merge.
    let lower = open_read_only(&golden.layer("s0"));
    let merged = merge.run().unwrap();
    assert_eq!(kept(&merged), [(golden.layer("s0").as_path(), &Kept::InUse)]);
    whole(&open().unwrap());
    whole(&served);
    drop(lower);
    let ranges = ranges_of(&golden.disk, &["s2".to_owned()], &OpenOptions::default()).unwrap();
    let merged = Merge::of_disk(&served, ranges[0], &MergeOptions::default()).unwrap().run().unwrap();
    assert_eq!(merged.removed, [golden.layer("s2"), golden.layer("s0")]);
    served.close().unwrap();
}
