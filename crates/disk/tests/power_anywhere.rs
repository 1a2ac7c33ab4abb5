//! Power failures in the middle of every operation that changes names: what it does to files and directories is recorded call
//! by call, and then the host dies at many moments, with what was not flushed surviving or not, data and names each for
//! themselves. Every state that is there reads as it did, a disk that is written meanwhile holds what was flushed, and
//! what was said to be done is done.
//!
//! Each operation runs in a child process, which is this test binary again.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::common::flat::assert_reads;
use crate::common::ledger::{Ledger, Step};
use crate::common::stock::{assert_safe, content, path_str, qemu_img};
use crate::common::traced::{MARKS, Traced};
use crate::common::{for_seeds, open, open_read_only, random, scratch};
use crate::power_support::{
    CLUSTER, DONE, DRAFT, ORDERS, STEPS, dropped, guest_steps, how, make, operate, range, replaced,
    resources, take_snapshot,
};
use rand::Rng as _;
use vmstrata_disk::index::{IndexOptions, IndexVerdict, remove, verify};
use vmstrata_disk::merge::{Merge, MergeOptions, Removal, ranges_of};
use vmstrata_disk::{Disk, ErrorKind, OpenOptions, ResourceOptions, Resources, snapshot};
use vmstrata_store::{Crash, CrashKind, Moment, Survivors};

#[test]
#[ignore = "the process that the other tests start"]
fn child_that_is_watched() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let words: Vec<&str> = orders.splitn(3, ' ').collect();
    let dir = Path::new(words[2]);
    let marks = std::fs::File::options().write(true).open(dir.join(MARKS)).unwrap();
    let say = |mark: u64| marks.write_all_at(&mark.to_le_bytes(), 0).unwrap();
    operate(words[0], words[1].parse().unwrap(), dir, &say);
    say(DONE);
}

/// An operation that was watched, and what there was before.
struct Watched {
    operation: &'static str,
    traced: Traced,
    /// By names.
    states: BTreeMap<&'static str, Vec<u8>>,
    ledger: Ledger,
    guest: Vec<Step>,
}

impl Watched {
    fn new(operation: &'static str, seed: u64) -> Self {
        let dir = scratch();
        make(dir.path(), seed);
        let web = dir.path().join("web.qcow2");
        // What writes indices flushes files and directories for its own sake.
        if operation == "index" || operation.starts_with("files") {
            remove(&web, &IndexOptions::default()).unwrap();
        }
        if operation.starts_with("waiting") {
            snapshot::clone(&web, "s1", &dir.path().join("clone.qcow2"), &OpenOptions::default()).unwrap();
        }
        if let Some(name) = replaced(operation) {
            let [layer, draft] =
                [format!("web.{name}.qcow2"), DRAFT.to_owned()].map(|file| dir.path().join(file));
            qemu_img(&["convert", "-q", "-O", "qcow2", path_str(&layer), path_str(&draft)]);
        }
        let names = ["web.qcow2", "data.qcow2", "web.s0.qcow2", "web.s1.qcow2", "web.s2.qcow2"];
        let states: BTreeMap<_, _> =
            names.into_iter().map(|name| (name, content(&dir.path().join(name), "qcow2"))).collect();
        let mut ledger = Ledger::new(&states["web.qcow2"], CLUSTER);
        let is_live = operation.starts_with("live");
        let guest = if is_live { guest_steps(seed) } else { Vec::new() };
        for (number, step) in guest.iter().enumerate() {
            ledger.enter(number + 1, step, true);
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "power_anywhere::child_that_is_watched", "--include-ignored", "--nocapture"]);
        child.env(ORDERS, format!("{operation} {seed} {}", path_str(dir.path())));
        let traced = Traced::run(dir.path(), &child);
        assert_eq!(traced.mark_at(traced.end), DONE);
        Self { operation, traced, states, ledger, guest }
    }

    /// The states that a file may have, by their names.
    fn may_be(&self, name: &str) -> &'static [&'static str] {
        match (self.operation, name) {
            ("revert" | "keep", "web.qcow2") => &["web.qcow2", "web.s0.qcow2"],
            ("keep", "old.qcow2") | ("group", "web.s3.qcow2") => &["web.qcow2"],
            ("clone" | "elsewhere" | "waiting-frozen", "clone.qcow2") => &["web.s1.qcow2"],
            ("live-replace-s1", "web.s1-onto.qcow2") => &["web.s1.qcow2"],
            ("live-replace-s2", "web.s2-onto.qcow2") => &["web.s2.qcow2"],
            ("group", "data.s3.qcow2") | (_, "data.qcow2") => &["data.qcow2"],
            (_, "web.qcow2") => &["web.qcow2"],
            (_, "web.s0.qcow2") => &["web.s0.qcow2"],
            (_, "web.s1.qcow2") => &["web.s1.qcow2"],
            (_, "web.s2.qcow2") => &["web.s2.qcow2"],
            _ => panic!("{}: {name} is there", self.operation),
        }
    }

    fn crash(&self, crash: Crash) {
        let dir = scratch();
        self.traced.leave(dir.path(), crash);
        let what = format!("{}, {crash:?}", self.operation);
        for path in [dir.path().to_owned(), dir.path().join("vms")].iter().flat_map(|dir| images(dir)) {
            self.assert_image(dir.path(), &path, crash, &what);
        }
        let web = dir.path().join("web.qcow2");
        let wrong = |found: &IndexVerdict| matches!(found, IndexVerdict::Wrong { .. });
        assert!(!verdicts(dir.path()).iter().any(wrong), "{what}: {:?}", verdicts(dir.path()));
        if self.traced.mark_at(crash.at) == DONE {
            self.assert_done(dir.path(), &what);
        }
        // Its successor goes on, and sweeps up.
        open(&web).close().unwrap();
        take_snapshot(&[web.clone(), dir.path().join("data.qcow2")], "next", &resources()).expect(&what);
        assert_safe(&web);
        if self.operation.starts_with("waiting") {
            self.go_on_without_clone(dir.path());
        }
        if self.operation.ends_with("-commit") {
            self.complete(dir.path(), &what);
        }
        if dropped(self.operation).is_some() {
            assert_only_layers(dir.path(), &what);
        }
        if let Some(name) = replaced(self.operation) {
            self.drop_replaced(dir.path(), name, &what);
        }
    }

    /// Whichever of the two layers the state has goes with it, and so does the other one.
    fn drop_replaced(&self, dir: &Path, name: &str, what: &str) {
        let (web, names) = (dir.join("web.qcow2"), [name.to_owned()]);
        let before = content(&web, "qcow2");
        if let Ok(range) = ranges_of(&web, &names, &OpenOptions::default()) {
            Merge::new(&web, range[0], &how(self.operation), &resources()).unwrap().run().expect(what);
        }
        assert_safe(&web);
        assert!(content(&web, "qcow2") == before, "{what}: its state is dropped");
        let is_left = |path: &PathBuf| path.to_str().unwrap().contains(&format!("web.{name}"));
        assert!(!images(dir).iter().any(is_left), "{what}: {:?}", images(dir));
        assert!(!dir.join(".web.qcow2.dropped").exists(), "{what}");
    }

    /// Nobody needs the dropped layer any more: it goes with what the next merge drops, if it was dropped.
    fn go_on_without_clone(&self, dir: &Path) {
        std::fs::remove_file(dir.join("clone.qcow2")).unwrap();
        let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
        Merge::new(&dir.join("web.qcow2"), range(1, 1), &options, &resources()).unwrap().run().unwrap();
    }

    /// Begun again, it goes on to its end.
    fn complete(&self, dir: &Path, what: &str) {
        let web = dir.join("web.qcow2");
        // The snapshot that was taken since is one more.
        if open_read_only(&web).layers().len() == 5 {
            let range = dropped(self.operation).expect("a merge");
            let merged =
                Merge::new(&web, range, &how(self.operation), &resources()).unwrap().run().expect(what);
            assert!(merged.is_commit);
        }
        let names = snapshot::list(&web, &OpenOptions::default()).unwrap();
        let names: Vec<_> =
            names.iter().map(|found| (found.name().unwrap(), found.is_being_deleted)).collect();
        assert_eq!(names, [("next", false), ("s2", false)], "{what}");
        let stays = dir.join("web.s2.qcow2");
        assert_safe(&stays);
        assert!(content(&stays, "qcow2") == self.states["web.s2.qcow2"], "{what}: s2");
    }

    fn assert_image(&self, dir: &Path, path: &Path, crash: Crash, what: &str) {
        let name = path.file_name().unwrap().to_str().unwrap();
        if is_half_deleted(path) {
            // A state for nobody. Below the one that stays it is right, until that has let go of it.
            assert!(self.operation.ends_with("-commit") && ["web.s0.qcow2", "web.s1.qcow2"].contains(&name));
            return;
        }
        assert_safe(path);
        let stock = content(path, "qcow2");
        if name == "web.qcow2" && !self.guest.is_empty() {
            let said = self.traced.mark_at(crash.at).min(2 * STEPS as u64) as usize;
            let (ended, begun) = (said / 2, said.div_ceil(2));
            let is_flush = |step: &Step| matches!(step, Step::Flush);
            let closed = self.traced.mark_at(crash.at) == DONE;
            let flushed =
                if closed { Some(STEPS - 1) } else { self.guest[..ended].iter().rposition(is_flush) };
            let flushed = flushed.map_or(0, |place| place + 1);
            self.ledger.check(0, &stock, flushed, begun).unwrap_or_else(|error| panic!("{what}: {error}"));
        } else {
            let states = self.may_be(name);
            assert!(
                states.iter().any(|state| self.states[state] == stock),
                "{what}: {name} is not as {states:?}"
            );
        }
        let open =
            OpenOptions { read_only: true, allow_backing: vec![dir.to_owned()], ..OpenOptions::default() };
        let disk = Disk::open(path, &open, &Resources::new(ResourceOptions::default())).expect("opens");
        assert_reads(&disk, &stock, what);
    }

    /// What the operation returned of is on stable storage.
    fn assert_done(&self, dir: &Path, what: &str) {
        let web = || content(&dir.join("web.qcow2"), "qcow2");
        let is_done = match self.operation {
            "revert" => web() == self.states["web.s0.qcow2"],
            "keep" => web() == self.states["web.s0.qcow2"] && dir.join("old.qcow2").exists(),
            "clone" => dir.join("clone.qcow2").exists(),
            "elsewhere" => dir.join("vms/clone.qcow2").exists(),
            "group" => dir.join("web.s3.qcow2").exists() && dir.join("data.s3.qcow2").exists(),
            "index" => {
                dir.join("web.s0.qcow2.vmsx").exists()
                    && verdicts(dir).iter().all(|found| matches!(found, IndexVerdict::Good { .. }))
            }
            replace if replaced(replace).is_some() => {
                let left = if replace.ends_with("s1") { 2 } else { 1 };
                open_read_only(&dir.join("web.qcow2")).layers().len() == left
            }
            merge => {
                let range = dropped(merge).expect("a merge");
                let gone = range.last.index() - range.first.index() + 1;
                open_read_only(&dir.join("web.qcow2")).layers().len() == 4 - gone
            }
        };
        assert!(is_done, "{what}: it was said to be done");
    }

    fn crash_anywhere(&self, seed: u64) {
        let mut random = random("cuts", seed);
        let mut moments = self.traced.turns();
        moments.extend((0..20).map(|_| Moment(random.random_range(0..=self.traced.end.0))));
        moments.push(self.traced.end);
        for at in moments {
            for survivors in [Survivors::None, Survivors::Seeded(random.random())] {
                self.crash(Crash { kind: CrashKind::Power, at, survivors });
            }
        }
    }
}

/// Whether it is refused as a state because it may have been written over.
fn is_half_deleted(path: &Path) -> bool {
    let open = OpenOptions { read_only: true, ..OpenOptions::default() };
    let opened = Disk::open(path, &open, &resources());
    opened.is_err_and(|error| matches!(error.kind(), ErrorKind::BeingDropped))
}

/// What the indices of the layers are, from the base up.
fn verdicts(dir: &Path) -> Vec<IndexVerdict> {
    let verified = verify(&dir.join("web.qcow2"), &IndexOptions::default()).unwrap();
    verified.into_iter().map(|layer| layer.verdict).collect()
}

fn images(dir: &Path) -> Vec<PathBuf> {
    let entries = dir.read_dir().map(|entries| entries.map(|entry| entry.unwrap().path()).collect());
    let is_image = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.ends_with(".qcow2") && !name.starts_with('.')
    };
    entries.unwrap_or_else(|_| Vec::new()).into_iter().filter(is_image).collect()
}

/// Nothing is left that no disk stands on.
fn assert_only_layers(dir: &Path, what: &str) {
    let mut layers: Vec<PathBuf> = Vec::new();
    for disk in ["web.qcow2", "data.qcow2"] {
        layers.extend(open_read_only(&dir.join(disk)).layers().into_iter().map(|layer| layer.path));
    }
    for image in images(dir) {
        assert!(layers.contains(&image), "{what}: {} is left", image.display());
    }
    assert!(!dir.join(".web.qcow2.dropped").exists(), "{what}");
}

/// One test at a time in a process: between the fork and the exec of a tool, it holds the locks of every file that is open here.
static ALONE: Mutex<()> = Mutex::new(());

fn survives(operation: &'static str) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for_seeds(1, |seed| Watched::new(operation, seed).crash_anywhere(seed));
}

/// A process may have been killed between a rename and the flush of the directory: what is flushed after it needs the name.
#[test]
fn the_name_of_a_disk_is_flushed_before_its_bytes() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let traced = Watched::new("open", 0).traced;
    let (names, bytes) = (traced.names_flushed().expect("flushed"), traced.file_flushed().expect("flushed"));
    assert!(names < bytes, "{names:?}, {bytes:?}");
}

#[test]
fn a_live_merge_into_a_frozen_layer() {
    survives("live-frozen");
}

#[test]
fn a_live_merge_into_the_active_layer() {
    survives("live-active");
}

#[test]
fn a_live_commit() {
    survives("live-commit");
}

#[test]
fn a_layer_that_takes_the_place_of_another() {
    ["live-replace-s1", "live-replace-s2"].into_iter().for_each(survives);
}

#[test]
fn a_commit_of_files() {
    survives("files-commit");
}

#[test]
fn flattening_under_a_guest() {
    survives("live-flat");
}

#[test]
fn a_merge_of_files_into_a_frozen_layer() {
    survives("files-frozen");
}

#[test]
fn a_merge_of_files_into_the_active_layer() {
    survives("files-active");
}

#[test]
fn a_merge_that_leaves_what_a_clone_needs() {
    survives("waiting-frozen");
}

#[test]
fn flattening_files() {
    survives("files-flat");
}

#[test]
fn going_back() {
    ["revert", "keep"].into_iter().for_each(survives);
}

#[test]
fn clones() {
    ["clone", "elsewhere"].into_iter().for_each(survives);
}

#[test]
fn a_group_of_snapshots() {
    survives("group");
}

#[test]
fn indices_beside_layers() {
    survives("index");
}
