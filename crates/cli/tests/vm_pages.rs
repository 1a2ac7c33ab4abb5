//! `vmstrata vm pages`: what it says of memory that is no guest's. Real guests are read in the guest tests.

use std::fs;

use crate::support::{run, run_err};
use serde_json::Value;

#[test]
fn memory_that_is_not_understood_is_critical_and_the_exit_code_is_2() {
    let dir = tempfile::tempdir().unwrap();
    let (memory, picture) = (dir.path().join("memory"), dir.path().join("picture"));
    fs::write(&memory, vec![0; 1 << 20]).unwrap();
    let file = memory.to_str().unwrap();
    let output = run(["vm", "pages", "--memory", file, "--map", "--picture", picture.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("not understood: no Linux kernel"), "{text}");
    assert!(text.contains("critical              256  1 MiB  100.0 %"), "{text}");
    assert!(text.contains(&"█".repeat(64)), "{text}");
    assert!(fs::read(&picture).unwrap().starts_with(b"P6 1024 1 255\n"));

    let output = run(["vm", "pages", "--memory", file, "--machine", "pc", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["pages"], &report["classes"]["critical"]), (&256.into(), &256.into()));
    assert!(report["release"].is_null() && report["unreadable"].as_str().unwrap().contains("VMCOREINFO"));
}

#[test]
fn what_cannot_be_read_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("odd"), [0; 5000]).unwrap();
    for (args, words) in [
        (["--memory".to_owned(), path("absent")], "cannot open"),
        (["--memory".to_owned(), path("odd")], "is no guest's memory"),
        (["--qmp".to_owned(), path("absent")], "cannot reach QEMU's monitor"),
    ] {
        let error = run_err(1, [&["vm".to_owned(), "pages".to_owned()][..], &args].concat());
        assert!(error.contains(words), "{error}");
    }
    run_err(64, ["vm", "pages"]);
    run_err(64, ["vm", "pages", "--memory", "m", "--pause"]);
}
