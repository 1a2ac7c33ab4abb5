//! A base that is a part of a raw file, by `offset` and `size` of a `json:` description: all that goes by a layer's path knows which part.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{assert_reads, assert_same, write};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, content, path_str, qemu_img, try_qemu_img};
use crate::common::{open, open_read_only, scratch};
use vmstrata_disk::merge::{Kept, Merge, MergeOptions, MergeRange, Merged, Removal};
use vmstrata_disk::snapshot::{self, SnapshotInfo};
use vmstrata_disk::{
    CreateOptions, Disk, ExtentKind, Format, FrozenChain, Op, OpenOptions, ResourceOptions, Resources,
    create, probe_chain,
};
use vmstrata_types::{GuestOffset, GuestRange, LayerIndex};

/// Of the file; and where in it the base begins, which is no sector's start, and its bytes.
const WHOLE: usize = 3 << 20;
const START: usize = 66_000;
const LEN: usize = 1 << 20;
const NEW: [u8; 4096] = [0xEE; 4096];

/// A raw file, and a disk on a part of it.
struct Windowed {
    dir: tempfile::TempDir,
    whole: PathBuf,
    bytes: Vec<u8>,
    disk: PathBuf,
}

impl Windowed {
    fn new() -> Self {
        let dir = scratch();
        let (whole, disk) = (dir.path().join("whole.raw"), dir.path().join("web.qcow2"));
        let bytes: Vec<u8> = (0..WHOLE).map(|at| (at / 509 % 251) as u8).collect();
        std::fs::write(&whole, &bytes).unwrap();
        let made = Self { dir, whole, bytes, disk };
        made.overlay(&made.disk, &made.json(START, Some(LEN)));
        made
    }

    fn json(&self, start: usize, len: Option<usize>) -> String {
        let size = len.map_or_else(String::new, |len| format!(r#""size":{len},"#));
        let file = &self.whole;
        format!(
            r#"json:{{"driver":"raw","offset":{start},{size}"file":{{"driver":"file","filename":{file:?}}}}}"#
        )
    }

    fn overlay(&self, path: &Path, backing: &str) {
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing, path_str(path)]);
    }

    fn model(&self) -> Vec<u8> {
        self.bytes[START..START + LEN].to_vec()
    }

    /// The disk with a snapshot `s1`, and a write before and after it; and what it reads as.
    fn with_snapshot(&self) -> Vec<u8> {
        let mut model = self.model();
        let disk = open(&self.disk);
        for at in [0, 300 << 10] {
            write(&disk, at, &NEW).unwrap();
            model[at as usize..][..NEW.len()].copy_from_slice(&NEW);
            if at == 0 {
                disk.snapshot(&SnapshotInfo { name: "s1".to_owned(), ..SnapshotInfo::default() }).unwrap();
            }
        }
        disk.close().unwrap();
        model
    }

    /// The disk reads so, for stock tools as well, and the file of its base is what it was.
    fn assert_is(&self, disk: &Path, model: &[u8], layers: usize) {
        assert_same(&content(disk, "qcow2"), model, 0, "as stock tools read it");
        assert_clean(disk);
        let options = OpenOptions {
            read_only: true,
            allow_backing: vec![self.dir.path().to_owned()],
            ..OpenOptions::default()
        };
        let opened = Disk::open(disk, &options, &resources()).unwrap();
        assert_reads(&opened, model, "as it is read");
        assert_eq!(opened.layers().len(), layers);
        assert!(std::fs::read(&self.whole).unwrap() == self.bytes, "the file of the base was written");
    }
}

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn only(layer: u16) -> MergeRange {
    MergeRange { first: LayerIndex::new(layer), last: LayerIndex::new(layer) }
}

/// Everything is to be removed that may be.
fn all() -> MergeOptions {
    MergeOptions { removal: Removal::Everywhere, beyond_own: true, ..MergeOptions::default() }
}

/// Drops layers of the disk's files, or of the disk in use.
fn merge(disk: &Path, layer: u16, is_live: bool) -> Merged {
    if !is_live {
        return Merge::new(disk, only(layer), &all(), &resources()).unwrap().run().unwrap();
    }
    let disk = open(disk);
    let merged = Merge::of_disk(&disk, only(layer), &all()).unwrap().run().unwrap();
    disk.close().unwrap();
    merged
}

#[test]
fn queues_read_the_part_and_nothing_beside_it() {
    let windowed = Windowed::new();
    let disk = open(&windowed.disk);
    disk.warm_map().unwrap();
    let before = disk.stats().at_workers;
    let (mut client, model) = (Client::new(&disk, 8), windowed.model());
    let len = 8192;
    for _ in 0..3 {
        for at in [0, 70_144, LEN - len] {
            client.push(Op::Read, at as u64, len as u64, None);
            let done = client.drain();
            assert_same(&done[0].bytes, &model[at..at + len], at as u64, "through the ring");
        }
    }
    assert_eq!(disk.stats().at_workers, before, "the ring reads it");
    write(&disk, 4096, &NEW).unwrap();
    disk.close().unwrap();
    drop((client, disk));
    let written = [&model[..4096], &NEW, &model[8192..]].concat();
    windowed.assert_is(&windowed.disk, &written, 2);
}

#[test]
fn a_part_without_a_size_goes_on_to_the_end_of_the_file() {
    let windowed = Windowed::new();
    let path = windowed.dir.path().join("rest.qcow2");
    windowed.overlay(&path, &windowed.json(START, None));
    let mut model = windowed.bytes[START..].to_vec();
    model.resize(model.len().next_multiple_of(512), 0);
    windowed.assert_is(&path, &model, 2);
}

#[test]
fn parts_that_the_file_does_not_have_are_refused_as_qemu_refuses_them() {
    let windowed = Windowed::new();
    for (start, len, said) in [
        (WHOLE + 512, None, "of the file, which has"),
        (WHOLE - 512, Some(1024), "of the file, which has"),
        (512, Some(1000), "no multiple of 512"),
    ] {
        let path = windowed.dir.path().join("refused.qcow2");
        let json = windowed.json(start, len);
        qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &json, path_str(&path), "1M"]);
        let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
        let error = Disk::open(&path, &read_only, &resources()).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        let stock = try_qemu_img(&["convert", "-O", "raw", path_str(&path), "/dev/null"]);
        assert!(!stock.status.success(), "QEMU reads {json}");
    }
}

#[test]
fn what_tells_of_the_chain_tells_of_the_part() {
    let windowed = Windowed::new();
    let disk = open_read_only(&windowed.disk);
    assert_eq!(disk.layers()[0].file_len, WHOLE as u64);
    let extents = disk.extents(GuestRange::new(GuestOffset::new(512), 512), 1).unwrap();
    assert_eq!(extents[0].kind, ExtentKind::Data);
    assert_eq!(extents[0].host.map(|host| host.get()), Some(START as u64 + 512));
    let heads = probe_chain(&windowed.disk, &OpenOptions::default()).unwrap();
    assert_eq!((heads[0].virtual_size, heads[0].file_len), (LEN as u64, WHOLE as u64));
    // Of the next part of the same length it differs in where it lies.
    let next = windowed.dir.path().join("next.qcow2");
    windowed.overlay(&next, &windowed.json(START + LEN, Some(LEN)));
    let resources = resources();
    let base = |path: &Path| {
        let chain = FrozenChain::new(path, &OpenOptions::default(), &resources);
        chain.last().unwrap().unwrap().place()
    };
    assert_eq!(base(&windowed.disk), base(&windowed.disk));
    assert_ne!(base(&windowed.disk), base(&next));
}

#[test]
fn a_disk_that_is_made_on_a_part_has_its_size() {
    let windowed = Windowed::new();
    let path = windowed.dir.path().join("made.qcow2");
    let backing = Some((windowed.json(START, Some(LEN)).into(), Format::Raw));
    create(&path, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    windowed.assert_is(&path, &windowed.model(), 2);
}

#[test]
fn a_merge_keeps_the_part_below_what_it_drops() {
    for is_live in [false, true] {
        let windowed = Windowed::new();
        let model = windowed.with_snapshot();
        windowed.assert_is(&windowed.disk, &model, 3);
        let merged = merge(&windowed.disk, 1, is_live);
        assert_eq!(merged.removed.len(), 1);
        windowed.assert_is(&windowed.disk, &model, 2);
    }
}

#[test]
fn a_merge_in_another_directory_keeps_the_part() {
    let windowed = Windowed::new();
    windowed.with_snapshot();
    let vms = windowed.dir.path().join("vms");
    std::fs::create_dir(&vms).unwrap();
    let clone = vms.join("clone.qcow2");
    snapshot::clone(&windowed.disk, "s1", &clone, &OpenOptions::default()).unwrap();
    let model = content(&clone, "qcow2");
    let open = OpenOptions { allow_backing: vec![windowed.dir.path().to_owned()], ..OpenOptions::default() };
    let options = MergeOptions { open, removal: Removal::Nothing, ..all() };
    Merge::new(&clone, only(1), &options, &resources()).unwrap().run().unwrap();
    windowed.assert_is(&clone, &model, 2);
}

#[test]
fn a_flattened_disk_leaves_the_file_of_its_base() {
    for is_live in [false, true] {
        let windowed = Windowed::new();
        let merged = merge(&windowed.disk, 0, is_live);
        assert_eq!(merged.kept, [(windowed.whole.clone(), Kept::Part)]);
        windowed.assert_is(&windowed.disk, &windowed.model(), 1);
    }
}

#[test]
fn a_part_of_a_file_is_no_snapshot() {
    let windowed = Windowed::new();
    windowed.with_snapshot();
    // The overlay on a snapshot now stands on a part of a file.
    let json = windowed.json(START, Some(LEN));
    qemu_img(&["rebase", "-u", "-F", "raw", "-b", &json, path_str(&windowed.disk)]);
    let found = snapshot::list(&windowed.disk, &OpenOptions::default()).unwrap();
    assert_eq!(found.iter().map(snapshot::Snapshot::name).collect::<Vec<_>>(), [None]);
}
