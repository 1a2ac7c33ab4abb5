//! Taking indices away from files that were written since: nothing of the guest's goes with them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::common::flat::write;
use crate::common::stock::{assert_clean, content, qemu_io};
use crate::common::{open, scratch};
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build, remove};
use vmstrata_disk::{CreateOptions, LocalFiles, Opened, Opener, Role, create};
use vmstrata_store::{Gate, LocalFile, Segment, Store, slice, total_len};
use vmstrata_types::HostOffset;

fn with_top() -> IndexOptions {
    IndexOptions { include_top: true, ..IndexOptions::default() }
}

/// An image that ends in the middle of its last cluster, with an index behind that.
fn ends_within_a_cluster(path: &Path) {
    create(path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).expect("creates");
    let disk = open(path);
    write(&disk, 0, &[1; 4096]).expect("writes");
    disk.close().expect("closes");
    drop(disk);
    assert_ne!(path.metadata().expect("exists").len() % 65536, 0, "the rest of the cluster is not there");
    build(path, &with_top()).expect("builds");
}

fn write_the_rest(path: &Path, by_stock: bool) {
    if by_stock {
        qemu_io(path, &["write -q -P 2 4k 56k".to_owned()]);
        return;
    }
    let disk = open(path);
    write(&disk, 4096, &[2; 56 << 10]).expect("writes");
    disk.close().expect("closes");
}

/// A write into a cluster that is there changes no table, and bytes that the file did not have when the index was made.
#[test]
fn what_was_written_in_place_since_stays_when_the_index_goes() {
    for (by_stock, is_built_again) in [(false, false), (true, false), (false, true), (true, true)] {
        let dir = scratch();
        let path = dir.path().join("disk");
        ends_within_a_cluster(&path);
        write_the_rest(&path, by_stock);
        let expected = content(&path, "qcow2");
        assert!(expected[4096..60 << 10].iter().all(|&byte| byte == 2));
        if is_built_again {
            build(&path, &with_top()).expect("builds");
        }
        let with_index = path.metadata().expect("exists").len();
        remove(&path, &with_top()).expect("removes");
        assert!(path.metadata().expect("exists").len() < with_index, "the index is cut off");
        assert!(content(&path, "qcow2") == expected, "by stock: {by_stock}, built again: {is_built_again}");
        assert_clean(&path);
    }
}

/// A killed process leaves pages behind that nothing leads to: the next index takes their place, and goes with them.
#[test]
fn pages_that_nothing_leads_to_are_overwritten() {
    let dir = scratch();
    let path = dir.path().join("disk");
    ends_within_a_cluster(&path);
    let with_index = path.metadata().expect("exists").len();
    remove(&path, &with_top()).expect("removes");
    let file = std::fs::OpenOptions::new().append(true).open(&path).expect("opens");
    std::io::Write::write_all(&mut &file, &vec![0x55; 300 << 10]).expect("writes");
    assert_clean(&path);
    build(&path, &with_top()).expect("builds");
    assert_eq!(path.metadata().expect("exists").len(), with_index);
    remove(&path, &with_top()).expect("removes");
    assert!(path.metadata().expect("exists").len() < with_index);
    assert_clean(&path);
}

/// A host without room: the file is as long and as old as it was.
#[test]
fn an_index_that_does_not_fit_leaves_nothing_behind() {
    let dir = scratch();
    let path = dir.path().join("disk");
    ends_within_a_cluster(&path);
    remove(&path, &with_top()).expect("removes");
    let state = || {
        let data = path.metadata().expect("exists");
        (data.len(), data.modified().expect("a time"))
    };
    let before = state();
    let full = Arc::new(FullHost { room: before.0.next_multiple_of(65536) + 4096 });
    let built =
        build(&path, &IndexOptions { opener: Some(full), ..with_top() }).expect("the chain can be read");
    let IndexOutcome::Failed(error) = &built.layers[0].outcome else { panic!("{built:?}") };
    assert_eq!(error.errno(), rustix::io::Errno::NOSPC.raw_os_error(), "{error}");
    assert_eq!(state(), before);
    build(&path, &with_top()).expect("builds");
}

/// A host whose files cannot get longer than `room`.
#[derive(Debug)]
struct FullHost {
    room: u64,
}

impl Opener for FullHost {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let Opened { store, identity } = LocalFiles.open(path, role, gate)?;
        Ok(Opened { store: Arc::new(FullStore { store, room: self.room }), identity })
    }
}

#[derive(Debug)]
struct FullStore {
    store: Arc<dyn Store>,
    room: u64,
}

impl Store for FullStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.store.read_segments(segments, at)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        let fits = self.room.saturating_sub(at.get()).min(total_len(segments) as u64) as usize;
        self.store.write_segments(&slice(segments, 0, fits), at)?;
        if fits == total_len(segments) { Ok(()) } else { Err(rustix::io::Errno::NOSPC.into()) }
    }

    fn flush(&self) -> io::Result<()> {
        self.store.flush()
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.store.punch_hole(at, len)
    }

    fn len(&self) -> io::Result<u64> {
        self.store.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.store.set_len(len)
    }

    fn local(&self) -> Option<&dyn LocalFile> {
        self.store.local()
    }
}

/// Where nobody wrote, the file is what it was, also after a second index in place of the first.
#[test]
fn a_file_that_ended_within_a_cluster_does_so_again() {
    let dir = scratch();
    let path = dir.path().join("disk");
    ends_within_a_cluster(&path);
    let len = |path: &Path| path.metadata().expect("exists").len();
    let with_index = len(&path);
    remove(&path, &with_top()).expect("removes");
    let before = len(&path);
    assert_ne!(before % 65536, 0);
    for _ in 0..2 {
        build(&path, &with_top()).expect("builds");
        assert_eq!(len(&path), with_index);
        // The bit goes, and with it the index; its place is taken again.
        qemu_io(&path, &["write -q -P 3 0 512".to_owned()]);
    }
    remove(&path, &with_top()).expect("removes");
    assert_eq!(len(&path), before);
    assert_clean(&path);
}
