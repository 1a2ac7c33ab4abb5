//! `vmstrata vm restore` where it does not come to a guest: snapshots that are lost, and commands that are ended.

mod support;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use support::{run_err, vmstrata};
use tempfile::TempDir;
use vmstrata_memory::capture::{CAPTURED, DEVICES};
use vmstrata_memory::vault::{Closing, NewSnapshot, OneDevice, Policy, SnapshotId, Vault};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass};

const MACHINE: &str =
    r#"{"machine":"pc-q35-7.2","backends":[{"id":"mem","bytes":65536}],"ignore_shared":true}"#;

/// Two homes, and a directory for files of memory.
struct Homes(TempDir);

impl Homes {
    fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        for name in ["a", "b", "memory"] {
            std::fs::create_dir(dir.path().join(name)).expect("makes");
        }
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// 16 critical pages that no other snapshot has.
    fn save(&self, name: &str, number: u8) -> SnapshotId {
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
        writer.finish(Closing { taken_ns: number.into(), blobs, ..Closing::default() }).expect("saves").id
    }

    /// Overwrites an object of pages, or the metadata, in these homes.
    fn lose(&self, id: SnapshotId, kind: &str, homes: &[&str]) {
        for home in homes {
            std::fs::write(self.path(home).join(format!("{id}.{kind}")), "gone").expect("writes");
        }
    }

    /// `vmstrata vm restore SNAPSHOT ... -- sh -c SCRIPT`
    fn args(&self, snapshot: &str, flags: &[&str], script: &str) -> Vec<String> {
        let mut args = ["vm", "restore", snapshot].map(str::to_owned).to_vec();
        let path = |name: &str| self.path(name).display().to_string();
        for (option, name) in [("--vault", "a"), ("--vault", "b"), ("--memory-dir", "memory"), ("--qmp", "q")]
        {
            args.extend([option.to_owned(), path(name)]);
        }
        args.extend(flags.iter().chain(&["--", "sh", "-c", script]).map(|word| (*word).to_owned()));
        args
    }

    fn assert_nothing_left(&self) {
        let memory = self.path("memory");
        assert_eq!(std::fs::read_dir(&memory).expect("lists").count(), 0);
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("reads");
        assert!(!mounts.contains(memory.to_str().expect("UTF-8")), "{mounts}");
    }
}

#[test]
fn what_is_lost_names_the_newest_older_snapshot_that_is_whole() {
    let homes = Homes::new();
    let ids = [("mon", 1), ("tue", 2), ("wed", 3)].map(|(name, number)| homes.save(name, number));
    let said = |snapshot: &str, flags: &[&str]| run_err(1, homes.args(snapshot, flags, "exit 3"));
    // One copy is enough; what fails is what stands in for QEMU.
    homes.lose(ids[2], "critical", &["a"]);
    let unharmed = said("web@wed", &[]);
    assert!(unharmed.contains("QEMU did not start: exit status: 3"), "{unharmed}");
    homes.lose(ids[2], "critical", &["b"]);
    homes.lose(ids[1], "snapshot", &["a", "b"]);
    let lost = said("web@wed", &[]);
    assert!(lost.contains("web@wed: frame 0x0 is lost") && lost.contains("whole is web@mon"), "{lost}");
    let unknown = said("web@tue", &[]);
    assert!(unknown.contains(&ids[1].to_string()) && unknown.contains("whole is web@mon"), "{unknown}");
    let by_id = said(&ids[1].to_string(), &["--lazy"]);
    assert!(by_id.contains("its metadata is lost") && by_id.contains("whole is web@mon"), "{by_id}");
    assert!(said(&ids[0].to_string(), &[]).contains("did not start"));
    homes.lose(ids[0], "critical", &["a", "b"]);
    assert!(said("web@wed", &[]).contains("no older snapshot of the guest is whole"));
    // The newest may be one of which nothing is known: an older one is not taken for it.
    homes.lose(ids[2], "snapshot", &["a", "b"]);
    let newest = said("web", &[]);
    assert!(newest.contains("no snapshot of web that can be read"), "{newest}");
    homes.assert_nothing_left();
}

/// A guest that runs meets a lost page when it touches it, and its QEMU is ended: it must not be started.
#[test]
fn a_lazy_restore_refuses_lost_pages_before_qemu_is_started() {
    let homes = Homes::new();
    let ids = [("mon", 1), ("tue", 2)].map(|(name, number)| homes.save(name, number));
    let started = homes.path("started");
    let script = format!("touch {}", started.display());
    let refused = |flags: &[&str]| {
        let start = std::time::Instant::now();
        let said = run_err(1, homes.args("web@tue", flags, &script));
        assert!(said.contains("web@tue: frame 0x0 is lost") && said.contains("whole is web@mon"), "{said}");
        assert!(!started.exists(), "{flags:?}: QEMU was started");
        (said.lines().last().map(str::to_owned), start.elapsed())
    };
    let object = |home: &str| homes.path(home).join(format!("{}.critical", ids[1]));
    // Cut off before the extent ends: its header can still be read.
    for home in ["a", "b"] {
        std::fs::File::options().write(true).open(object(home)).expect("opens").set_len(90).expect("cuts");
    }
    assert_eq!(refused(&["--lazy"]).0, refused(&[]).0, "both ways say the same");
    for home in ["a", "b"] {
        std::fs::remove_file(object(home)).expect("removes");
    }
    let (said, took) = refused(&["--lazy"]);
    assert_eq!(said, refused(&[]).0);
    assert!(took < Duration::from_secs(10), "a guest's patience is 30 s: {took:?}");
    homes.assert_nothing_left();
}

/// Ended while QEMU is started: QEMU ends too, and neither files nor mounts are left.
#[test]
fn a_restore_that_is_ended_leaves_nothing() {
    let homes = Homes::new();
    homes.save("mon", 1);
    for flags in [&[][..], &["--lazy"]] {
        let started = homes.path("started");
        let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", started.display());
        let mut command = vmstrata();
        command.args(homes.args("web@mon", flags, &script)).stderr(Stdio::null());
        let mut restore = command.spawn().expect("starts");
        while !started.exists() {
            assert_eq!(restore.try_wait().expect("waits"), None, "{flags:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let qemu = std::fs::read_to_string(&started).expect("reads");
        let told = Command::new("kill").args(["-TERM", &restore.id().to_string()]).status().expect("runs");
        assert!(told.success());
        assert_eq!(restore.wait().expect("waits").code(), Some(1), "{flags:?}");
        assert!(!PathBuf::from(format!("/proc/{}", qemu.trim())).exists());
        homes.assert_nothing_left();
        std::fs::remove_file(started).expect("removes");
    }
}
