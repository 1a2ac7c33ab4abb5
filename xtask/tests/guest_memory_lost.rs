//! A guest that has lost every page of its clean cache reads and writes its files right, on three file systems; and does not
//! when anything that hides a page, or the rule for readers, is left out: the test is known to bite.
//!
//! `VMSTRATA_GUEST_SUITES` adds kernels, as for `guest_memory_pages`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tempfile::TempDir;
use vmstrata_memory::BoxError;
use vmstrata_memory::capture::{self, Channel, Control, Disks, Mode, Request};
use vmstrata_memory::hide::Hiding;
use vmstrata_memory::introspect::Rules;
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::vault::{
    Closing, DiskState, NewSnapshot, OneDevice, Page, Policy, Snapshot, Vault, Writer,
};
use vmstrata_memory::{Frame, Introspection, PAGE_BITS, PAGE_BYTES, PageClass};
use xtask::bench::server;
use xtask::guest::packages::Kernel;
use xtask::guest::{BOOT_MAX, Export, Hardware, ServedGuest, Task, must, trio};

/// Far more than a guest needs to check its files, on a busy machine.
const CHECK_MAX: Duration = Duration::from_secs(180);

/// A guest that has its files in memory; each snapshot of it has the name of its vault.
struct Trio {
    guest: ServedGuest,
    dir: TempDir,
}

impl Trio {
    fn start(kernel: &Kernel) -> Self {
        xtask::build::vmstrata().unwrap();
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let system = trio::guest(dir.path(), kernel).unwrap();
        let raw = trio::disk(dir.path()).unwrap();
        let disk = dir.path().join("disk.qcow2");
        let mut create = Command::new(server::vmstrata());
        create.arg("create").arg(&disk).arg("--backing").arg(raw).args(["--backing-format", "raw"]);
        must(&mut create).unwrap();
        let memory = Some(dir.path().join("memory"));
        let hardware = Hardware { memory, mib: 384, ..Hardware::default() };
        let disk = (disk, Export::VhostUser);
        let monitor = dir.path().join("qmp");
        let mut guest = ServedGuest::start(&system, disk, Task::Cache, &hardware, monitor).unwrap();
        guest.vm.wait_for("guest: ready", BOOT_MAX).unwrap();
        Self { guest, dir }
    }

    fn snapshot(&self, name: &str) {
        let words = ["snapshot", "web", "--copies", "1", "--clean-copies", "0", "--name", name];
        must(&mut self.guest.vm_monitored(&words, &[self.repository(name)]).unwrap()).unwrap();
    }

    /// Takes a snapshot for which a page is clean although somebody refers to it.
    fn snapshot_without_rule(&self, name: &str) {
        std::fs::create_dir(self.repository(name)).unwrap();
        let vault = Vault::open_directories(&[self.repository(name)]).unwrap();
        let mut qmp = Qmp::connect(self.guest.monitor(), CHECK_MAX).unwrap();
        let request = Request {
            guest: "web".to_owned(),
            name: name.to_owned(),
            taken_ns: 1,
            labels: Vec::new(),
            policy: policy(),
            mode: Mode::Copy,
            introspect: Some(|ram, running| Introspection::by(ram, running, Rules { references: false })),
            refill: None,
        };
        let (cancel, channel) = (AtomicBool::new(false), Channel::new().unwrap());
        let control = Control { cancel: &cancel, channel };
        let mut disk = OwnDisk { guest: &self.guest, name: name.to_owned() };
        capture::snapshot(&mut qmp, &vault, &request, &mut disk, control).unwrap();
    }

    fn repository(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the guest from the snapshot in a vault, without any page of cache, and has it check its files; `None` if it does
    /// not come to the end of that, or its kernel complains.
    fn wrong(&mut self, name: &str, repository: &str) -> Option<u32> {
        let snapshot = format!("web@{name}");
        // Disk and memory were taken by hand, so the times of their snapshots differ.
        self.guest.restore(&snapshot, &[self.repository(repository)], &["--no-cache", "--force"]).unwrap();
        self.guest.vm.wait_for("restored in", CHECK_MAX).unwrap();
        self.guest.vm.say("check").unwrap();
        let checked = self.guest.vm.wait_for("guest: checked, ", CHECK_MAX);
        eprintln!("{repository}: {checked:?}\n{}", self.guest.vm.console());
        checked.ok()?;
        let counted = self.guest.vm.console().lines().rev().find_map(|line| {
            line.strip_prefix("guest: checked, ")?.strip_suffix(" wrong")?.trim().parse().ok()
        });
        Some(counted.expect("a count"))
    }

    /// A snapshot like the first, in which each folio is hidden by its first mask only: the flag of the page itself.
    fn hide_by_flags_only(&self, name: &str, repository: &str) -> usize {
        let from = Vault::open_directories(&[self.repository(name)]).unwrap();
        let snapshot = from.snapshot(&format!("web@{name}").parse().unwrap()).unwrap();
        let (folios, mut flags) = (snapshot.hiding().unwrap(), Hiding::default());
        for hide in folios.iter() {
            flags.push(hide.first, hide.pages, &hide.clears[..1]).unwrap();
        }
        std::fs::create_dir(self.repository(repository)).unwrap();
        copy(&snapshot, &self.repository(repository), flags);
        folios.iter().filter(|hide| hide.clears.len() > 1).count()
    }
}

/// The guest's disk, snapshotted by the command.
struct OwnDisk<'a> {
    guest: &'a ServedGuest,
    name: String,
}

impl Disks for OwnDisk<'_> {
    fn snapshot(&mut self) -> Result<Vec<DiskState>, BoxError> {
        let mut create = Command::new(server::vmstrata());
        create.args(["snapshot", "create", "--quiesce", "never", "--name", &self.name]);
        must(create.arg(self.guest.disk()).env("VMSTRATA_CONTROL", self.guest.server().control()))?;
        let disk = self.guest.disk().display().to_string();
        Ok(vec![DiskState::new(disk, &self.name)])
    }

    fn undo(&mut self) {}
}

fn policy() -> Policy {
    Policy { critical_copies: 1, clean_copies: 0, one_device: OneDevice::Allow, ..Policy::default() }
}

/// The same snapshot in a vault of its own, but for what hides its pages.
fn copy(snapshot: &Snapshot, repository: &Path, hiding: Hiding) {
    let vault = Vault::open_directories(&[repository.to_owned()]).unwrap();
    let info = snapshot.info();
    let new = NewSnapshot {
        guest: info.guest.clone(),
        name: info.name.clone(),
        layout: info.layout.clone(),
        policy: policy(),
    };
    let mut writer: Writer = Arc::clone(&vault).begin(new).unwrap();
    let (classes, mut page) = (snapshot.classes(), [0; PAGE_BYTES]);
    for block in info.layout.blocks() {
        let first = Frame::of(block.start).get();
        for frame in (first..first + (block.len >> PAGE_BITS)).map(Frame::new) {
            match snapshot.read_page(frame, &mut page).unwrap() {
                Page::Free => writer.free(frame).unwrap(),
                Page::Data | Page::Zero => writer.page(frame, classes.get(frame), &page).unwrap(),
                // Bytes of which no copy is kept: zeros would be.
                Page::Lost => writer.page(frame, PageClass::Clean, &[0xa5; PAGE_BYTES]).unwrap(),
            }
        }
    }
    let blobs = snapshot.blobs().clone();
    let (labels, disks) = (info.labels.clone(), info.disks.clone());
    writer.finish(Closing { taken_ns: info.taken_ns, labels, disks, hiding, blobs }).unwrap();
}

#[test]
fn guest_without_its_cache_has_every_file_right_and_only_by_all_the_rules() {
    trio::kernels().unwrap().iter().for_each(lose_the_cache);
}

fn lose_the_cache(kernel: &Kernel) {
    eprintln!("{}", kernel.image.display());
    let mut trio = Trio::start(kernel);
    trio.snapshot("lost");
    let with_more = trio.hide_by_flags_only("lost", "flags");
    assert!(with_more > 500, "{with_more} pages with buffers or states of blocks");
    trio.snapshot_without_rule("referred");
    // The newest first: putting the disk back to an older snapshot drops it.
    trio.wrong("referred", "referred");
    assert!(trio.guest.vm.console().contains("read-0 in a pipe differs"), "readers had every page right");
    assert_eq!(trio.wrong("lost", "lost"), Some(0));
    trio.wrong("lost", "flags");
    assert!(trio.guest.vm.console().contains("differs"), "hidden by flags only, every file is right");
}
