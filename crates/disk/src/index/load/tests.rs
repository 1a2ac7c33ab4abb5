use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmstrata_store::{FileIdentity, Segment};
use vmstrata_types::{ClusterBits, GuestOffset};

use super::*;
use crate::Format;
use crate::chain::open_layer;
use crate::create::{CreateOptions, create};
use crate::index::build::{IndexOptions, build};
use crate::opener::{LocalFiles, Opened};
use crate::{Disk, OpenOptions, ResourceOptions, Resources};

/// Counts the files that are opened, and those that are only looked at.
#[derive(Debug, Default)]
struct Counting {
    opened: AtomicUsize,
    looked: AtomicUsize,
}

impl Opener for Counting {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        LocalFiles.open(path, role, gate)
    }

    fn identity(&self, path: &Path, gate: &Gate) -> Result<FileIdentity> {
        self.looked.fetch_add(1, Ordering::Relaxed);
        LocalFiles.identity(path, gate)
    }
}

/// A chain of `count` files of 50 GiB, every twentieth with a cluster of its own.
fn chain(dir: &Path, count: usize) -> PathBuf {
    let resources = Resources::new(ResourceOptions::default());
    let name = |number: usize| format!("disk.snapshot-{number:05}.qcow2");
    for number in 0..count {
        let path = dir.join(name(number));
        let backing = (number > 0).then(|| (PathBuf::from(name(number - 1)), Format::Qcow2));
        let options = CreateOptions {
            size: Some(50 << 30),
            cluster_bits: ClusterBits::DEFAULT,
            backing,
            ..CreateOptions::default()
        };
        create(&path, &options).unwrap();
        if number % 20 != 0 {
            continue;
        }
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
        let mut byte = [1; 512];
        disk.write(GuestOffset::new((number as u64) << 25), &[Segment::from_mut(&mut byte)]).unwrap();
        disk.close().unwrap();
    }
    dir.join(name(count - 1))
}

#[test]
fn a_long_chain_is_looked_at_but_hardly_any_of_its_files_is_opened() {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let count = 120;
    let top = chain(dir.path(), count);
    build(&top, &IndexOptions { include_top: true, ..IndexOptions::default() }).unwrap();
    let counting = Arc::new(Counting::default());
    let opener: Arc<dyn Opener> = Arc::clone(&counting) as Arc<dyn Opener>;
    let gate = Gate::new([dir.path()]).unwrap();
    let file = open_layer(&top, Role::Frozen, None, &gate, &*opener).unwrap();
    let Found::Whole(index) = load(&file, &gate, &opener, &mut Looks::default()) else {
        panic!("no index");
    };
    assert_eq!(index.layers().len(), count);
    assert_eq!(counting.looked.load(Ordering::Relaxed), count - 1);
    // The layer itself, and where pages of the table and of the tree lie: not with every layer.
    let opened = counting.opened.load(Ordering::Relaxed);
    assert!(opened <= 8, "{opened}");
}

#[test]
fn version_1_words_for_subclusters_alone_are_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let options = CreateOptions {
        size: Some(1 << 20),
        cluster_bits: ClusterBits::DEFAULT,
        subclusters: true,
        ..CreateOptions::default()
    };
    create(&path, &options).unwrap();
    build(&path, &IndexOptions { include_top: true, ..IndexOptions::default() }).unwrap();
    let (gate, opener): (_, Arc<dyn Opener>) = (Gate::new([dir.path()]).unwrap(), Arc::new(LocalFiles));
    let top = open_layer(&path, Role::Frozen, None, &gate, &*opener).unwrap();
    let Found::Whole(index) = load(&top, &gate, &opener, &mut Looks::default()) else { panic!("no index") };
    check(&index.root, &index.layers, &top).unwrap();
    // What a root of version 1 reads as.
    let old = Root { unit: index.root.fine_unit, fine: PagePointer::HOLE, ..index.root.clone() };
    assert!(matches!(check(&old, &index.layers, &top), Err(IndexError::Field { field: "map unit", .. })));
}
