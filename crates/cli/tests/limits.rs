//! A host that gives the program little: what is missing is named.

use std::process::Command;

use crate::support::{Images, stderr};

/// What `vmstrata` says when it is started by a shell's `setup; exec vmstrata …`, and fails.
fn refused(setup: &str, args: &[&str]) -> String {
    let script = format!("{setup}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    let said = command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_vmstrata")).args(args).output().unwrap();
    assert_eq!(said.status.code(), Some(1), "{said:?}");
    let said = stderr(&said);
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn too_little_address_space_is_an_error_that_says_so() {
    let images = Images::new();
    let disk = images.create("a.qcow2", &["16M"]);
    let said = refused("ulimit -v 70000", &["map", disk.to_str().unwrap()]);
    assert!(said.contains("ulimit -v"), "{said}");
}

/// Only root can be in a place without `/proc`: as anybody else there is nothing to try.
#[test]
fn what_is_missing_of_proc_is_an_error_that_says_so() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let images = Images::new();
    let disk = images.create("a.qcow2", &["16M"]);
    let without = |place: &str, args: &[&str]| {
        let script = format!("mount -t tmpfs none {place} && exec \"$0\" \"$@\"");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script, env!("CARGO_BIN_EXE_vmstrata")]).args(args);
        stderr(&command.output().unwrap())
    };
    let said = without("/proc", &["info", disk.to_str().unwrap()]);
    assert!(said.contains("/proc is not mounted"), "{said}");
    let spec = format!("path={}", disk.display());
    let nbd = format!("unix:{}", images.name("nbd.sock"));
    let serve =
        ["serve", "--disk", &spec, "--nbd", &nbd, "--no-control", "--runtime-dir", &images.name("run")];
    let said = without("/proc/sys", &serve);
    assert!(said.contains("/proc/sys/kernel/random/boot_id"), "{said}");
}
