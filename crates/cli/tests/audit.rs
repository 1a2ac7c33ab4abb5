//! Changes without a server leave the records that a server's leave.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::support::{Images, audited, commands_of, run_err, run_ok, stderr, vmstrata};
use vmstrata_memory::vault::{Closing, NewSnapshot, OneDevice, Policy, Vault};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass};

/// A command, the change that it records, and the disk. `%` is the directory.
struct Step {
    args: &'static str,
    change: &'static str,
    disk: &'static str,
    /// Its record has the bytes that it frees.
    frees: bool,
}

const fn step(args: &'static str, change: &'static str, disk: &'static str) -> Step {
    Step { args, change, disk, frees: false }
}

const fn freeing(args: &'static str, change: &'static str, disk: &'static str) -> Step {
    Step { args, change, disk, frees: true }
}

/// Every command that changes something without a server, but for those that need a guest.
const STEPS: &[Step] = &[
    step("create %/web.qcow2 16M", "disk_create", "web.qcow2"),
    step("snapshot create %/web.qcow2 --name s0", "snapshot_create", "web.qcow2"),
    step("snapshot create %/web.qcow2 --name s1", "snapshot_create", "web.qcow2"),
    step("snapshot create %/web.qcow2 --name s2", "snapshot_create", "web.qcow2"),
    step("snapshot create %/web.qcow2 --name s3", "snapshot_create", "web.qcow2"),
    step("snapshot create %/web.qcow2 --name s4", "snapshot_create", "web.qcow2"),
    step("snapshot create %/web.qcow2 --name s5", "snapshot_create", "web.qcow2"),
    step("snapshot create %/old.img --name s0 --format raw --convert-raw", "snapshot_create", "old.img"),
    step("snapshot hold %/web.qcow2 s0 --tag test", "snapshot_hold", "web.qcow2"),
    step("snapshot release %/web.qcow2 s0 --tag test", "snapshot_release", "web.qcow2"),
    step("snapshot clone %/web.qcow2 s0 -o %/clone.qcow2", "snapshot_clone", "clone.qcow2"),
    step("index build %/web.qcow2", "index_build", "web.qcow2"),
    step("index drop %/web.qcow2", "index_drop", "web.qcow2"),
    step("backup %/web.qcow2@s1 -o %/full.qcow2 --no-hold", "disk_backup", "web.qcow2@s1"),
    step("convert %/web.qcow2@s1 %/flat.raw", "disk_convert", "flat.raw"),
    step("restore %/full.qcow2 -o %/back.qcow2", "disk_restore", "back.qcow2"),
    step("resize %/web.qcow2 32M", "disk_resize", "web.qcow2"),
    freeing("snapshot delete %/web.qcow2 s1", "snapshot_delete", "web.qcow2"),
    freeing("snapshot prune %/web.qcow2 --keep last=3", "snapshot_delete", "web.qcow2"),
    freeing("merge %/web.qcow2 --layers 1..1 --yes", "merge", "web.qcow2"),
    step("snapshot revert %/web.qcow2 s3 --yes", "snapshot_revert", "web.qcow2"),
    freeing("gc %/web.qcow2 --yes", "gc", "web.qcow2"),
    freeing("flatten %/web.qcow2 --yes", "flatten", "web.qcow2"),
    step("check %/web.qcow2 --repair leaks", "disk_repair", "web.qcow2"),
    step("move %/web.qcow2 --to %/elsewhere", "move", "web.qcow2"),
    step("recover %/flush.log", "recover", ""),
    step("vm repair --vault %/vault --one-device", "vm_repair", ""),
    step("vm delete web@1 --vault %/vault", "vm_delete", ""),
    step("vm prune web --keep last=1 --vault %/vault", "vm_delete", ""),
    step("vm gc --vault %/vault", "vm_gc", ""),
];

/// Commands that change nothing themselves: they read, or ask a server, whose record it is.
const OTHERS: &[&str] = &[
    "info",
    "map",
    "index verify",
    "snapshot list",
    "snapshot show",
    "diff",
    "survey",
    "mount",
    "serve",
    "status",
    "top",
    "disk show",
    "disk add",
    "disk limit",
    "disk remove",
    "drain",
    "export add",
    "export remove",
    "job list",
    "job index-build",
    "job snapshot-delete",
    "job merge",
    "job flatten",
    "job pause",
    "job resume",
    "job cancel",
    "job limit",
    "job move-rate",
    "tier status",
    "tier sync",
    "tier hold",
    "tier rate",
    "base list",
    "replica list",
    "replica fill",
    "replica pin",
    "replica unpin",
    "replica scrub",
    "replica drop",
    "vm args",
    "vm pages",
    "vm list",
    "vm show",
    "vm verify",
    "completions",
];
/// Their records are looked at where guests and tiered disks are.
const ELSEWHERE: &[&str] = &[
    "tier attach",
    "base publish",
    "base retire",
    "rebase",
    "tier takeover",
    "tier pins",
    "tier branches",
    "tier detach",
    "vm snapshot",
    "vm migrate",
    "vm restore",
];

fn leaves(command: &[&str]) -> Vec<String> {
    let below = commands_of(command);
    if below.is_empty() {
        return vec![command.join(" ")];
    }
    below.iter().flat_map(|name| leaves(&[command, &[name.as_str()]].concat())).collect()
}

#[test]
fn every_command_is_known_to_leave_a_record_or_to_change_nothing() {
    let leaves: BTreeSet<String> = leaves(&[]).into_iter().collect();
    let changes = |leaf: &str| STEPS.iter().any(|step| step.args.starts_with(&format!("{leaf} ")));
    let known = |leaf: &&String| {
        changes(leaf) || OTHERS.contains(&leaf.as_str()) || ELSEWHERE.contains(&leaf.as_str())
    };
    let unknown: Vec<_> = leaves.iter().filter(|leaf| !known(leaf)).collect();
    assert!(unknown.is_empty(), "in none of the lists: {unknown:?}");
    let gone: Vec<_> = OTHERS.iter().chain(ELSEWHERE).filter(|name| !leaves.contains(**name)).collect();
    assert!(gone.is_empty(), "no commands: {gone:?}");
}

/// Three snapshots of a made-up guest.
fn save_guest(home: PathBuf) {
    std::fs::create_dir(&home).expect("makes");
    let vault = Vault::open_directories(&[home]).expect("opens");
    for number in 0..3u8 {
        let layout = Layout::split_at_4g(1 << 12, 1 << 12).expect("a layout");
        let policy = Policy { critical_copies: 1, one_device: OneDevice::Allow, ..Policy::default() };
        let new = NewSnapshot { guest: "web".to_owned(), name: number.to_string(), layout, policy };
        let mut writer = vault.begin(new).expect("begins");
        writer.page(Frame::new(0), PageClass::Critical, &[number + 1; PAGE_BYTES]).expect("takes");
        writer.finish(Closing { taken_ns: number.into(), ..Closing::default() }).expect("saves");
    }
}

/// Bytes that the images, and what lies beside them for anybody to see, take.
fn du(images: &Images) -> u64 {
    let files = images.files().into_iter().filter(|name| !name.starts_with('.'));
    files.map(|name| images.path(&name).metadata().unwrap().blocks() * 512).sum()
}

fn assert_recorded(step: &Step, images: &Images, audit: &Path) {
    let (before, taken) = (audited(audit).len(), du(images));
    let args = step.args.replace('%', images.path("").to_str().unwrap().trim_end_matches('/'));
    let mut command = vmstrata();
    command.args(args.split(' ')).arg("--audit").arg(audit).env("RUST_LOG", "info");
    let output = command.output().expect("runs");
    assert!(output.status.success(), "{args}: {}", stderr(&output));
    let lines = audited(audit).split_off(before);
    let [line] = &lines[..] else { panic!("{args}: {lines:?}") };
    assert_eq!((&line["change"], &line["outcome"]), (&step.change.into(), &"done".into()), "{args}");
    let disk = line["disks"][0].as_str().unwrap_or_default();
    let expected = if step.disk.is_empty() { String::new() } else { images.name(step.disk) };
    assert_eq!(disk, expected, "{args}");
    let by = &line["by"];
    let uid = rustix::process::getuid().as_raw();
    assert!(by["kind"] == "local" && by["uid"] == uid && by["name"].is_string(), "{args}: {by}");
    if step.frees {
        assert_eq!(line["bytes"], taken - du(images), "{args}: {line}");
        assert!(line["bytes"].as_u64() > Some(0), "{args}: {line}");
    }
    let (said, change) = (stderr(&output), format!("change {} ", step.change));
    assert_eq!(said.matches(&change).count(), 1, "{args}: {said}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains(&change), "{args}");
}

#[test]
fn every_changing_command_leaves_one_record() {
    let (images, records) = (Images::new(), Images::new());
    std::fs::write(images.path("old.img"), vec![7; 1 << 20]).expect("writes");
    std::fs::write(images.path("flush.log"), vec![0; 1 << 20]).expect("writes");
    std::fs::create_dir(images.path("elsewhere")).expect("makes");
    save_guest(images.path("vault"));
    for step in STEPS {
        assert_recorded(step, &images, &records.path("audit"));
    }
}

#[test]
fn an_audit_file_that_cannot_be_written_is_refused_before_anything_changes() {
    let images = Images::new();
    let (disk, nowhere) = (images.name("web.qcow2"), images.name("none/audit"));
    let refused = run_err(1, ["create", &disk, "16M", "--audit", &nowhere]);
    assert!(refused.contains("--audit") && refused.contains("none/audit"), "{refused}");
    assert_eq!(images.files(), [""; 0]);
    run_ok(["create", &disk, "16M"]);
    run_ok(["info", &disk, "--audit", &nowhere]);
}

#[test]
fn a_change_that_fails_is_recorded_and_a_dry_run_is_none() {
    let images = Images::new();
    let (disk, audit) = (images.name("web.qcow2"), images.name("audit"));
    run_ok(["create", &disk, "16M"]);
    run_ok(["snapshot", "create", &disk, "--name", "mon"]);
    run_ok(["snapshot", "delete", &disk, "mon", "--dry-run", "--audit", &audit]);
    run_ok(["flatten", &disk, "--dry-run", "--audit", &audit]);
    run_ok(["gc", &disk, "--audit", &audit]);
    run_err(1, ["resize", &disk, "1M", "--audit", &audit]);
    let lines = audited(&images.path("audit"));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!((&line["change"], &line["outcome"]), (&"disk_resize".into(), &"failed".into()));
    assert!(line["error"].as_str().is_some_and(|why| why.contains("shrink")), "{line}");
}
