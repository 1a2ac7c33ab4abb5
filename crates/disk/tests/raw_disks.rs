//! A disk that is said to be raw: what is said stays right after snapshots, and no guest can turn it against its host.

mod common;

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::flat::{assert_reads, range, read, write};
use common::io::Client;
use common::stock::{assert_clean, path_str, qemu_img};
use common::{open_with, scratch};
use vmstrata_disk::merge::{Merge, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::{
    self, PrepareOptions, RevertOptions, SnapshotFault, SnapshotInfo, clone, list,
};
use vmstrata_disk::{CheckOptions, check};
use vmstrata_disk::{
    CreateOptions, Disk, Error, ErrorKind, Format, Op, OpenOptions, ResourceOptions, Resources, Together,
    create, probe_backing, probe_chain, probe_file,
};
use vmstrata_store::Gate;
use vmstrata_types::LayerIndex;

const SIZE: u64 = 1 << 20;

fn raw() -> OpenOptions {
    OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() }
}

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

/// A raw disk and what is in it.
struct Raw {
    dir: tempfile::TempDir,
    disk: PathBuf,
    model: Vec<u8>,
}

impl Raw {
    fn new() -> Self {
        let dir = scratch();
        let (disk, model) = (dir.path().join("web.img"), vec![7; SIZE as usize]);
        std::fs::write(&disk, &model).unwrap();
        Self { dir, disk, model }
    }

    fn write(&mut self, disk: &Disk, at: usize, byte: u8) {
        write(disk, at as u64, &[byte; 4096]).unwrap();
        self.model[at..at + 4096].fill(byte);
    }

    fn take(&self, name: &str) -> PathBuf {
        let options =
            PrepareOptions { format: Some(Format::Raw), convert_raw: true, ..PrepareOptions::default() };
        let disks = std::slice::from_ref(&self.disk);
        let taken = snapshot::create(disks, &named(name), &raw(), &options, &resources()).unwrap();
        taken.into_iter().next().unwrap().layer
    }

    fn merge(&self, first: u16, last: u16) {
        let range = MergeRange { first: LayerIndex::new(first), last: LayerIndex::new(last) };
        let options = MergeOptions { removal: Removal::All, open: raw(), ..MergeOptions::default() };
        Merge::new(&self.disk, range, &options, &resources()).unwrap().run().unwrap();
    }

    fn note(&self) -> PathBuf {
        self.dir.path().join("web.img.vmso")
    }

    /// Opened as at first, it is what it was, with these snapshots.
    fn assert_is(&self, names: &[&str], what: &str) {
        let disk = open_with(&self.disk, &raw());
        assert_eq!(disk.size(), SIZE, "{what}");
        assert_reads(&disk, &self.model, what);
        disk.close().unwrap();
        let found = list(&self.disk, &raw()).unwrap();
        assert_eq!(found.iter().filter_map(|found| found.name()).collect::<Vec<_>>(), names, "{what}");
    }

    fn refusal(&self) -> String {
        let error = Disk::open(&self.disk, &raw(), &resources()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unmarked { .. } | ErrorKind::Note { .. }), "{error}");
        error.to_string()
    }
}

#[test]
fn a_raw_disk_is_opened_as_raw_also_after_snapshots_of_its_files() {
    let mut web = Raw::new();
    let frozen = web.take("mon");
    assert_eq!(frozen, web.dir.path().join("web.mon.raw"));
    web.assert_is(&["mon"], "after the first");
    let disk = open_with(&web.disk, &raw());
    web.write(&disk, 8192, 9);
    disk.close().unwrap();
    drop(disk);
    assert_eq!(web.take("tue"), web.dir.path().join("web.tue.qcow2"));
    web.assert_is(&["tue", "mon"], "after the second");
    assert_clean(&web.disk);
}

#[test]
fn a_raw_disk_is_opened_as_raw_also_after_a_snapshot_of_the_running_disk() {
    let mut web = Raw::new();
    let disk = open_with(&web.disk, &raw());
    for (number, name) in ["mon", "tue"].into_iter().enumerate() {
        web.write(&disk, number << 16, 20 + number as u8);
        disk.snapshot(&named(name)).unwrap();
    }
    web.write(&disk, 3 << 16, 30);
    disk.close().unwrap();
    drop(disk);
    web.assert_is(&["tue", "mon"], "after two");
}

#[test]
fn a_raw_disk_is_opened_as_raw_also_after_its_layers_were_dropped_or_gone_back_to() {
    let mut web = Raw::new();
    for name in ["mon", "tue", "wed"] {
        web.take(name);
    }
    let at_wed = web.model.clone();
    let disk = open_with(&web.disk, &raw());
    web.write(&disk, 0, 40);
    disk.close().unwrap();
    drop(disk);
    web.merge(0, 0);
    web.assert_is(&["wed", "tue"], "without its raw layer");
    let prepare = PrepareOptions { format: Some(Format::Raw), ..PrepareOptions::default() };
    let options = RevertOptions { open: raw(), prepare, ..RevertOptions::default() };
    snapshot::revert(&web.disk, "wed", &options, &resources()).unwrap();
    web.model = at_wed;
    web.assert_is(&["wed", "tue"], "gone back");
    let layers = list(&web.disk, &raw()).unwrap().len() as u16;
    web.merge(0, layers - 1);
    web.assert_is(&[], "flat");
}

#[test]
fn what_a_guest_wrote_is_not_taken_for_an_overlay() {
    let mut web = Raw::new();
    let secret = web.dir.path().join("secret.qcow2");
    create(&secret, &CreateOptions { size: Some(SIZE), ..CreateOptions::default() }).unwrap();
    let plain = web.dir.path().join("forged.qcow2");
    let size = SIZE.to_string();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        path_str(&secret),
        "-F",
        "qcow2",
        path_str(&plain),
        &size,
    ]);
    let guest_writes = |web: &mut Raw, bytes: &[u8]| {
        std::fs::File::options().write(true).open(&web.disk).unwrap().write_all_at(bytes, 0).unwrap();
        web.model[..bytes.len()].copy_from_slice(bytes);
    };
    // A stock header is what it is: bytes of the guest's.
    guest_writes(&mut web, &std::fs::read(&plain).unwrap()[..65536]);
    web.assert_is(&[], "a stock header");
    // An overlay of ours from elsewhere: that this is none here cannot be told for sure.
    let other = Raw::new();
    other.take("mon");
    guest_writes(&mut web, &std::fs::read(&other.disk).unwrap()[..65536]);
    assert!(web.refusal().contains("web.img.vmso"), "{}", web.refusal());
    // Not by another disk's note either.
    let note = std::fs::read_to_string(other.note()).unwrap();
    let digit = note.find("\"mark\":\"").unwrap() + 8;
    let mut forged = note.into_bytes();
    forged[digit] = if forged[digit] == b'0' { b'1' } else { b'0' };
    std::fs::write(web.note(), forged).unwrap();
    web.refusal();
}

/// Between the note and the overlay a process may be killed, and the guest goes on writing.
#[test]
fn a_note_alone_makes_no_overlay_of_a_raw_file() {
    let web = Raw::new();
    let other = Raw::new();
    other.take("mon");
    std::fs::copy(other.note(), web.note()).unwrap();
    web.assert_is(&[], "no header at all");
    let stock = web.dir.path().join("stock.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&stock), "1M"]);
    std::fs::copy(&stock, &web.disk).unwrap();
    web.refusal();
}

#[test]
fn an_overlay_whose_note_is_lost_or_doubtful_is_refused_and_never_raw() {
    let web = Raw::new();
    web.take("mon");
    let note = std::fs::read(web.note()).unwrap();
    std::fs::remove_file(web.note()).unwrap();
    assert!(web.refusal().contains("format=qcow2"), "{}", web.refusal());
    for doubtful in [&b""[..], b"{}", &note[..note.len() / 2], b"{\"version\":2,\"mark\":\"\"}"] {
        std::fs::write(web.note(), doubtful).unwrap();
        assert!(web.refusal().contains("is damaged"), "{}", web.refusal());
    }
    let disk = open_with(&web.disk, &OpenOptions { format: Some(Format::Qcow2), ..OpenOptions::default() });
    assert_reads(&disk, &web.model, "as what it is");
    drop(disk);
    std::fs::write(web.note(), note).unwrap();
    web.assert_is(&["mon"], "the note is back");
}

#[test]
fn a_clone_of_a_raw_disk_is_qcow2_and_nothing_is_made_on_its_overlay_as_raw() {
    let web = Raw::new();
    web.take("mon");
    let ci = web.dir.path().join("ci.qcow2");
    clone(&web.disk, "mon", &ci, &raw()).unwrap();
    assert_reads(&common::open(&ci), &web.model, "the clone");
    let backing = Some((web.disk.clone(), Format::Raw));
    let made =
        |path: &Path| create(path, &CreateOptions { backing: backing.clone(), ..CreateOptions::default() });
    let error = made(&web.dir.path().join("wrong.qcow2")).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Overlay), "{error}");
}

fn stays_raw(error: &Error) {
    assert!(matches!(error.fault(), Some(SnapshotFault::StaysRaw)), "{error}");
    assert!(error.to_string().contains("--convert-raw"), "{error}");
}

#[test]
fn the_path_of_a_raw_disk_becomes_qcow2_only_where_it_may() {
    let web = Raw::new();
    let image = web.dir.path().join("root.qcow2");
    create(&image, &CreateOptions { size: Some(SIZE), ..CreateOptions::default() }).unwrap();
    let group = [image.clone(), web.disk.clone()];
    let take = |convert_raw| {
        let options = PrepareOptions { convert_raw, ..PrepareOptions::default() };
        snapshot::create(&group, &named("mon"), &OpenOptions::default(), &options, &resources())
    };
    stays_raw(&take(false).unwrap_err());
    let disks = group.each_ref().map(|path| common::open(path));
    stays_raw(&Together::of(&[&*disks[0], &*disks[1]]).check(&named("mon"), false).unwrap_err());
    drop(disks);
    assert_eq!(std::fs::read(&web.disk).unwrap(), web.model);
    assert!(list(&image, &OpenOptions::default()).unwrap().is_empty(), "all or none");
    let taken = take(true).unwrap();
    assert_eq!(taken.iter().map(|taken| taken.was_raw).collect::<Vec<_>>(), [false, true]);
}

/// A qcow2 header, which names another's image.
fn header(dir: &Path) -> Vec<u8> {
    let path = dir.join("evil.qcow2");
    let evil = path_str(&path);
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", "secret.qcow2", "-F", "qcow2", evil, "1M"]);
    std::fs::read(&path).unwrap()[..512].to_vec()
}

#[test]
fn a_guest_writes_no_header_to_a_disk_that_was_taken_for_raw() {
    let mut web = Raw::new();
    let header = header(web.dir.path());
    let disk = common::open(&web.disk);
    let refused = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::HeaderWrite { .. }), "{error}");
        assert!(error.to_string().contains("format=raw"), "{error}");
        assert_eq!(error.errno(), rustix::io::Errno::PERM.raw_os_error());
    };
    refused(write(&disk, 0, &header));
    let mut queue = Client::new(&disk, 8);
    for fua in [false, true] {
        queue.push(Op::Write { fua }, 0, 512, Some(&header));
        refused(queue.drain().pop().expect("one").result);
    }
    // Piece by piece: the last one makes the header.
    write(&disk, 2, &header[2..512]).unwrap();
    web.model[2..512].copy_from_slice(&header[2..]);
    refused(write(&disk, 0, &header[..2]));
    write(&disk, 0, b"QED\x01").unwrap();
    web.model[..4].copy_from_slice(b"QED\x01");
    refused(disk.write_zeroes(range(3, 1), true));
    disk.discard(range(3, 1)).unwrap();
    // What is no header is written, and what lies behind the first sector may be anything.
    let rest = [&[5; 512][..], &header].concat();
    for at in [0, 512] {
        queue.push(Op::Write { fua: false }, at, 1024, Some(&rest));
        queue.drain().pop().expect("one").result.unwrap();
        web.model[at as usize..at as usize + 1024].copy_from_slice(&rest);
    }
    assert_reads(&disk, &web.model, "but for what was refused");
    drop((queue, disk));
    let said = open_with(&web.disk, &raw());
    write(&said, 0, &header).unwrap();
    assert_eq!(read(&said, 0, 512).unwrap(), header, "format=raw lets it through");
}

#[test]
fn images_of_other_formats_are_refused_by_name_and_raw_where_said() {
    let dir = scratch();
    let source = dir.path().join("source.raw");
    std::fs::write(&source, [0x42; 1 << 20]).unwrap();
    let mut count = 0;
    for (format, options) in [
        ("qcow", ""),
        ("qed", ""),
        ("vmdk", ""),
        ("vmdk", "subformat=monolithicFlat"),
        ("vdi", ""),
        ("vhdx", ""),
        ("vpc", ""),
        ("vpc", "subformat=fixed"),
        ("parallels", ""),
    ] {
        count += 1;
        let path = dir.path().join(format!("{count}.img"));
        let image = path_str(&path);
        let mut convert = vec!["convert", "-f", "raw", "-O", format, path_str(&source), image];
        if !options.is_empty() {
            convert.extend(["-o", options]);
        }
        qemu_img(&convert);
        let refused = |error: Error| {
            let said = error.to_string();
            assert!(matches!(error.kind(), ErrorKind::Foreign { .. }), "{format} {options}: {said}");
            assert!(said.contains(&format!("a {format} image")) && said.contains("format=raw"), "{said}");
        };
        let open = OpenOptions::default();
        refused(Disk::open(&path, &open, &resources()).unwrap_err());
        refused(probe_chain(&path, &open).unwrap_err());
        refused(probe_file(&path, &Gate::unrestricted()).unwrap().head.unwrap_err());
        refused(probe_backing(&dir.path().join("new"), &path).unwrap_err());
        refused(check(&path, &CheckOptions::default()).unwrap_err());
        let prepare = PrepareOptions { convert_raw: true, ..PrepareOptions::default() };
        refused(
            snapshot::create(std::slice::from_ref(&path), &named("s"), &open, &prepare, &resources())
                .unwrap_err(),
        );
        let overlay = dir.path().join("overlay.qcow2");
        let made = CreateOptions {
            backing: Some((path.clone(), Format::Raw)),
            force: true,
            ..CreateOptions::default()
        };
        create(&overlay, &made).unwrap();
        common::open(&overlay).close().unwrap();
        forget_backing_format(&overlay);
        refused(Disk::open(&overlay, &open, &resources()).unwrap_err());
        open_with(&path, &OpenOptions { force: true, ..raw() }).close().unwrap();
    }
}

/// Makes the header say nothing of the format below.
fn forget_backing_format(overlay: &Path) {
    let mut bytes = std::fs::read(overlay).unwrap();
    let at = bytes.windows(4).position(|word| word == [0xe2, 0x79, 0x2a, 0xca]).expect("it says it");
    bytes[at..at + 4].copy_from_slice(b"none");
    std::fs::write(overlay, bytes).unwrap();
}
