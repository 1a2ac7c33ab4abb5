//! Disks of another size: new space reads as zeros whatever lies below or was there before, nothing else changes, frozen
//! states keep their sizes, and stock tools agree.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::flat::{SECTOR, assert_reads, assert_same, pattern, range, read, some_range, write};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, open, open_read_only, random, scratch};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::merge::{Merge, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, Op, OpenOptions, ResizeFault, ResourceOptions, Resources, Shrink};
use vmstrata_types::LayerIndex;

const MIB: u64 = 1 << 20;

fn create(path: &Path, size: u64, options: &[&str]) {
    let size = size.to_string();
    qemu_img(&[&["create", "-q", "-f", "qcow2"][..], options, &[path_str(path), &size]].concat());
}

/// The size that stock tools see.
fn stock_size(path: &Path) -> u64 {
    let info = qemu_img(&["info", "--output=json", path_str(path)]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("qemu-img prints JSON");
    info["virtual-size"].as_u64().expect("a size")
}

fn named(name: impl std::fmt::Display) -> SnapshotInfo {
    SnapshotInfo { name: name.to_string(), ..SnapshotInfo::default() }
}

fn fault(error: &vmstrata_disk::Error) -> &ResizeFault {
    error.fault().unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn a_disk_grows_far_past_its_l1_table_while_it_is_open() {
    for (cluster, version) in [("512", "1.1"), ("4k", "0.10"), ("64k", "1.1"), ("2M", "1.1")] {
        let dir = scratch();
        let path = dir.path().join("disk.qcow2");
        create(&path, MIB, &["-o", &format!("cluster_size={cluster},compat={version}")]);
        let disk = open(&path);
        write(&disk, MIB - 512, &[7; 512]).unwrap();
        // 512-byte clusters reach 510 MiB with the L1 tables that fit between refcount blocks.
        let to = if cluster == "512" { 300 * MIB } else { 3 << 40 };
        let to = if cluster == "4k" { 300 << 30 } else { to };
        let resized = disk.resize(to, Shrink::Refuse).unwrap();
        assert_eq!((resized.from, resized.to, disk.size()), (MIB, to, to));
        write(&disk, to - 1024, &[9; 1024]).unwrap();
        assert_eq!(read(&disk, to - 1536, 1536).unwrap(), [vec![0; 512], vec![9; 1024]].concat());
        assert_eq!(read(&disk, MIB - 512, 1024).unwrap(), [vec![7; 512], vec![0; 512]].concat());
        assert!(write(&disk, to - 512, &[1; 1024]).is_err(), "past the end");
        disk.close().unwrap();
        drop(disk);
        assert_clean(&path);
        assert_eq!(stock_size(&path), to, "{cluster}");
        qemu_io(&path, &[format!("read -P 9 {} 1024", to - 1024), format!("read -P 7 {} 512", MIB - 512)]);
    }
}

fn l1_table(path: &Path) -> (u32, u64) {
    let bytes = std::fs::read(path).unwrap();
    let entries = u32::from_be_bytes(bytes[36..40].try_into().unwrap());
    (entries, u64::from_be_bytes(bytes[40..48].try_into().unwrap()))
}

#[test]
fn an_l1_table_with_room_stays_where_it_is_and_what_lay_behind_it_is_not_believed() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    create(&path, 16 * MIB, &["-o", "cluster_size=4k"]);
    let (entries, at) = l1_table(&path);
    assert_eq!(entries, 8);
    std::fs::File::options().write(true).open(&path).unwrap().write_all_at(&[0xff; 4032], at + 64).unwrap();
    let disk = open(&path);
    write(&disk, 0, &[3; 512]).unwrap();
    disk.resize(900 * MIB, Shrink::Refuse).unwrap();
    assert_eq!(read(&disk, 800 * MIB, 1024).unwrap(), [0; 1024]);
    write(&disk, 900 * MIB - 512, &[4; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    assert_eq!(l1_table(&path), (450, at));
    qemu_io(&path, &[format!("read -P 4 {} 512", 900 * MIB - 512), "read -P 3 0 512".to_owned()]);
}

#[test]
fn sizes_that_cannot_be_are_refused_and_change_nothing() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    create(&path, 8 * MIB, &["-o", "cluster_size=4k"]);
    let disk = open(&path);
    for size in [0, 1 << 63, u64::MAX - 511] {
        let error = disk.resize(size, Shrink::Allow).unwrap_err();
        assert!(matches!(fault(&error), ResizeFault::Size { .. }), "{error}");
    }
    let error = disk.resize(MIB, Shrink::Refuse).unwrap_err();
    assert!(error.to_string().contains("--shrink"), "{error}");
    // 4 Mi L1 entries of 2 MiB each are the most that stock tools open.
    let max = (4 << 20) * (2 * MIB);
    let error = disk.resize(max + 512, Shrink::Refuse).unwrap_err();
    assert!(matches!(fault(&error), ResizeFault::TooLarge { .. }), "{error}");
    assert_eq!(disk.size(), 8 * MIB);
    disk.close().unwrap();
    assert!(disk.resize(9 * MIB, Shrink::Refuse).is_err(), "closed");
    drop(disk);
    assert!(open_read_only(&path).resize(9 * MIB, Shrink::Refuse).is_err(), "read-only");
    assert_eq!(stock_size(&path), 8 * MIB);
}

#[test]
fn what_lies_below_a_shorter_disk_does_not_show_when_it_grows() {
    for (version, sizes) in [("1.1", [5 * MIB + 512, 7 * MIB + 1024]), ("0.10", [2 * MIB, 9 * MIB])] {
        let dir = scratch();
        let [base, top] = ["base", "top"].map(|name| dir.path().join(name));
        create(&base, 8 * MIB, &[]);
        qemu_io(&base, &["write -q -P 5 0 8M".to_owned()]);
        let options = format!("compat={version},cluster_size=16k");
        create(&top, sizes[0], &["-o", &options, "-b", path_str(&base), "-F", "qcow2"]);
        let disk = open(&top);
        disk.resize(sizes[1], Shrink::Refuse).unwrap();
        let mut model = vec![5; sizes[0] as usize];
        model.resize(sizes[1] as usize, 0);
        assert_reads(&disk, &model, version);
        disk.close().unwrap();
        drop(disk);
        assert_clean(&top);
        assert_same(&content(&top, "qcow2"), &model, 0, "by stock tools");
    }
}

#[test]
fn a_smaller_disk_gives_its_space_back_and_forgets_what_it_held() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    create(&path, 32 * MIB, &[]);
    qemu_io(&path, &["write -q -P 5 0 32M".to_owned()]);
    let used = |path: &Path| std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap()) * 512;
    let before = used(&path);
    let disk = open(&path);
    let to = 4 * MIB + 1536;
    disk.resize(to, Shrink::Allow).unwrap();
    assert!(read(&disk, to - 512, 1024).is_err() && write(&disk, to, &[1; 512]).is_err());
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    assert_eq!(stock_size(&path), to);
    assert!(used(&path) < before / 4, "{} of {before} bytes", used(&path));
    // Stock tools do not clear what they find.
    qemu_img(&["resize", "-q", path_str(&path), "32M"]);
    qemu_io(&path, &[format!("read -q -P 5 0 {to}"), format!("read -q -P 0 {to} {}", 32 * MIB - to)]);
}

#[test]
fn a_raw_disk_changes_its_length() {
    let dir = scratch();
    let path = dir.path().join("disk.raw");
    std::fs::write(&path, vec![3; MIB as usize]).unwrap();
    let disk = open(&path);
    for (to, shrink) in [(3 * MIB, Shrink::Refuse), (512, Shrink::Allow), (2 * MIB, Shrink::Refuse)] {
        disk.resize(to, shrink).unwrap();
        assert_eq!((disk.size(), path.metadata().unwrap().len()), (to, to));
        assert!(write(&disk, to, &[1; 512]).is_err());
    }
    assert_eq!(read(&disk, 0, 1024).unwrap(), [vec![3; 512], vec![0; 512]].concat());
}

/// Stock tools refuse the first; the second keeps sizes of its snapshots.
#[test]
fn internal_snapshots_keep_their_size_where_the_version_can_say_so() {
    for version in ["0.10", "1.1"] {
        let dir = scratch();
        let path = dir.path().join("disk.qcow2");
        create(&path, MIB, &["-o", &format!("compat={version},cluster_size=4k")]);
        qemu_io(&path, &["write -q -P 6 0 1M".to_owned()]);
        qemu_img(&["snapshot", "-c", "before", path_str(&path)]);
        let disk = open(&path);
        let resized = disk.resize(64 * MIB, Shrink::Refuse);
        assert_eq!(resized.is_ok(), version == "1.1", "{resized:?}");
        if resized.is_ok() {
            write(&disk, 60 * MIB, &[1; 4096]).unwrap();
            disk.resize(512 << 10, Shrink::Allow).unwrap();
        }
        disk.close().unwrap();
        drop(disk);
        assert_clean(&path);
        qemu_img(&["snapshot", "-a", "before", path_str(&path)]);
        assert_eq!(stock_size(&path), MIB);
        qemu_io(&path, &["read -q -P 6 0 1M".to_owned()]);
        assert_clean(&path);
    }
}

/// They do not follow our writes, and are marked so; then their size does not matter either.
#[test]
fn an_image_with_dirty_bitmaps_stays_sound() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    create(&path, 64 * MIB, &[]);
    qemu_img(&["bitmap", "--add", "-g", "64k", path_str(&path), "since"]);
    let disk = open(&path);
    disk.resize(40 << 30, Shrink::Refuse).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    assert_eq!(stock_size(&path), 40 << 30);
    let disk = open(&path);
    disk.resize(MIB, Shrink::Allow).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    qemu_img(&["bitmap", "--remove", path_str(&path), "since"]);
    assert_clean(&path);
}

/// A disk of changing size and its states, with what each must read as.
struct History {
    path: PathBuf,
    disk: Option<Arc<Disk>>,
    model: Vec<u8>,
    states: Vec<(PathBuf, Vec<u8>)>,
    /// The last to shorten it was a stock tool, which leaves the end of the last cluster as it is.
    cut_by_stock: bool,
    /// Version 2, which stock tools do not make longer over a longer backing file.
    is_old: bool,
}

const SIZE_MAX: u64 = 10 * MIB;

impl History {
    fn disk(&self) -> &Arc<Disk> {
        self.disk.as_ref().expect("open")
    }

    fn close(&mut self) {
        let disk = self.disk.take().expect("open");
        disk.close().unwrap();
        drop(disk);
        assert_clean(&self.path);
        assert_eq!(stock_size(&self.path), self.model.len() as u64);
    }

    fn resize(&mut self, size: u64) {
        let shrink = if size < self.disk().size() { Shrink::Allow } else { Shrink::Refuse };
        self.disk().resize(size, shrink).unwrap();
        self.cut_by_stock &= size >= self.model.len() as u64 && size.is_multiple_of(2 * MIB);
        self.model.resize(size as usize, 0);
    }

    fn resize_by_stock(&mut self, size: u64) {
        if size > self.model.len() as u64 && (self.cut_by_stock || self.is_old) {
            return;
        }
        self.close();
        qemu_img(&["resize", "-q", "--shrink", "-f", "qcow2", path_str(&self.path), &size.to_string()]);
        self.cut_by_stock |= size < self.model.len() as u64;
        self.model.resize(size as usize, 0);
        self.disk = Some(open(&self.path));
    }

    /// Drops the newest state but one, so that sizes meet that did not before.
    fn drop_state(&mut self) {
        let layers = self.disk().layers().len() as u16;
        if layers < 3 {
            return;
        }
        self.close();
        let range = MergeRange { first: LayerIndex::new(layers - 2), last: LayerIndex::new(layers - 2) };
        let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
        let resources = Resources::new(ResourceOptions::default());
        Merge::new(&self.path, range, &options, &resources).unwrap().run().unwrap();
        self.states.retain(|(layer, _)| layer.exists());
        self.disk = Some(open(&self.path));
    }

    fn step(&mut self, random: &mut SmallRng, number: u32) {
        let size = self.model.len() as u64;
        let (at, len) = some_range(random, size, 64 << 10);
        let wanted = random.random_range(1..=SIZE_MAX / SECTOR) * SECTOR;
        match random.random_range(0..24) {
            0..=9 => {
                let bytes = pattern(random, len as usize);
                write(self.disk(), at, &bytes).unwrap();
                self.model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
            }
            10..=12 => {
                self.disk().write_zeroes(range(at, len), random.random()).unwrap();
                self.model[at as usize..(at + len) as usize].fill(0);
            }
            13..=16 => self.resize(wanted),
            17 => self.resize(wanted.next_multiple_of(2 * MIB)),
            18 => self.resize_by_stock(wanted),
            19 => {
                self.close();
                self.disk = Some(open(&self.path));
            }
            20 => self.drop_state(),
            21 => self.disk().flush().unwrap(),
            _ => {
                let layer = self.disk().snapshot(&named(number)).unwrap().layer;
                self.states.push((layer, self.model.clone()));
            }
        }
    }
}

#[test]
fn random_histories_with_other_sizes_read_as_flat_arrays_do() {
    for_seeds(8, |seed| {
        let dir = scratch();
        let path = dir.path().join("disk.qcow2");
        let shapes = ["cluster_size=512", "cluster_size=4k", "cluster_size=64k", "cluster_size=2M"];
        let options = if seed > 5 { "cluster_size=64k,extended_l2=on" } else { shapes[seed as usize % 4] };
        let compat = if seed == 5 { "0.10" } else { "1.1" };
        let size = 3 * MIB;
        create(&path, size, &["-o", &format!("{options},compat={compat}")]);
        let mut random = random("sizes", seed);
        let disk = Some(open(&path));
        let mut history = History {
            path,
            disk,
            model: vec![0; size as usize],
            states: Vec::new(),
            cut_by_stock: false,
            is_old: compat == "0.10",
        };
        for number in 0..120 {
            history.step(&mut random, number);
            assert_eq!(history.disk().size(), history.model.len() as u64);
            if number % 8 == 0 {
                assert_reads(history.disk(), &history.model, &format!("seed {seed}, step {number}"));
            }
        }
        assert_reads(history.disk(), &history.model, "at the end");
        history.close();
        assert_same(&content(&history.path, "qcow2"), &history.model, 0, "by stock tools");
        for (layer, model) in &history.states {
            let what = format!("seed {seed}, {}", layer.display());
            assert_clean(layer);
            assert_eq!(stock_size(layer), model.len() as u64, "{what}");
            assert_reads(&open_read_only(layer), model, &what);
        }
        assert_reads(&open(&history.path), &history.model, "opened again");
    });
}

/// Queues and threads that write while the disk grows and shrinks behind what they use.
#[test]
fn writes_go_on_while_the_disk_changes_its_size() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    create(&path, 8 * MIB, &["-o", "cluster_size=4k"]);
    let disk = open(&path);
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for half in 0..2u64 {
            let (disk, stop, written) = (&disk, &stop, &written);
            scope.spawn(move || {
                let mut client = Client::new(disk, 16);
                let mut random = random("while", half);
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..8 {
                        let at = (random.random_range(0..1024) * 2 + half) * 4096;
                        client.push(Op::Write { fua: false }, at, 4096, Some(&[at as u8 ^ 0x5a | 1; 4096]));
                    }
                    for done in client.drain() {
                        done.result.unwrap();
                        written.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut last = 0;
        for turn in 0..40u64 {
            let to = 8 * MIB + (turn % 5) * 600 * MIB;
            disk.resize(to, Shrink::Allow).unwrap();
            if to > 8 * MIB {
                write(&disk, to - 512, &[turn as u8 | 1; 512]).unwrap();
            }
            while written.load(Ordering::Relaxed) < last + 50 {
                std::thread::yield_now();
            }
            last = written.load(Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
    });
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    let disk = open_read_only(&path);
    for block in 0..2048u64 {
        let found = read(&disk, block * 4096, 4096).unwrap();
        let expected = [(block * 4096) as u8 ^ 0x5a | 1; 4096];
        assert!(found == expected || found == [0; 4096], "block {block}");
    }
}

#[test]
fn a_disk_opened_at_a_state_keeps_the_states_size() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    create(&path, 2 * MIB, &[]);
    let disk = open(&path);
    write(&disk, 0, &[1; 4096]).unwrap();
    let small = disk.snapshot(&named("small")).unwrap().layer;
    disk.resize(5 * MIB, Shrink::Refuse).unwrap();
    write(&disk, 4 * MIB, &[2; 4096]).unwrap();
    let large = disk.snapshot(&named("large")).unwrap().layer;
    assert_eq!(open_read_only(&small).size(), 2 * MIB);
    assert_eq!(open_read_only(&large).size(), 5 * MIB);
    assert_eq!(read(&disk, 4 * MIB, 4096).unwrap(), vec![2; 4096]);
    let options = OpenOptions::default();
    let states = vmstrata_disk::snapshot::list(&path, &options).unwrap();
    assert_eq!(states.len(), 2);
}
