//! Long chains, broken chains, and chains that lead where they may not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{assert_same, range, read, write};
use crate::common::stock::{User, path_str, qemu_img, try_qemu_io};
use crate::common::{open, open_read_only, scratch, stock, wait_until};
use vmstrata_disk::{
    CheckOptions, CreateOptions, Disk, Error, ErrorKind, Format, LocalFiles, OpenOptions, Opener as _,
    ResourceOptions, Resources, Role, create,
};
use vmstrata_store::Gate;
use vmstrata_types::{ClusterBits, MAX_LAYERS};

const CLUSTER: u64 = 4096;
const CLUSTERS: usize = 96;

fn name(number: usize) -> String {
    format!("layer{number:06}")
}

/// Chains made fast: the bytes of one layer for each cluster it may have, to be patched.
struct Maker {
    dir: tempfile::TempDir,
    /// Bytes of a layer with one data cluster, and where in them its data lies.
    templates: Vec<(Vec<u8>, usize)>,
}

impl Maker {
    fn new() -> Self {
        let dir = scratch();
        let below = dir.path().join(name(0));
        std::fs::write(&below, vec![0; CLUSTERS * CLUSTER as usize]).unwrap();
        let templates = (0..CLUSTERS as u64).map(|cluster| template(dir.path(), cluster * CLUSTER)).collect();
        Self { dir, templates }
    }

    fn path(&self, number: usize) -> PathBuf {
        self.dir.path().join(name(number))
    }

    /// Puts layers `1..=count` on the raw base; each has one cluster, full of its own number.
    fn layers(&self, count: usize) -> PathBuf {
        for number in 1..=count {
            let (mut bytes, data) = self.templates[number % CLUSTERS].clone();
            put_backing_name(&mut bytes, &name(number - 1), number > 1);
            for word in bytes[data..data + CLUSTER as usize].chunks_mut(8) {
                word.copy_from_slice(&(number as u64).to_be_bytes());
            }
            std::fs::write(self.path(number), bytes).unwrap();
        }
        self.path(count)
    }

    /// What a chain of so many layers reads as.
    fn content(count: usize) -> Vec<u8> {
        let newest =
            |cluster: usize| (1..=count).rev().find(|number| number % CLUSTERS == cluster).unwrap_or(0);
        let words = |cluster| (newest(cluster) as u64).to_be_bytes().repeat(CLUSTER as usize / 8);
        (0..CLUSTERS).flat_map(words).collect()
    }
}

fn template(dir: &Path, at: u64) -> (Vec<u8>, usize) {
    let path = dir.join("template");
    let options = CreateOptions {
        cluster_bits: ClusterBits::from_size(CLUSTER).unwrap(),
        // No format is stored, so that layers on raw and on qcow2 files have the same bytes.
        backing: Some((name(0).into(), Format::Raw)),
        force: true,
        ..CreateOptions::default()
    };
    create(&path, &options).unwrap();
    let disk = open(&path);
    write(&disk, at, &[0xAB; CLUSTER as usize]).unwrap();
    let extents = disk.extents_by_place(range(at, CLUSTER), 1).unwrap();
    let host = extents[0].host.unwrap().get() as usize;
    disk.close().unwrap();
    drop(disk);
    (std::fs::read(&path).unwrap(), host)
}

/// Changes the backing name of an image, whose length stays, and the stored format.
fn put_backing_name(bytes: &mut [u8], name: &str, qcow2: bool) {
    let at = u64::from_be_bytes(bytes[8..16].try_into().unwrap()) as usize;
    let len = u32::from_be_bytes(bytes[16..20].try_into().unwrap()) as usize;
    assert_eq!(len, name.len());
    bytes[at..at + len].copy_from_slice(name.as_bytes());
    if qcow2 {
        // The format's header extension: type, length, "raw" padded to eight bytes.
        let extension = b"\xE2\x79\x2A\xCA\x00\x00\x00\x03raw\0";
        let place = bytes.windows(extension.len()).position(|window| window == extension).expect("a format");
        bytes[place + 7] = 5;
        bytes[place + 8..place + 16].copy_from_slice(b"qcow2\0\0\0");
    }
}

fn try_open(path: &Path, options: &OpenOptions) -> Result<Arc<Disk>, Error> {
    Disk::open(path, options, &Resources::new(ResourceOptions::default()))
}

/// Opening for reading fails, with this in the message.
fn assert_refused(path: &Path, wanted: &[&str]) -> Error {
    let error = try_open(path, &OpenOptions { read_only: true, ..OpenOptions::default() })
        .expect_err("must be refused");
    let message = error.to_string();
    for wanted in wanted {
        assert!(message.contains(wanted), "{message:?} does not say {wanted:?}");
    }
    error
}

#[test]
fn a_thousand_layers_read_as_one_disk() {
    let maker = Maker::new();
    let top = maker.layers(1200);
    let disk = open(&top);
    assert_eq!(disk.layers().len(), 1201);
    let mut content = Maker::content(1200);
    assert_same(&read(&disk, 0, content.len()).unwrap(), &content, 0, "1,200 layers");
    write(&disk, 5 * CLUSTER - 512, &[0x5C; 1024]).unwrap();
    content[5 * CLUSTER as usize - 512..][..1024].fill(0x5C);
    assert_same(&read(&disk, 0, content.len()).unwrap(), &content, 0, "after a write on top");
    disk.close().unwrap();
    // Stock tools would open the whole chain for it, which takes them a minute.
    let options = CheckOptions { force_share: true, ..CheckOptions::default() };
    assert!(vmstrata_disk::check(&top, &options).unwrap().is_clean());
}

#[test]
fn a_long_chain_reads_as_stock_tools_read_it() {
    let maker = Maker::new();
    let top = maker.layers(130);
    let content = Maker::content(130);
    assert_same(&stock::content(&top, "qcow2"), &content, 0, "as qemu-img reads it");
    assert_same(&read(&open_read_only(&top), 0, content.len()).unwrap(), &content, 0, "as we read it");
}

/// Descriptors of this process that lead into a directory.
fn descriptors_into(dir: &Path) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries
        .filter(|entry| {
            std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to.starts_with(dir))
        })
        .count()
}

#[test]
fn open_files_and_metadata_stay_inside_their_limits() {
    let maker = Maker::new();
    let top = maker.layers(300);
    let options =
        ResourceOptions { metadata_cache_bytes: 0, max_open_files: 16, ..ResourceOptions::default() };
    let resources = Resources::new(options);
    let disk = Disk::open(&top, &OpenOptions::default(), &resources).unwrap();
    let content = Maker::content(300);
    for round in 0..3 {
        for (cluster, expected) in content.chunks(CLUSTER as usize).enumerate() {
            let found = read(&disk, cluster as u64 * CLUSTER, expected.len()).unwrap();
            assert_same(&found, expected, cluster as u64 * CLUSTER, "300 layers through 16 files");
            // The active layer's file is open for good; one more may be on its way out.
            assert!(descriptors_into(maker.dir.path()) <= 16 + 2, "round {round}: too many open files");
            let usage = resources.usage();
            assert!(usage.open_files <= 16 && usage.metadata_cache_bytes <= 128 << 10, "{usage:?}");
        }
    }
}

#[test]
fn a_frozen_layer_that_changes_while_its_file_is_closed_fails_the_disk() {
    let maker = Maker::new();
    let top = maker.layers(40);
    let resources = Resources::new(ResourceOptions { max_open_files: 1, ..ResourceOptions::default() });
    let disk = Disk::open(&top, &OpenOptions::default(), &resources).unwrap();
    // One file may be open. Opening leaves any of them open; this read, that of layer 31.
    read(&disk, 31 * CLUSTER, 512).unwrap();
    let victim = maker.path(30);
    let mut bytes = std::fs::read(&victim).unwrap();
    bytes.extend([0; 512]);
    std::fs::write(&victim, &bytes).unwrap();
    let other = maker.dir.path().join("other");
    std::fs::write(&other, bytes).unwrap();
    for is_replaced in [false, true] {
        if is_replaced {
            std::fs::rename(&other, &victim).unwrap();
        }
        let error = read(&disk, 30 * CLUSTER, 512).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Changed), "{error}");
        assert_eq!(error.path(), Some(&*victim));
        assert!(read(&disk, 31 * CLUSTER, 512).is_ok(), "other layers are as they were");
    }
    let refused = write(&disk, 0, &[1; 512]).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Failed { .. }), "{refused}");
}

/// Files of one page each, without data: the least a layer can be.
#[test]
fn chains_end_at_the_limit_of_layers() {
    let dir = scratch();
    let path = |number: usize| dir.path().join(name(number));
    std::fs::write(path(0), [0; 512]).unwrap();
    let options = CreateOptions {
        cluster_bits: ClusterBits::MIN,
        backing: Some((name(0).into(), Format::Raw)),
        ..CreateOptions::default()
    };
    create(&dir.path().join("template"), &options).unwrap();
    let template = std::fs::read(dir.path().join("template")).unwrap();
    for number in 1..=MAX_LAYERS {
        let mut bytes = template.clone();
        put_backing_name(&mut bytes, &name(number - 1), number > 1);
        std::fs::write(path(number), bytes).unwrap();
    }
    let error = assert_refused(&path(MAX_LAYERS), &["longer than 65535 layers"]);
    assert!(matches!(error.kind(), ErrorKind::TooLong));
    let disk = open_read_only(&path(MAX_LAYERS - 1));
    assert_eq!(disk.layers().len(), MAX_LAYERS);
    assert_same(&read(&disk, 0, 512).unwrap(), &[0; 512], 0, "the longest chain");
}

fn qcow2(path: &Path, backing: &str) {
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", backing, path_str(path), "1M"]);
}

#[test]
fn loops_are_found_however_the_files_are_named() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    qcow2(&path("self"), "self");
    let error = assert_refused(&path("self"), &["names itself", "self"]);
    assert!(matches!(error.kind(), ErrorKind::OwnBacking));
    // Opened for writing, it has its own lock in the way.
    let error = try_open(&path("self"), &OpenOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OwnBacking), "{error}");
    qcow2(&path("a"), "b");
    qcow2(&path("b"), "c");
    qcow2(&path("c"), "link");
    std::os::unix::fs::symlink("a", path("link")).unwrap();
    assert_refused(&path("a"), &["loops"]);
    qcow2(&path("hard"), "other");
    std::fs::hard_link(path("hard"), path("other")).unwrap();
    assert_refused(&path("hard"), &["names itself"]);
}

#[test]
fn backing_files_that_are_missing_outside_or_no_files_are_refused() {
    let (dir, outside) = (scratch(), scratch());
    let path = |name: &str| dir.path().join(name);
    let secret = outside.path().join("secret");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&secret), "1M"]);
    qcow2(&path("missing"), "nowhere");
    assert_refused(&path("missing"), &["nowhere", "No such file"]);
    qcow2(&path("outside"), path_str(&secret));
    assert_refused(&path("outside"), &["outside the allowed directories", "--allow-backing"]);
    let up = format!("../{}/secret", outside.path().file_name().unwrap().to_str().unwrap());
    qcow2(&path("up"), &up);
    assert_refused(&path("up"), &["outside the allowed directories"]);
    std::os::unix::fs::symlink(&secret, path("link")).unwrap();
    qcow2(&path("linked"), "link");
    assert_refused(&path("linked"), &["outside the allowed directories", "secret"]);
    qcow2(&path("directory"), ".");
    assert_refused(&path("directory"), &["directory"]);
    let allowed = OpenOptions { allow_backing: vec![outside.path().to_owned()], ..OpenOptions::default() };
    for top in ["outside", "up", "linked"] {
        try_open(&path(top), &allowed).unwrap();
    }
}

#[test]
fn names_that_are_not_plain_files_are_refused_by_name() {
    let dir = scratch();
    let path = dir.path().join("disk");
    for name in ["json:{\"driver\":\"null-co\"}", "nbd://localhost/x", "ssh://host/x", "rbd:pool/x"] {
        qcow2(&path, name);
        // As Rust quotes it.
        assert_refused(&path, &["not supported", &format!("{name:?}")]);
    }
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-F", "vmdk", "-b", "x", path_str(&path), "1M"]);
    assert_refused(&path, &["vmdk", "not supported"]);
}

#[test]
fn a_layer_that_was_cut_short_is_an_error_where_it_is_cut() {
    let maker = Maker::new();
    for layers in [3, 40] {
        let top = maker.layers(layers);
        let file = std::fs::OpenOptions::new().write(true).open(maker.path(2)).unwrap();
        let data = maker.templates[2].1 as u64;
        file.set_len(data).unwrap();
        let disk = open_read_only(&top);
        let error = read(&disk, 2 * CLUSTER, 512).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Truncated { .. }), "{error}");
        assert_eq!((error.path(), error.layer().unwrap().get()), (Some(&*maker.path(2)), 2));
        assert!(read(&disk, 3 * CLUSTER, 512).is_ok(), "other clusters are as they were");
        drop(disk);
        file.set_len(100).unwrap();
        assert_refused(&top, &[path_str(&maker.path(2))]);
    }
}

fn stock_can_write(path: &Path) -> bool {
    let output = try_qemu_io(path, &["-f", "qcow2"], &["write 0 512".to_owned()]);
    !stock::text(&output).contains("lock")
}

#[test]
fn stock_tools_cannot_write_to_files_that_are_open_here() {
    let dir = scratch();
    let (base, top) = (dir.path().join("base"), dir.path().join("top"));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), "1M"]);
    qcow2(&top, "base");
    let disk = open(&top);
    assert!(!stock_can_write(&top), "the active layer");
    assert!(!stock_can_write(&base), "a frozen layer");
    assert!(qemu_img(&["info", path_str(&base)]).contains("qcow2"), "a frozen layer may be read");
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    let refused = try_open(&top, &read_only).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::File(_)), "{refused}");
    let refused = try_open(&base, &OpenOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("in use") && refused.contains("base"), "{refused}");
    try_open(&base, &read_only).unwrap();
    disk.close().unwrap();
    drop(disk);
    let reader = open_read_only(&top);
    assert!(!stock_can_write(&top), "a disk open for reading");
    drop(reader);
    wait_until("the file is unlocked", || stock_can_write(&top));
}

#[test]
fn files_that_qemu_writes_are_refused_and_files_that_it_reads_are_shared() {
    let dir = scratch();
    let (base, top) = (dir.path().join("base"), dir.path().join("top"));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), "1M"]);
    qcow2(&top, "base");
    let writer = User::with(&base, &[]);
    assert_refused(&base, &["in use"]);
    assert_refused(&top, &["in use", "base"]);
    drop(writer);
    let reader = User::with(&base, &["-r"]);
    let disk = open(&top);
    disk.close().unwrap();
    drop(disk);
    let refused = try_open(&base, &OpenOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    drop(reader);
    let forced = OpenOptions { force: true, ..OpenOptions::default() };
    try_open(&base, &forced).unwrap().close().unwrap();
}

/// The kernel holds the files of a killed process until its I/O has ended: a server that was killed while it merged must not keep its
/// successor from starting.
#[test]
fn a_layer_that_a_dying_process_merged_into_is_waited_for() {
    let dir = scratch();
    let [base, top] = ["base", "top"].map(|name| dir.path().join(name));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), "1M"]);
    qcow2(&top, "base");
    let dying = LocalFiles.open(&base, Role::CopiedInto, &Gate::unrestricted()).unwrap();
    let dead = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        drop(dying);
    });
    drop(open(&top));
    dead.join().unwrap();
    let _merging = LocalFiles.open(&base, Role::CopiedInto, &Gate::unrestricted()).unwrap();
    assert_refused(&top, &["base", "being merged"]);
}
