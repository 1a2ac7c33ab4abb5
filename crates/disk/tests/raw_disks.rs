//! A disk that is said to be raw: a snapshot makes it qcow2, and no guest can turn that against its host.

use crate::common;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{assert_reads, range, read, write};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, path_str, qemu_img};
use crate::common::{open_with, scratch};
use vmstrata_disk::merge::{Merge, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotFault, SnapshotInfo, list};
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

    fn take(&self, name: &str, open: &OpenOptions) -> PathBuf {
        let options = PrepareOptions { format: open.format, convert_raw: true, ..PrepareOptions::default() };
        let disks = std::slice::from_ref(&self.disk);
        let taken = snapshot::create(disks, &named(name), open, &options, &resources()).unwrap();
        taken.into_iter().next().unwrap().layer
    }

    /// As qcow2 it is what the raw disk was, with these snapshots; as raw it is refused.
    fn assert_converted(&self, names: &[&str], what: &str) {
        let qcow2 = OpenOptions { format: Some(Format::Qcow2), ..OpenOptions::default() };
        let disk = open_with(&self.disk, &qcow2);
        assert_eq!(disk.size(), SIZE, "{what}");
        assert_reads(&disk, &self.model, what);
        disk.close().unwrap();
        drop(disk);
        let found = list(&self.disk, &qcow2).unwrap();
        assert_eq!(found.iter().filter_map(|found| found.name()).collect::<Vec<_>>(), names, "{what}");
        refused_as_raw(&self.disk);
    }
}

/// A file with the header of an overlay is one or has a guest's forgery in it: the refusal names both.
fn refused_as_raw(disk: &Path) {
    let error = Disk::open(disk, &raw(), &resources()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::SaidRaw), "{error}");
    for part in ["format=qcow2", "its guest wrote", "--backing-format raw"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn a_snapshot_of_its_file_makes_a_raw_disk_qcow2() {
    let mut web = Raw::new();
    let frozen = web.take("mon", &raw());
    assert_eq!(frozen, web.dir.path().join("web.mon.raw"));
    web.assert_converted(&["mon"], "after the first");
    let disk = common::open(&web.disk);
    web.write(&disk, 8192, 9);
    disk.close().unwrap();
    drop(disk);
    assert_eq!(web.take("tue", &OpenOptions::default()), web.dir.path().join("web.tue.qcow2"));
    web.assert_converted(&["tue", "mon"], "after the second");
    assert_clean(&web.disk);
}

#[test]
fn a_running_raw_disk_is_qcow2_from_its_first_snapshot_on() {
    let mut web = Raw::new();
    let disk = open_with(&web.disk, &raw());
    assert_eq!(disk.format(), Format::Raw);
    for (number, name) in ["mon", "tue"].into_iter().enumerate() {
        web.write(&disk, number << 16, 20 + number as u8);
        disk.snapshot(&named(name)).unwrap();
        assert_eq!(disk.format(), Format::Qcow2);
    }
    web.write(&disk, 3 << 16, 30);
    // What the running disk asks of its files it asks of a qcow2 file.
    let range = MergeRange { first: LayerIndex::new(0), last: LayerIndex::new(0) };
    let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
    Merge::of_disk(&disk, range, &options).unwrap().run().unwrap();
    disk.snapshot(&named("wed")).unwrap();
    disk.close().unwrap();
    drop(disk);
    web.assert_converted(&["wed", "tue"], "after all");
    let disk = common::open(&web.disk);
    let last = LayerIndex::new(disk.layer_count() as u16 - 2);
    let all = MergeRange { first: LayerIndex::new(0), last };
    Merge::of_disk(&disk, all, &options).unwrap().run().unwrap();
    disk.close().unwrap();
    drop(disk);
    web.assert_converted(&[], "flattened");
}

#[test]
fn what_a_guest_wrote_is_not_taken_for_an_overlay() {
    let mut web = Raw::new();
    let own = header(web.dir.path());
    std::fs::File::options().write(true).open(&web.disk).unwrap().write_all_at(&own, 0).unwrap();
    web.model[..own.len()].copy_from_slice(&own);
    assert_reads(&open_with(&web.disk, &raw()), &web.model, "a qcow2 image that the guest keeps there");
    // One that imitates an overlay.
    let other = Raw::new();
    other.take("mon", &raw());
    let forged = std::fs::read(&other.disk).unwrap()[..4096].to_vec();
    std::fs::File::options().write(true).open(&web.disk).unwrap().write_all_at(&forged, 0).unwrap();
    web.model[..forged.len()].copy_from_slice(&forged);
    refused_as_raw(&web.disk);
    // The way out that the refusal names.
    let on_top = web.dir.path().join("new.qcow2");
    let backing = Some((web.disk.clone(), Format::Raw));
    create(&on_top, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    assert_reads(&common::open(&on_top), &web.model, "as data");
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
