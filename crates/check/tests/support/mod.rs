//! Images made by stock tools, edited byte by byte, and judged by stock tools.

#![allow(dead_code, reason = "every test file uses a part of it")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vmstrata_check::{Error, Options, Repair, Report};
use vmstrata_store::{Access, FileOptions, FileStore};

pub(crate) const COPIED: u64 = 1 << 63;
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Runs a stock tool.
pub(crate) fn run(tool: &str, args: &[&str]) -> Output {
    Command::new(tool).args(args).output().unwrap_or_else(|error| panic!("{tool}: {error}"))
}

/// Runs a stock tool that must succeed.
pub(crate) fn must(tool: &str, args: &[&str]) {
    let output = run(tool, args);
    assert!(output.status.success(), "{tool} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

pub(crate) fn qemu_io(path: &Path, commands: &[&str]) {
    let mut args = vec!["-f", "qcow2"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(path.to_str().unwrap());
    let output = run("qemu-io", &args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && !text.contains("failed"), "{commands:?}: {text}");
}

/// What `qemu-img check` says of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Judgement {
    pub(crate) corruptions: u64,
    pub(crate) leaks: u64,
    pub(crate) check_errors: u64,
    pub(crate) image_end_offset: u64,
    pub(crate) total_clusters: u64,
    pub(crate) allocated_clusters: u64,
    pub(crate) compressed_clusters: u64,
    pub(crate) fragmented_clusters: u64,
}

impl Judgement {
    /// `None` when stock tools do not even open the image, or give up.
    pub(crate) fn by_stock(path: &Path) -> Option<Self> {
        let output = run("qemu-img", &["check", "-f", "qcow2", "--output=json", path.to_str().unwrap()]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let number = |key: &str| json.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0);
        json.get("image-end-offset")?;
        Some(Self {
            corruptions: number("corruptions"),
            leaks: number("leaks"),
            check_errors: number("check-errors"),
            image_end_offset: number("image-end-offset"),
            total_clusters: number("total-clusters"),
            allocated_clusters: number("allocated-clusters"),
            compressed_clusters: number("compressed-clusters"),
            fragmented_clusters: number("fragmented-clusters"),
        })
    }
}

impl From<&Report> for Judgement {
    fn from(report: &Report) -> Self {
        Self {
            corruptions: report.corruptions,
            leaks: report.leaks,
            check_errors: report.check_errors,
            image_end_offset: report.image_end_offset.get(),
            total_clusters: report.total_clusters,
            allocated_clusters: report.allocated_clusters,
            compressed_clusters: report.compressed_clusters,
            fragmented_clusters: report.fragmented_clusters,
        }
    }
}

/// Our check of a file, which is not locked.
pub(crate) fn check(path: &Path, options: &Options) -> Result<Report, Error> {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let open = FileOptions { access: Access::ReadWrite, lock: None, ..FileOptions::FROZEN };
    vmstrata_check::check(&FileStore::new(file, path, &open).unwrap(), options)
}

/// Our check, without repair.
pub(crate) fn ours(path: &Path) -> Report {
    check(path, &Options::default()).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn repair(path: &Path, repair: Repair) -> Report {
    let options = Options { repair, ..Options::default() };
    check(path, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// Checks with both and compares; returns ours.
pub(crate) fn agree(path: &Path, name: &str) -> Report {
    let report = ours(path);
    let stock = Judgement::by_stock(path).unwrap_or_else(|| panic!("{name}: stock gives up on it"));
    assert_eq!(Judgement::from(&report), stock, "{name}: ours, stock; {:#?}", report.findings);
    report
}

pub(crate) fn stock_rc(path: &Path) -> Option<i32> {
    run("qemu-img", &["check", "-f", "qcow2", path.to_str().unwrap()]).status.code()
}

/// Whether stock tools can read all of a disk.
pub(crate) fn is_readable(path: &Path) -> bool {
    same_contents(path, path)
}

/// Whether stock tools can read all of two disks, and find the same.
pub(crate) fn same_contents(one: &Path, other: &Path) -> bool {
    let args =
        ["compare", "-U", "-f", "qcow2", "-F", "qcow2", one.to_str().unwrap(), other.to_str().unwrap()];
    run("qemu-img", &args).status.success()
}

/// Edits an image with 64 KiB clusters and 16-bit refcounts, unless said otherwise.
#[derive(Debug)]
pub(crate) struct Editor {
    pub(crate) path: PathBuf,
    file: File,
}

impl Editor {
    pub(crate) fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { path: path.to_owned(), file }
    }

    pub(crate) fn u64_at(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    }

    pub(crate) fn u32_at(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        u32::from_be_bytes(bytes)
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).unwrap();
    }

    pub(crate) fn put_u64(&self, at: u64, value: u64) {
        self.put(at, &value.to_be_bytes());
    }

    pub(crate) fn put_u32(&self, at: u64, value: u32) {
        self.put(at, &value.to_be_bytes());
    }

    /// Changes the 64 bits at `at`.
    pub(crate) fn map(&self, at: u64, change: impl Fn(u64) -> u64) {
        self.put_u64(at, change(self.u64_at(at)));
    }

    pub(crate) fn len(&self) -> u64 {
        self.file.metadata().unwrap().len()
    }

    pub(crate) fn set_len(&self, len: u64) {
        self.file.set_len(len).unwrap();
    }

    pub(crate) fn cluster_bits(&self) -> u32 {
        self.u32_at(20)
    }

    pub(crate) fn cluster(&self) -> u64 {
        1 << self.cluster_bits()
    }

    pub(crate) fn l1(&self) -> u64 {
        self.u64_at(40)
    }

    /// Where the L1 entry is.
    pub(crate) fn l1_entry(&self, index: u64) -> u64 {
        self.l1() + index * 8
    }

    /// Where the L2 table lies.
    pub(crate) fn l2(&self, index: u64) -> u64 {
        self.u64_at(self.l1_entry(index)) & OFFSET
    }

    /// Where the L2 entry of a guest cluster is.
    pub(crate) fn l2_entry(&self, guest_cluster: u64) -> u64 {
        let per_table = self.cluster() / 8;
        self.l2(guest_cluster / per_table) + guest_cluster % per_table * 8
    }

    /// Where a guest cluster's data lies.
    pub(crate) fn host(&self, guest_cluster: u64) -> u64 {
        self.u64_at(self.l2_entry(guest_cluster)) & OFFSET
    }

    pub(crate) fn refcount_table(&self) -> u64 {
        self.u64_at(48)
    }

    /// Where a refcount block lies.
    pub(crate) fn block(&self, index: u64) -> u64 {
        self.u64_at(self.refcount_table() + index * 8) & OFFSET
    }

    fn refcount_at(&self, host: u64) -> u64 {
        let (cluster, per_block) = (host / self.cluster(), self.cluster() / 2);
        self.block(cluster / per_block) + cluster % per_block * 2
    }

    pub(crate) fn refcount(&self, host: u64) -> u16 {
        let mut bytes = [0; 2];
        self.file.read_exact_at(&mut bytes, self.refcount_at(host)).unwrap();
        u16::from_be_bytes(bytes)
    }

    pub(crate) fn set_refcount(&self, host: u64, refcount: u16) {
        self.put(self.refcount_at(host), &refcount.to_be_bytes());
    }

    pub(crate) fn snapshots(&self) -> u64 {
        self.u64_at(64)
    }

    /// Where the data of the bitmaps extension is.
    pub(crate) fn bitmaps_extension(&self) -> u64 {
        let mut at = u64::from(self.u32_at(100));
        while self.u32_at(at) != 0x2385_2875 {
            assert_ne!(self.u32_at(at), 0, "no bitmaps");
            at += 8 + u64::from(self.u32_at(at + 4)).next_multiple_of(8);
        }
        at + 8
    }

    pub(crate) fn bitmap_directory(&self) -> u64 {
        self.u64_at(self.bitmaps_extension() + 16)
    }

    /// Where the first bitmap's table lies.
    pub(crate) fn bitmap_table(&self) -> u64 {
        self.u64_at(self.bitmap_directory())
    }
}

/// A disk of 1 GiB with a bit of everything: see [`guest`] for what lies where.
pub(crate) fn make_rich(path: &Path) {
    let name = path.to_str().unwrap();
    must("qemu-img", &["create", "-q", "-f", "qcow2", name, "1G"]);
    qemu_io(
        path,
        &[
            "write -P 1 0 1M",
            "write -P 2 600M 512k",
            "write -c -P 3 2M 64k",
            "write -c -P 4 2112k 64k",
            "write -P 5 3M 64k",
            "write -z 3M 64k",
            "write -z 4M 64k",
        ],
    );
    must("qemu-img", &["bitmap", "-f", "qcow2", "--add", name, "b0"]);
    must("qemu-img", &["snapshot", "-c", "s1", name]);
    qemu_io(path, &["write -P 6 0 64k", "write -P 7 5M 256k"]);
}

/// Guest clusters of [`make_rich`]'s disk.
pub(crate) mod guest {
    /// Data of the active layer alone.
    pub(crate) const OWN: u64 = 0;
    /// Data that the snapshot has too.
    pub(crate) const SHARED: u64 = 1;
    /// Compressed data, of which two share a host cluster.
    pub(crate) const COMPRESSED: u64 = 32;
    /// Zeros with a host cluster kept for them, which the snapshot has too.
    pub(crate) const ZERO_ALLOCATED: u64 = 48;
    /// Zeros without.
    pub(crate) const ZERO_PLAIN: u64 = 64;
    /// Data of the active layer alone.
    pub(crate) const OWN_TOO: u64 = 80;
    /// Nothing.
    pub(crate) const NOTHING: u64 = 200;
}
