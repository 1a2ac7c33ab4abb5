//! The service as systemd runs it: its socket passed on, its units in order, its sandbox wide enough.

use crate::support;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::http::{ask, connect};
use crate::support::{Images, assert_clean, stderr, tool, tool_ok, wait_until};
use rustix::process::{Pid, Signal, kill_process};

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

fn unit(name: &str) -> PathBuf {
    packaged("systemd").join(name)
}

const SERVICES: [&str; 3] = ["vmstrata.service", "vmstrata-prune@.service", "vmstrata-vm-snapshot@.service"];

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_first_command_starts_the_server_on_a_socket_that_was_there_before_it() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let socket = images.path("control.sock");
    let serve = Command::new("systemd-socket-activate")
        .args(["--fdname=control", "-l", socket.to_str().unwrap(), env!("CARGO_BIN_EXE_vmstrata"), "serve"])
        .args([
            "--disk",
            &format!("path={}", path.display()),
            "--nbd",
            &format!("unix:{},rw", images.name("nbd.sock")),
        ])
        .args(["--runtime-dir", &images.name("run")])
        .env_clear()
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut serve = Running(serve);
    wait_until("the socket", || socket.exists());
    assert!(!images.path("nbd.sock").exists(), "nobody has asked yet");
    // Waits in the socket until the server that it starts takes it.
    let status = ask(&socket, "GET", "/v1/status", "").json();
    assert_eq!(status["pid"], serve.0.id());
    wait_until("the disk", || ask(&socket, "GET", "/v1/disks", "").json()["disks"][0]["state"] == "serving");
    assert!(!images.path("run/control.sock").exists(), "one control socket is enough");
    let mut second = support::vmstrata();
    second.args(["serve", "--replace", "--control", socket.to_str().unwrap()]);
    second.args([
        "--disk",
        &format!("path={}", path.display()),
        "--nbd",
        &format!("unix:{},rw", images.name("2.sock")),
    ]);
    let second = second.args(["--runtime-dir", &images.name("run2")]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(stderr(&second).contains("systemctl restart vmstrata.service"), "{}", stderr(&second));
    assert_eq!(ask(&socket, "GET", "/v1/status", "").json()["pid"], serve.0.id(), "it was asked to end");
    kill_process(Pid::from_child(&serve.0), Signal::TERM).unwrap();
    assert!(serve.0.wait().unwrap().success());
    assert!(socket.exists(), "the socket is the service manager's");
    assert_clean(&path);
}

#[test]
fn the_units_are_understood_and_leave_little_exposed() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(unit("vmstrata-control.socket"), dir.path().join("vmstrata-control.socket")).unwrap();
    for name in SERVICES {
        let text = fs::read_to_string(unit(name)).unwrap();
        let here = text.replace("/usr/bin/vmstrata", env!("CARGO_BIN_EXE_vmstrata"));
        assert_ne!(here, text, "{name} starts another program");
        let service = dir.path().join(name);
        fs::write(&service, here).unwrap();
        let verified = tool("systemd-analyze", ["verify", "--man=no", service.to_str().unwrap()]);
        assert!(verified.status.success() && stderr(&verified).is_empty(), "{}", stderr(&verified));
        let security = ["security", "--offline=true", "--threshold=20", service.to_str().unwrap()];
        let exposed = tool("systemd-analyze", security);
        assert!(exposed.status.success(), "{name} is exposed more than to a level of 2.0");
    }
}

/// The values that a unit gives a key.
fn values(name: &str, key: &str) -> Vec<String> {
    let text = fs::read_to_string(unit(name)).unwrap();
    let values = text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    values.map(str::to_owned).collect()
}

#[test]
fn the_units_run_as_a_user_whose_directories_let_qemu_to_its_sockets_alone() {
    for name in SERVICES {
        assert_eq!(values(name, "User"), ["vmstrata"], "{name}");
    }
    assert_eq!(values("vmstrata-control.socket", "SocketUser"), ["vmstrata"]);
    assert_eq!(values("vmstrata-control.socket", "SocketMode"), ["0600"]);
    let root = tempfile::tempdir().unwrap();
    let at = format!("--root={}", root.path().display());
    fs::create_dir(root.path().join("etc")).unwrap();
    tool_ok("systemd-sysusers", [&at, packaged("sysusers.d/vmstrata.conf").to_str().unwrap()]);
    let users = fs::read_to_string(root.path().join("etc/passwd")).unwrap();
    let groups = fs::read_to_string(root.path().join("etc/group")).unwrap();
    let number = |table: &str, name: &str| -> u32 {
        let entry = table.lines().find(|line| line.split(':').next() == Some(name)).unwrap();
        entry.split(':').nth(2).unwrap().parse().unwrap()
    };
    let server = number(&users, "vmstrata");
    let (own, guests) = (number(&groups, "vmstrata"), number(&groups, "vmstrata-guests"));
    assert!(groups.lines().any(|line| line.starts_with("vmstrata-guests:") && line.ends_with(":vmstrata")));
    if !rustix::process::geteuid().is_root() {
        // Others cannot give directories away.
        return;
    }
    tool_ok("systemd-tmpfiles", [&at, "--create", packaged("tmpfiles.d/vmstrata.conf").to_str().unwrap()]);
    for (dir, owner, group, mode) in [
        ("vmstrata", server, own, 0o700),
        ("vmstrata-guests", server, guests, 0o750),
        ("vmstrata-monitors", 0, guests, 0o3770),
        ("../dev/shm/vmstrata", 0, guests, 0o3770),
    ] {
        let made = fs::metadata(root.path().join("run").join(dir)).unwrap();
        assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (owner, group, mode), "{dir}");
    }
}

/// What `apparmor_parser` says of the profile of a guest's QEMU as libvirt makes it, with `local` as the host's additions.
fn guest_profile(local: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("local/abstractions")).unwrap();
    fs::write(dir.path().join("local/abstractions/libvirt-qemu"), local).unwrap();
    let profile = dir.path().join("profile");
    // Where libvirt is not installed, what its abstraction ends with is enough.
    let libvirts = if Path::new("/etc/apparmor.d/abstractions/libvirt-qemu").exists() {
        "include <abstractions/libvirt-qemu>"
    } else {
        "include <local/abstractions/libvirt-qemu>"
    };
    fs::write(&profile, format!("include <tunables/global>\nprofile guest {{\n{libvirts}\n}}\n")).unwrap();
    let here = dir.path().to_str().unwrap();
    tool("apparmor_parser", ["-Q", "-K", "-I", here, "-I", "/etc/apparmor.d", profile.to_str().unwrap()])
}

#[test]
fn the_rules_for_apparmor_are_part_of_the_profile_of_a_guest() {
    if Command::new("apparmor_parser").arg("--version").output().is_err() {
        eprintln!("skipped: apparmor_parser is not installed");
        return;
    }
    let rules = fs::read_to_string(packaged("apparmor/libvirt-qemu")).unwrap();
    let parsed = guest_profile(&rules);
    assert!(parsed.status.success(), "{}", stderr(&parsed));
    assert!(!guest_profile("/run/vmstrata-guests/*.sock nonsense,").status.success(), "it is not read");
    let tmpfiles = fs::read_to_string(packaged("tmpfiles.d/vmstrata.conf")).unwrap();
    for dir in ["/run/vmstrata-guests", "/run/vmstrata-monitors", "/dev/shm/vmstrata"] {
        assert!(rules.contains(&format!("\n{dir}/")) && tmpfiles.contains(&format!("d {dir} ")), "{dir}");
    }
}

/// The system calls that a list of names and @sets stands for.
fn expand(list: &str) -> BTreeSet<String> {
    let mut calls = BTreeSet::new();
    for word in list.split_whitespace() {
        if word.starts_with('@') {
            let text = tool_ok("systemd-analyze", ["syscall-filter", word]);
            let members = text.lines().skip(1).map(str::trim).filter(|line| !line.starts_with('#'));
            calls.extend(expand(&members.collect::<Vec<_>>().join(" ")));
        } else {
            calls.insert(word.to_owned());
        }
    }
    calls
}

fn allowed() -> BTreeSet<String> {
    let text = fs::read_to_string(unit("vmstrata.service")).unwrap();
    let mut calls = BTreeSet::new();
    for list in text.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
        match list.strip_prefix('~') {
            Some(denied) => calls = &calls - &expand(denied),
            None => calls.extend(expand(list)),
        }
    }
    calls
}

/// `12345 name(...` and `12345 <... name resumed>...`.
fn traced(log: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        let call = line.split_once(' ')?.1.trim_start();
        let call = call.strip_prefix("<... ").unwrap_or(call);
        let name = call.split(['(', ' ']).next()?;
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_').then(|| name.to_owned())
    };
    log.lines().filter_map(name).collect()
}

#[test]
fn every_system_call_of_a_busy_server_passes_the_filter_of_the_unit() {
    let images = Images::new();
    images.create("base.qcow2", &["64M"]);
    images.write_layer("base.qcow2", &["write -P 1 0 8M"]);
    let top = images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let extra = images.create("extra.qcow2", &["16M"]);
    let (trace, guest, nbd) = (images.name("trace"), images.name("guest.sock"), images.name("nbd.sock"));
    let child = Command::new("strace")
        .args([
            "-f",
            "-qq",
            "-o",
            &trace,
            env!("CARGO_BIN_EXE_vmstrata"),
            "serve",
            "--metrics",
            "127.0.0.1:0",
        ])
        .args([
            "--disk",
            &format!("path={},name=top", top.display()),
            "--vhost-user",
            &format!("top={guest},group={}", rustix::process::getegid().as_raw()),
        ])
        .args([
            "--nbd",
            &format!("unix:{nbd},rw"),
            "--nbd",
            "tcp:localhost:0",
            "--runtime-dir",
            &images.name("run"),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut server = Running(child);
    let control = images.path("run/control.sock");
    wait_until("the server", || Path::new(&guest).exists());
    let uri = format!("nbd+unix:///top?socket={nbd}");
    let work = [
        "write -P 2 0 3M",
        "read 0 8M",
        "read 4M 4k",
        "read 4M 4k",
        "write -f -P 3 5M 4k",
        "discard 1M 64k",
        "write -z 2M 64k",
        "flush",
    ];
    let work: Vec<&str> = work.iter().flat_map(|command| ["-c", command]).collect();
    tool_ok("qemu-io", [&["-f", "raw"], &work[..], &[&uri]].concat());
    tool_ok("qemu-img", ["bench", "-f", "raw", "-w", "-c", "300", "-d", "16", "-s", "4k", "-S", "68k", &uri]);
    let body = format!(r#"{{"path":{:?}}}"#, extra.to_str().unwrap());
    assert_eq!(ask(&control, "POST", "/v1/disks", &body).status, 201);
    assert_eq!(ask(&control, "DELETE", "/v1/disks/extra", "").status, 204);
    assert_eq!(ask(&control, "GET", "/v1/metrics", "").status, 200);
    let pid = ask(&control, "GET", "/v1/status", "").json()["pid"].as_i64().unwrap();
    drop(connect(Path::new(&guest)));
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::TERM).unwrap();
    assert!(server.0.wait().unwrap().success());
    let used = traced(&fs::read_to_string(&trace).unwrap());
    for needed in ["io_uring_setup", "io_uring_enter", "fdatasync", "accept4", "flock", "mincore", "fchownat"]
    {
        // The filter would mean little if the trace had not seen these.
        assert!(used.contains(needed), "{needed} was not traced: {used:?}");
    }
    let refused: Vec<_> = used.difference(&allowed()).cloned().collect();
    assert!(refused.is_empty(), "the unit's SystemCallFilter refuses {refused:?}");
}
