//! `vmstrata vm restore` of a machine without a system, killed at one system call after the other: what it leaves is a guest
//! that goes on, or nothing. The commands of the vault are killed so, too.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::killed::{calls, killed_at, some_of};
use crate::support::{Images, run, run_ok, stderr, vmstrata, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::vault::{Closing, NewSnapshot, OneDevice, Policy, Vault};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass};

/// The calls by which a restore makes what it would leave, and by which it gives QEMU the guest.
const STEPS: [&str; 10] =
    ["openat", "write", "clone3", "vfork", "mkdir", "mount", "unlink", "linkat", "sendto", "umount2"];
/// Of each of them.
const KILLS: usize = 6;
/// Tells the processes of a restore from all others.
const OURS: &str = "VMSTRATA_TEST_RESTORE";

const PROGRAM: &str = env!("CARGO_BIN_EXE_vmstrata");

const QEMU: [&str; 10] = [
    "qemu-system-x86_64",
    "-nodefaults",
    "-display",
    "none",
    "-accel",
    "tcg",
    "-m",
    "64",
    "-machine",
    "q35,memory-backend=mem",
];

/// A machine's snapshot.
struct Taken {
    images: Images,
    memory: TempDir,
}

impl Taken {
    fn new() -> Self {
        let (images, memory) = (Images::new(), tempfile::tempdir_in("/dev/shm").expect("memory"));
        fs::create_dir(images.path("vault")).expect("a directory");
        let monitor = images.path("qmp");
        let mut machine = Command::new(QEMU[0]);
        let file = memory.path().join("memory");
        let object = format!("memory-backend-file,id=mem,size=64M,share=on,mem-path={}", file.display());
        machine.args(&QEMU[1..]).args(["-object", &object]);
        machine.args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        let mut machine = machine.stdin(Stdio::null()).spawn().expect("QEMU starts");
        wait_until("the monitor", || monitor.exists());
        let mut take = vmstrata();
        take.args(["vm", "snapshot", "web", "--name", "mon", "--copies", "1", "--vault"]);
        take.arg(images.path("vault")).arg("--qmp").arg(&monitor);
        let taken = take.env("VMSTRATA_CONTROL", images.path("no-server")).status().expect("runs");
        machine.kill().expect("it runs");
        machine.wait().expect("ends");
        assert!(taken.success());
        fs::remove_file(file).expect("its memory");
        Self { images, memory }
    }

    /// A restore under strace, which looks at its first thread alone.
    fn restore(&self, strace: &[&str], flags: &[&str]) -> Command {
        let mut restore = Command::new("strace");
        restore.args(["-qq", "-o"]).arg(self.images.path("calls")).args(strace);
        restore.arg(PROGRAM).args(["vm", "restore", "web@mon", "--vault"]);
        restore.arg(self.images.path("vault")).arg("--qmp").arg(self.images.path("qmp"));
        restore.arg("--memory-dir").arg(self.memory.path()).args(flags).arg("--").args(QEMU);
        restore.env("VMSTRATA_CONTROL", self.images.path("no-server")).env(OURS, self.memory.path());
        restore.stdin(Stdio::null()).stderr(fs::File::create(self.images.path("log")).expect("a log"));
        restore
    }

    fn has_started(&self) -> bool {
        fs::read_to_string(self.images.path("log")).expect("a log").contains(" restored ")
    }

    /// Processes of a restore that run, with their command lines.
    fn processes(&self) -> Vec<(Pid, String)> {
        let mark = format!("{OURS}={}", self.memory.path().display());
        let ours = |entry: std::io::Result<fs::DirEntry>| {
            let dir = entry.ok()?.path();
            let pid = dir.file_name()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
            let environment = fs::read(dir.join("environ")).ok()?;
            environment.split(|byte| *byte == 0).find(|word| *word == mark.as_bytes())?;
            Some((pid, fs::read_to_string(dir.join("cmdline")).ok()?))
        };
        fs::read_dir("/proc").expect("lists").filter_map(ours).collect()
    }

    fn assert_nothing_but_qemu(&self, what: &str) {
        wait_until("the guard", || self.processes().iter().all(|(_, line)| line.starts_with("qemu")));
        assert_eq!(fs::read_dir(self.memory.path()).expect("lists").count(), 0, "{what}");
        let mounts = fs::read_to_string("/proc/self/mounts").expect("reads");
        assert!(!mounts.contains(self.memory.path().to_str().expect("UTF-8")), "{what}: {mounts}");
    }

    fn kill_all(&self) {
        for (pid, _) in self.processes() {
            let _ = kill_process(pid, Signal::KILL);
        }
        wait_until("their end", || self.processes().is_empty());
    }

    /// Which steps a restore makes until its guest runs, and how often.
    fn steps(&self, flags: &[&str]) -> BTreeMap<String, usize> {
        let trace = format!("trace={}", STEPS.map(|step| format!("?{step}")).join(","));
        let mut strace = self.restore(&["-e", &trace], flags).spawn().expect("strace");
        wait_until("the guest", || self.has_started() || strace.try_wait().expect("waits").is_some());
        assert!(self.has_started());
        let calls = fs::read_to_string(self.images.path("calls")).expect("written by strace");
        self.kill_all();
        strace.wait().expect("waits");
        let mut steps = BTreeMap::new();
        for (name, _) in calls.lines().filter_map(|line| line.split_once('(')) {
            *steps.entry(name.to_owned()).or_default() += 1;
        }
        steps
    }
}

fn kill_anywhere(flags: &[&str], is_sound: impl Fn(&Taken) -> bool) {
    let taken = Taken::new();
    let mut kills = 0;
    for (name, count) in taken.steps(flags) {
        // The last calls of a name come closest to the guest.
        let stride = count.div_ceil(KILLS);
        for number in (1..=count).rev().step_by(stride) {
            let inject = format!("inject={name}:signal=KILL:when={number}");
            let mut strace = taken
                .restore(&["-e", &format!("trace={name}"), "-e", &inject], flags)
                .spawn()
                .expect("strace");
            let mut ended = None;
            wait_until("a kill, or the guest", || {
                ended = strace.try_wait().expect("waits");
                ended.is_some() || taken.has_started()
            });
            // It made fewer of them this time.
            if ended.is_none() {
                for (pid, _) in taken.processes().iter().filter(|(_, line)| line.starts_with(PROGRAM)) {
                    let _ = kill_process(*pid, Signal::KILL);
                }
                strace.wait().expect("waits");
            }
            let what = format!("{flags:?} killed at {name} {number}");
            taken.assert_nothing_but_qemu(&what);
            assert!(is_sound(&taken), "{what}");
            taken.kill_all();
            kills += 1;
        }
    }
    assert!(kills > 10, "{kills} kills");
}

#[test]
fn a_restore_killed_anywhere_leaves_nothing_or_a_guest_that_goes_on() {
    kill_anywhere(&[], |taken| {
        if taken.processes().is_empty() {
            return true;
        }
        let mut qmp = Qmp::connect(&taken.images.path("qmp"), Duration::from_secs(20)).expect("answers");
        let status: serde_json::Value = qmp.ask("query-status", serde_json::json!({})).expect("answers");
        status["running"] == true
    });
}

/// A guest cannot go on without its memory.
#[test]
fn a_lazy_restore_killed_anywhere_leaves_nothing() {
    kill_anywhere(&["--lazy"], |taken| taken.processes().is_empty());
}

/// A vault with three snapshots of a guest, of which the first lacks a copy.
fn vault(images: &Images) {
    let dirs = ["a", "b"].map(|name| images.path(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).expect("a directory"));
    let vault = Vault::open_directories(&dirs).expect("opens");
    for number in 1..=3u8 {
        let layout = Layout::split_at_4g(16 << 12, 16 << 12).expect("a layout");
        let policy = Policy { critical_copies: 2, one_device: OneDevice::Allow, ..Policy::default() };
        let new = NewSnapshot { guest: "web".to_owned(), name: format!("s{number}"), layout, policy };
        let mut writer = vault.begin(new).expect("begins");
        for at in 0..16u8 {
            let page = [number * 16 + at; PAGE_BYTES];
            writer.page(Frame::new(at.into()), PageClass::Critical, &page).expect("takes");
        }
        let saved = writer.finish(Closing { taken_ns: number.into(), ..Closing::default() }).expect("saves");
        if number == 1 {
            fs::remove_file(dirs[0].join(format!("{}.critical", saved.id))).expect("removes");
        }
    }
}

/// Names of a vault's files, without what tells one snapshot from another.
fn kinds(images: &Images) -> Vec<String> {
    let kind = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        let name = if path.extension().is_some() { path.extension() } else { path.file_name() };
        name.expect("a name").to_string_lossy().into_owned()
    };
    let of = |dir: &str| fs::read_dir(images.path(dir)).expect("lists").map(kind).collect::<Vec<_>>();
    let mut kinds = [of("a"), of("b")].concat();
    kinds.sort();
    kinds
}

#[test]
fn a_killed_command_of_the_vault_can_be_made_again_and_leaves_nothing() {
    let commands: [&[&str]; 4] = [
        &["delete", "web@s2"],
        &["prune", "web", "--keep", "last=1"],
        &["verify"],
        &["repair", "--one-device"],
    ];
    for words in commands {
        let args = |images: &Images| {
            let mut args = vec!["vm".to_owned()];
            args.extend(words.iter().map(|word| (*word).to_owned()));
            args.extend(
                ["a", "b"].iter().flat_map(|repository| ["--vault".to_owned(), images.name(repository)]),
            );
            args
        };
        let whole = Images::new();
        vault(&whole);
        let vm = |words: &[&str], images: &Images| {
            let repositories = [images.name("a"), images.name("b")];
            run_ok([&["vm"], words, &["--vault", &repositories[0], "--vault", &repositories[1]]].concat());
        };
        let repaired = |images: &Images| vm(&["repair", "--one-device"], images);
        // What a killed one leaves goes with the next that deletes.
        let next = |images: &Images| {
            repaired(images);
            vm(&["delete", "web@s3"], images);
        };
        if words[0] == "verify" {
            repaired(&whole);
        }
        let made = calls(&args(&whole));
        next(&whole);
        for call in some_of(made, 12) {
            let images = Images::new();
            vault(&images);
            if words[0] == "verify" {
                repaired(&images);
            }
            let what = format!("{words:?} killed at {call:?}");
            assert!(killed_at(&call, &args(&images)), "not {what}");
            let again = run(args(&images));
            let said = stderr(&again);
            assert!(again.status.success() || said.contains("no snapshot"), "{what}: {said}");
            next(&images);
            assert_eq!(kinds(&images), kinds(&whole), "{what}");
        }
    }
}
