//! Files whose names are not UTF-8: every command takes them, and text shows them as `file:` URIs.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_json, run_ok, tool_ok};
use serde_json::Value;

/// A path in the directory, and its text.
fn odd(images: &Images, end: &str) -> (PathBuf, String) {
    let mut path = images.path("inv").into_os_string().into_vec();
    path.extend_from_slice(b"\xff\xfe");
    path.extend_from_slice(end.as_bytes());
    (OsString::from_vec(path).into(), format!("file://{}%FF%FE{end}", images.name("inv")))
}

fn at(disk: &Path, name: &str) -> OsString {
    OsString::from_vec([disk.as_os_str().as_bytes(), b"@", name.as_bytes()].concat())
}

fn words<'a>(command: &'a str, files: &[&'a OsStr]) -> Vec<&'a OsStr> {
    let mut files = files.iter().copied();
    let mut word = |word: &'a str| if word == "FILE" { files.next().expect("a file") } else { word.as_ref() };
    command.split(' ').map(&mut word).collect()
}

fn ok(command: &str, files: &[&OsStr]) -> String {
    run_ok(words(command, files))
}

fn json(command: &str, files: &[&OsStr]) -> Value {
    run_json(words(command, files).into_iter().chain(["--json".as_ref()]))
}

fn write(disk: &Path, pattern: u8) {
    let command = format!("write -P {pattern} 0 1M");
    tool_ok("qemu-io", ["-c".as_ref(), command.as_ref(), disk.as_os_str()]);
}

fn reads(disk: &Path, pattern: u8) {
    let command = format!("read -P {pattern} 0 1M");
    let said = tool_ok("qemu-io", ["-r".as_ref(), "-c".as_ref(), command.as_ref(), disk.as_os_str()]);
    assert!(!said.contains("failed"), "{said}");
}

/// A disk with snapshots s1 to s3, which hold their numbers, and 4 written since.
fn with_history(images: &Images) -> (PathBuf, String) {
    let (disk, text) = odd(images, ".qcow2");
    ok("create FILE 4M", &[disk.as_os_str()]);
    for number in 1..4 {
        write(&disk, number);
        ok(&format!("snapshot create FILE -n s{number}"), &[disk.as_os_str()]);
    }
    write(&disk, 4);
    (disk, text)
}

#[test]
fn offline_commands_take_names_that_are_not_utf_8() {
    let images = Images::new();
    let (disk, text) = with_history(&images);
    let disk_arg = disk.as_os_str();
    assert_eq!(json("info FILE", &[disk_arg])["filename"], text);
    assert_eq!(json("check FILE", &[disk_arg])["filename"], text);
    assert_eq!(json("map FILE", &[disk_arg])[0]["filename"], text);
    let layer = odd(&images, ".s3.qcow2").1;
    assert_eq!(json("snapshot list FILE", &[disk_arg])["snapshots"][0]["layer"], layer);
    assert_eq!(
        json("diff FILE FILE", &[&at(&disk, "s1"), &at(&disk, "s2")])["new"],
        format!("{text}@s2").replace('@', "%40")
    );

    let (clone, clone_text) = odd(&images, ".clone");
    assert_eq!(json("snapshot clone FILE s2 -o FILE", &[disk_arg, clone.as_os_str()])["clone"], clone_text);
    reads(&clone, 2);
    let (kept, _) = odd(&images, ".kept");
    ok("snapshot revert FILE s3 --keep FILE", &[disk_arg, kept.as_os_str()]);
    reads(&disk, 3);
    reads(&kept, 4);
    ok("snapshot revert FILE s1 --yes", &[clone.as_os_str()]);
    reads(&clone, 1);
    ok("gc FILE", &[clone.as_os_str()]);

    // The kept disk stands on s3, so its file stays below the disk that drops it.
    ok("snapshot delete FILE s3 s2", &[disk_arg]);
    ok("merge FILE --layers 1 --yes", &[kept.as_os_str()]);
    ok("flatten FILE --yes", &[kept.as_os_str()]);
    for (disk, pattern) in [(&disk, 3), (&kept, 4), (&clone, 1)] {
        reads(disk, pattern);
        assert_clean(disk);
    }
    let left = json("gc FILE", &[disk_arg]);
    assert_eq!(left["disks"][0]["disk"], text, "{left}");
    let survey = json("survey FILE", &[images.path("").as_os_str()]);
    let chains = survey["chains"].as_array().unwrap();
    assert!(chains.iter().any(|chain| chain["path"] == text), "{survey}");
}

#[test]
fn backups_have_names_that_are_not_utf_8() {
    let images = Images::new();
    let (disk, _) = with_history(&images);
    let [(full, text), (incremental, _), (restored, _)] =
        [".full", ".inc", ".back"].map(|end| odd(&images, end));
    let (first, second) = (at(&disk, "s1"), at(&disk, "s2"));
    assert_eq!(json("backup FILE -o FILE", &[&first, full.as_os_str()])["file"], text);
    let files = [&*second, &*first, full.as_os_str(), incremental.as_os_str()];
    ok("backup FILE --since FILE --previous FILE -o FILE", &files);
    reads(&incremental, 2);
    ok("backup --verify FILE", &[incremental.as_os_str()]);
    ok("restore FILE FILE -o FILE", &[full.as_os_str(), incremental.as_os_str(), restored.as_os_str()]);
    reads(&restored, 2);
}

#[test]
fn a_server_is_told_of_such_a_file_by_its_uri() {
    let images = Images::new();
    let (disk, text) = with_history(&images);
    let (config, nbd) = (images.name("vmstrata.toml"), format!("unix:{}", images.name("nbd.sock")));
    std::fs::write(&config, format!("[[disk]]\npath = \"{text}\"\nname = \"odd\"\n")).unwrap();
    let server = Server::start(&["--config", &config, "--nbd", &nbd]);
    let status: Value = serde_json::from_str(&server.ask_ok(["status", "--json"])).unwrap();
    assert_eq!(status["disks"][0]["path"], text);
    let control = server.control();
    let take = "snapshot create FILE -n live --control FILE --json";
    let taken = run_json(words(take, &[disk.as_os_str(), control.as_os_str()]));
    assert_eq!(taken["snapshots"][0]["layer"], odd(&images, ".live.qcow2").1);
    let (clone, clone_text) = odd(&images, ".clone");
    server.ask_ok(["disk", "add", &format!("path={text},at=s1,clone={clone_text},name=clone")]);
    // What was added is saved, and found again.
    let server = Server::start_in(server.crash(), &["--config", &config, "--nbd", &nbd]);
    let status: Value = serde_json::from_str(&server.ask_ok(["status", "--json"])).unwrap();
    assert_eq!(status["disks"][1]["path"], clone_text);
    assert!(server.stop().success());
    reads(&clone, 1);
    reads(&disk, 4);
    assert_clean(&disk);
}
