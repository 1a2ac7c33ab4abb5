//! Looking at single files: what they say, who writes them, and what is never opened.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use crate::common::scratch;
use crate::common::stock::{User, path_str, qemu_img, qemu_io};
use vmstrata_disk::{
    Disk, ErrorKind, Format, OpenOptions, ResourceOptions, Resources, own_clusters, probe_file,
};
use vmstrata_store::Gate;

fn create(path: &Path, args: &[&str]) {
    qemu_img(&[&["create", "-q", "-f", "qcow2", path_str(path)], args].concat());
}

#[test]
fn a_file_says_what_it_is_and_when_it_was_made() {
    let dir = scratch();
    let (base, top, raw) = (dir.path().join("base"), dir.path().join("top"), dir.path().join("raw"));
    create(&base, &["16M"]);
    create(&top, &["-b", "base", "-F", "qcow2"]);
    std::fs::write(&raw, "not an image").unwrap();
    let found = probe_file(&top, &Gate::unrestricted()).unwrap();
    let metadata = std::fs::metadata(&top).unwrap();
    assert_eq!(found.identity.file.ino, metadata.ino());
    assert_eq!(found.allocated_bytes, metadata.blocks() * 512);
    // Not every file system knows.
    if let (Some(born), Ok(created)) = (found.born_ns, metadata.created()) {
        let since = created.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        assert_eq!(u128::try_from(born).unwrap(), since);
    }
    let head = found.head.unwrap().expect("qcow2");
    assert_eq!(head.header.size, 16 << 20);
    let backing = head.backing.expect("named");
    assert_eq!((&*backing.name, backing.place.unwrap()), (OsStr::new("base"), (base, Some(Format::Qcow2))));
    assert!(probe_file(&raw, &Gate::unrestricted()).unwrap().head.unwrap().is_none());
}

#[test]
fn a_bad_header_and_a_bad_name_are_findings() {
    let dir = scratch();
    let (cut, net) = (dir.path().join("cut"), dir.path().join("net"));
    create(&cut, &["16M"]);
    std::fs::File::options().write(true).open(&cut).unwrap().set_len(60).unwrap();
    create(&net, &["-u", "-b", "nbd://host/x", "-F", "raw", "16M"]);
    let error = probe_file(&cut, &Gate::unrestricted()).unwrap().head.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Format(_)) && error.path() == Some(&cut), "{error}");
    let backing = probe_file(&net, &Gate::unrestricted()).unwrap().head.unwrap().unwrap().backing.unwrap();
    assert_eq!(backing.name, "nbd://host/x");
    assert!(matches!(backing.place.unwrap_err().kind(), ErrorKind::BackingName { .. }));
}

#[test]
fn a_writer_is_seen_and_not_disturbed() {
    let dir = scratch();
    let path = dir.path().join("disk");
    create(&path, &["16M"]);
    let writer = || probe_file(&path, &Gate::unrestricted()).unwrap().writer;
    assert!(!writer());
    let user = User::with(&path, &[]);
    let seen = writer();
    drop(user);
    assert!(seen && !writer());
}

#[test]
fn our_own_session_shows_while_it_lasts() {
    let dir = scratch();
    let path = dir.path().join("disk");
    create(&path, &["16M"]);
    let options = ResourceOptions { journal_dir: Some(dir.path().to_owned()), ..ResourceOptions::default() };
    let disk = Disk::open(&path, &OpenOptions::default(), &Resources::new(options)).unwrap();
    let look = || {
        let found = probe_file(&path, &Gate::unrestricted()).unwrap();
        (found.writer, found.head.unwrap().unwrap().is_in_session())
    };
    assert_eq!(look(), (true, true));
    disk.close().unwrap();
    drop(disk);
    assert_eq!(look(), (false, false));
}

#[test]
fn what_the_gate_keeps_out_is_not_looked_at() {
    let (dir, other) = (scratch(), scratch());
    let (inside, outside) = (dir.path().join("link"), other.path().join("disk"));
    create(&outside, &["16M"]);
    std::os::unix::fs::symlink(&outside, &inside).unwrap();
    let gate = Gate::new([dir.path()]).unwrap();
    assert!(matches!(probe_file(&inside, &gate).unwrap_err().kind(), ErrorKind::Gate(_)));
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(matches!(probe_file(&fifo, &gate).unwrap_err().kind(), ErrorKind::Gate(_)));
}

#[test]
fn a_layer_answers_for_the_subclusters_that_it_has() {
    let dir = scratch();
    let path = dir.path().join("disk");
    create(&path, &["-o", "extended_l2=on,cluster_size=128k", "1M"]);
    let writes = ["write -q -P 1 4k 8k", "write -q -z 20k 4k", "write -q -P 2 512k 128k"];
    qemu_io(&path, &writes.map(str::to_owned));
    let mut found = Vec::new();
    own_clusters(&path, &Gate::unrestricted(), |own| {
        found.push((own.range.start.get(), own.range.len, own.host_bytes));
    })
    .unwrap();
    let (part, whole) = (8 << 10, 128 << 10);
    assert_eq!(found, [(4096, part, part), (20 << 10, 4096, 0), (512 << 10, whole, whole)]);
}
