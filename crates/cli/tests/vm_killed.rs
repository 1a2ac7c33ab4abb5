//! `vmstrata vm restore` of a machine without a system, killed at one system call after the other: what it leaves is a guest that
//! goes on, or nothing. The vault's own operations are killed in `memory/tests/vault_kill.rs`.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::{Images, vmstrata, wait_until};
use tempfile::TempDir;
use vmstrata_memory::qmp::Qmp;

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
