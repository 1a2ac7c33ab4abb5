//! Snapshots of memory without a guest, and what stands in for QEMU when they are restored.

use std::path::PathBuf;

use tempfile::TempDir;
use vmstrata_memory::capture::{CAPTURED, DEVICES};
use vmstrata_memory::vault::{Closing, DiskState, NewSnapshot, OneDevice, Policy, SnapshotId, Vault};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass};

const MACHINE: &str =
    r#"{"machine":"pc-q35-7.2","backends":[{"id":"mem","bytes":65536}],"ignore_shared":true}"#;

/// Two repositories, and a directory for files of memory.
pub struct Repositories(TempDir);

impl Repositories {
    /// Empty ones.
    pub fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        for name in ["a", "b", "memory"] {
            std::fs::create_dir(dir.path().join(name)).expect("makes");
        }
        Self(dir)
    }

    /// The path of one of them, or of a file beside them.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// 16 critical pages that no other snapshot has.
    pub fn save(&self, name: &str, number: u8) -> SnapshotId {
        self.save_with(name, number, number.into(), Vec::new())
    }

    /// The same, taken with disks.
    pub fn save_with(&self, name: &str, number: u8, taken_ns: u64, disks: Vec<DiskState>) -> SnapshotId {
        let vault = Vault::open_directories(&[self.path("a"), self.path("b")]).expect("opens");
        let layout = Layout::split_at_4g(16 << 12, 16 << 12).expect("a layout");
        let policy = Policy { critical_copies: 2, one_device: OneDevice::Allow, ..Policy::default() };
        let new = NewSnapshot { guest: "web".to_owned(), name: name.to_owned(), layout, policy };
        let mut writer = vault.begin(new).expect("begins");
        for at in 0..16u8 {
            let page = [number * 16 + at; PAGE_BYTES];
            writer.page(Frame::new(at.into()), PageClass::Critical, &page).expect("takes");
        }
        let blobs = [(CAPTURED, MACHINE.as_bytes()), (DEVICES, &b"state"[..])];
        let blobs = blobs.map(|(name, bytes)| (name.to_owned(), bytes.to_vec())).into();
        writer.finish(Closing { taken_ns, disks, blobs, ..Closing::default() }).expect("saves").id
    }

    /// Overwrites an object of pages, or the metadata, in these repositories.
    pub fn lose(&self, id: SnapshotId, kind: &str, repositories: &[&str]) {
        for repository in repositories {
            std::fs::write(self.path(repository).join(format!("{id}.{kind}")), "gone").expect("writes");
        }
    }

    /// `vmstrata vm restore SNAPSHOT ... -- sh -c SCRIPT`
    pub fn args(&self, snapshot: &str, flags: &[&str], script: &str) -> Vec<String> {
        let mut args = ["vm", "restore", snapshot].map(str::to_owned).to_vec();
        let path = |name: &str| self.path(name).display().to_string();
        for (option, name) in [("--vault", "a"), ("--vault", "b"), ("--memory-dir", "memory"), ("--qmp", "q")]
        {
            args.extend([option.to_owned(), path(name)]);
        }
        args.extend(flags.iter().chain(&["--", "sh", "-c", script]).map(|word| (*word).to_owned()));
        args
    }

    /// Neither files nor mounts of a restore are left.
    pub fn assert_nothing_left(&self) {
        let memory = self.path("memory");
        assert_eq!(std::fs::read_dir(&memory).expect("lists").count(), 0);
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("reads");
        assert!(!mounts.contains(memory.to_str().expect("UTF-8")), "{mounts}");
    }
}
