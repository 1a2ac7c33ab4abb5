//! `vmstrata survey`: what it prints, where, and with which exit code. What it finds is tested where it is found, in
//! the survey's own crate.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::{Images, run, run_err, run_ok, stderr, vmstrata};
use serde_json::Value;

/// A disk on a base that another disk stands on too.
fn fleet() -> Images {
    let images = Images::new();
    images.create("base.qcow2", &["1G"]);
    for disk in ["web.qcow2", "db.qcow2"] {
        images.create(disk, &["-b", "base.qcow2", "-F", "qcow2"]);
    }
    images
}

fn survey(images: &Images, args: &[&str]) -> Output {
    run([&["survey", images.name("").as_str()], args].concat())
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn a_sound_fleet_is_summed_up_and_the_exit_code_is_0() {
    let images = fleet();
    let output = survey(&images, &[]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(output.stderr.is_empty(), "no progress where nobody watches: {}", stderr(&output));
    assert!(text.contains("2 disks in 3 layer files"), "{text}");
    assert!(text.contains("No chain is at risk."), "{text}");
    for row in ["disk size", "layers of a chain", "chains a layer belongs to", "memory   stock QEMU"] {
        assert!(text.contains(row), "{row}: {text}");
    }
}

#[test]
fn broken_chains_are_2_and_doubtful_ones_3() {
    let images = fleet();
    let overlay = images.create("new.qcow2", &["-b", "db.qcow2", "-F", "qcow2"]);
    let later = fs::metadata(&overlay).unwrap().modified().unwrap() + std::time::Duration::from_secs(3600);
    fs::File::options().write(true).open(images.path("db.qcow2")).unwrap().set_modified(later).unwrap();
    let output = survey(&images, &[]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("  changed ") && text.contains("may have changed 1.0 h"), "{text}");

    fs::remove_file(images.path("base.qcow2")).unwrap();
    let output = survey(&images, &[]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("At risk: 2 chains broken"), "{text}");
    assert!(text.contains("! missing ") && text.contains("base.qcow2: No such file"), "{text}");
    assert!(text.contains("db.qcow2: cannot open"), "the layer that names it: {text}");
}

/// Vmstrata's own merges write layers long after their overlays were made: no chain is at risk for that.
#[test]
fn a_layer_that_is_as_its_index_knows_it_is_not_suspected() {
    let images = fleet();
    images.create("new.qcow2", &["-b", "db.qcow2", "-F", "qcow2"]);
    let now = std::time::SystemTime::now();
    // As it is with files copied with their times: what was changed last tells.
    let changed = |name: &str, hours_ago: u64| {
        let then = now - std::time::Duration::from_secs(hours_ago * 3600);
        fs::File::options().write(true).open(images.path(name)).unwrap().set_modified(then).unwrap();
    };
    let code = || survey(&images, &[]).status.code();
    changed("base.qcow2", 48);
    changed("new.qcow2", 24);
    changed("db.qcow2", 5);
    assert_eq!(code(), Some(3));
    run_ok(["index", "build", &images.name("new.qcow2")]);
    assert_eq!(code(), Some(0));
    images.write_layer("db.qcow2", &["write 0 64k"]);
    changed("db.qcow2", 4);
    assert_eq!(code(), Some(3), "changed since");
}

/// However soon after: the times of files tell nothing of the first minute, and a cleared bit does.
#[test]
fn an_indexed_layer_that_another_program_wrote_is_suspected_at_once() {
    let images = Images::new();
    let disk = images.name("web.qcow2");
    run_ok(["create", &disk, "16M"]);
    run_ok(["snapshot", "create", &disk, "--name", "monday"]);
    assert_eq!(survey(&images, &[]).status.code(), Some(0));
    images.write_layer("web.monday.qcow2", &["write 0 64k"]);
    let output = survey(&images, &[]);
    assert_eq!(output.status.code(), Some(3), "{}", stdout(&output));
    assert!(stdout(&output).contains("another program had it open for writing"), "{}", stdout(&output));
}

#[test]
fn a_chain_may_be_as_long_as_the_operator_says() {
    let images = Images::new();
    images.long_chain(5);
    assert_eq!(survey(&images, &["--long-chain", "5"]).status.code(), Some(0));
    let output = survey(&images, &["--long-chain", "4"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(stdout(&output).contains("a chain of 5 layers, more than 4"), "{}", stdout(&output));
}

#[test]
fn what_cannot_be_surveyed_is_1_and_wrong_usage_64() {
    let images = fleet();
    let message = run_err(1, ["survey", &images.name("gone")]);
    assert!(message.contains("gone") && message.lines().count() == 1, "{message}");
    let message = run_err(1, ["survey", &images.name(""), "--html", &images.name("no/page.html")]);
    assert!(message.contains("cannot write") && message.contains("page.html"), "{message}");
    let nothing = Images::new();
    let text = stdout(&survey(&nothing, &[]));
    assert!(text.contains("No image was found."), "{text}");
    let sums: Value = serde_json::from_slice(&survey(&nothing, &["--json"]).stdout).expect("JSON");
    assert!(sums["savings"]["open-s"].as_f64().unwrap().is_sign_positive(), "{sums}");
    // What was found is not lost with the history that it does not go into.
    fs::write(images.path("history"), "not one of ours\n").unwrap();
    let output = survey(&images, &["--history", &images.name("history")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("2 disks in 3 layer files") && stderr(&output).contains("line 1"));
    run_err(64, ["survey"]);
    run_err(64, ["survey", "/", "--threads", "0"]);
    run_err(64, ["survey", "/", "--long-chain", "0"]);
}

fn with_an_orphan(args: &[&str]) -> Value {
    let images = fleet();
    images.create("orphan.qcow2", &["-u", "-b", "gone.qcow2", "-F", "qcow2", "1G"]);
    let output = survey(&images, &[&["--json"], args].concat());
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Scripts stand on these: a key that goes or changes its meaning needs a new schema number.
#[test]
fn the_keys_of_chains_and_layers_stay() {
    let report = with_an_orphan(&[]);
    assert_eq!(report["schema"], 1);
    assert_eq!(
        keys(&report),
        [
            "chains",
            "growth",
            "layers",
            "long-chain",
            "made-at",
            "risks",
            "roots",
            "savings",
            "scanned",
            "schema",
            "snapshots",
            "summary"
        ]
    );
    let orphan =
        report["chains"].as_array().unwrap().iter().find(|chain| chain["severity"] == "broken").unwrap();
    assert_eq!(
        keys(orphan),
        [
            "allocated",
            "beyond-measured",
            "in-use",
            "internal-snapshots",
            "known",
            "layers",
            "map-memory-max",
            "open-s",
            "path",
            "reads-per-s",
            "risks",
            "severity",
            "shared",
            "stock-memory-max",
            "stock-memory-min",
            "stock-open-s",
            "stock-reads-per-s",
            "top",
            "virtual-size"
        ]
    );
    assert_eq!(
        keys(&report["layers"][1]),
        [
            "allocated",
            "backing-filename",
            "below",
            "chains",
            "depth",
            "format",
            "longest-chain",
            "overlays",
            "path",
            "virtual-size"
        ]
    );
}

#[test]
fn the_keys_of_everything_else_stay() {
    let report = with_an_orphan(&["--deep"]);
    assert_eq!(keys(&report["risks"][0]), ["chains", "kind", "message", "path", "severity"]);
    assert_eq!(
        keys(&report["scanned"]),
        [
            "directories",
            "files",
            "images",
            "left-over",
            "links",
            "special",
            "too-deep",
            "too-many",
            "unfinished",
            "unreadable"
        ]
    );
    assert_eq!(
        keys(&report["snapshots"]),
        ["dated", "interval-s", "out-of-order", "points", "sources", "taken", "windows"]
    );
    assert_eq!(
        keys(&report["summary"]["chain-length"]),
        ["count", "max", "min", "p50", "p90", "p99", "total"]
    );
    assert_eq!(keys(&report["deep"]), ["hidden-bytes", "layers-failed", "layers-read", "mapped-bytes"]);
    for layer in report["layers"].as_array().unwrap() {
        assert!(layer["mapped"].is_u64() && layer["hidden"].is_u64(), "{layer}");
    }
}

#[test]
fn the_page_goes_to_its_file_beside_the_text() {
    let images = fleet();
    let page = images.name("fleet.html");
    let output = survey(&images, &["--html", &page]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("2 disks"));
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
    assert_eq!(html.matches("<svg ").count(), 10);
}

#[test]
fn a_single_image_brings_its_chain_along() {
    let images = fleet();
    let report = run(["survey", "--json", &images.name("web.qcow2")]);
    let report: Value = serde_json::from_slice(&report.stdout).expect("JSON");
    assert_eq!(
        (report["chains"].as_array().unwrap().len(), report["layers"].as_array().unwrap().len()),
        (1, 2)
    );
}

/// Runs the command as nobody, whom permissions bind.
fn as_nobody(directory: &Path) -> Output {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        return vmstrata().arg("survey").arg(directory).output().expect("vmstrata starts");
    }
    // The build's directory may be closed to nobody.
    let copies = tempfile::tempdir().expect("a temporary directory");
    fs::set_permissions(copies.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = copies.path().join("vmstrata");
    fs::copy(env!("CARGO_BIN_EXE_vmstrata"), &program).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
    command.arg("survey").arg(directory).output().expect("setpriv starts")
}

#[test]
fn what_permissions_hide_is_told_and_the_rest_is_surveyed() {
    let images = fleet();
    fs::set_permissions(images.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(images.path("closed")).unwrap();
    for hidden in ["base.qcow2", "closed"] {
        fs::set_permissions(images.path(hidden), fs::Permissions::from_mode(0o000)).unwrap();
    }
    let output = as_nobody(&images.path(""));
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(2), "{text}{}", stderr(&output));
    assert_eq!(text.matches("! unreadable ").count(), 3, "{text}");
    assert!(text.contains("ermission denied"), "{text}");
    assert!(text.contains("Left out: 1 could not be read, such as") && text.contains("/closed"), "{text}");
}
