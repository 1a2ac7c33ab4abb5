//! `vmstrata convert`, from whole processes: files, pipes, devices, exports, descriptions, interruptions.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::killed::{calls, killed_at, some_of};
use crate::support::loop_device::LoopDevice;
use crate::support::server::Server;
use crate::support::{
    Holder, Images, assert_clean, run, run_err, run_json, run_ok, stderr, tool, tool_json, tool_ok, vmstrata,
    wait_until,
};

/// A chain of two layers, and a snapshot's worth of data in each.
fn chain(images: &Images) -> String {
    images.create("base.qcow2", &["40M"]);
    images.write_layer("base.qcow2", &["write -P 1 0 4M", "write -P 2 16M 1M"]);
    images.create("web.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    images.write_layer("web.qcow2", &["write -P 3 1M 128k", "write -z 16M 64k", "write -P 4 39M 1M"]);
    images.name("web.qcow2")
}

fn assert_same(one: &str, other: &str) {
    tool_ok("qemu-img", ["compare", "-q", one, other]);
}

fn info(image: &str) -> serde_json::Value {
    tool_json("qemu-img", ["info", "--output=json", image])
}

#[test]
fn the_name_says_what_is_made_and_options_shape_it() {
    let images = Images::new();
    let web = chain(&images);
    let [raw, packed, fine] = ["web.raw", "packed.qcow2", "fine"].map(|name| images.name(name));
    let done = run_json(["convert", &web, &raw, "--json", "--verify"]);
    assert_eq!((&done["format"], &done["verified"]), (&"raw".into(), &true.into()));
    assert_eq!(
        (&done["disk-bytes"], &done["data-bytes"]),
        (&(40 << 20).into(), &((5 << 20) + (15 << 16)).into())
    );
    assert_eq!(fs::metadata(&raw).unwrap().len(), 40 << 20);
    assert_same(&web, &raw);
    assert!(
        run_ok(["convert", &raw, &packed, "--compress", "zstd", "--from", "raw"]).contains("made, qcow2")
    );
    assert_eq!(info(&packed)["format-specific"]["data"]["compression-type"], "zstd");
    assert!(fs::metadata(&packed).unwrap().len() < 1 << 20, "it is compressed");
    let shape = ["--to", "qcow2", "--cluster-size", "128K", "--subclusters", "--no-sync"];
    run_ok([&["convert", &*web, &*fine][..], &shape].concat());
    let found = info(&fine);
    assert_eq!(found["cluster-size"], 128 << 10);
    assert_eq!(found["format-specific"]["data"]["extended-l2"], true);
    assert!(found["backing-filename"].is_null(), "it is flat");
    for image in [&packed, &fine] {
        assert_clean(Path::new(image));
        assert_same(&web, image);
    }
}

#[test]
fn what_is_there_is_replaced_only_if_asked_and_a_dry_run_makes_nothing() {
    let images = Images::new();
    let (web, copy) = (chain(&images), images.name("copy.qcow2"));
    let before = images.files();
    let planned = run_json(["convert", &web, &copy, "--dry-run", "--json"]);
    assert_eq!(
        (&planned["dry-run"], &planned["data-bytes"]),
        (&true.into(), &((5 << 20) + (15 << 16)).into())
    );
    assert_eq!(images.files(), before);
    fs::write(&copy, "precious").unwrap();
    assert!(run_err(1, ["convert", &web, &copy]).contains("copy.qcow2: exists already; --force"));
    assert_eq!(fs::read(&copy).unwrap(), b"precious");
    run_ok(["convert", &web, &copy, "--force"]);
    assert_same(&web, &copy);
    let refused = run_err(1, ["convert", &web, &images.name("base.qcow2"), "--force"]);
    assert!(refused.contains("is a file of the disk that is copied"), "{refused}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let images = Images::new();
    let (web, raw) = (chain(&images), images.name("x.raw"));
    for (args, said) in [
        (&["--compress", "zlib"][..], "not compressed"),
        (&["--cluster-size", "4K"], "has no clusters"),
        (&["--keep-backing"], "no backing file"),
        (&["--to", "qcow2", "--cluster-size", "3000"], "power of two"),
        (&["--to", "qcow2", "--cluster-size", "4K", "--subclusters"], "too small for subclusters"),
    ] {
        let refused = run_err(1, [&["convert", &*web, &*raw], args].concat());
        assert!(refused.contains(said), "{args:?}: {refused}");
    }
    let base = images.name("base.qcow2");
    assert!(
        run_err(1, ["convert", &base, &raw, "--to", "qcow2", "--keep-backing"]).contains("no backing file")
    );
    assert!(run_err(1, ["convert", &web, "-", "--to", "qcow2"]).contains("only a file holds an image"));
    assert!(run_err(1, ["convert", &web, "-", "--verify"]).contains("cannot be read again"));
    assert!(run_err(1, ["convert", "-", &raw, "--from", "qcow2"]).contains("is a raw disk"));
    run_err(64, ["convert", &web, &raw, "--verify", "--no-sync"]);
    assert!(!Path::new(&raw).exists());
}

#[test]
fn a_disk_in_use_is_converted_by_its_snapshot() {
    let images = Images::new();
    let web = chain(&images);
    let copy = images.name("copy.qcow2");
    let (disk, nbd) = (format!("path={web},name=web"), format!("unix:{}", images.name("nbd.sock")));
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    server.ask_ok(["snapshot", "create", &web, "--name", "mon"]);
    let refused = run_err(1, ["convert", &web, &copy]);
    assert!(refused.contains("take a snapshot and use that"), "{refused}");
    run_ok(["convert", &format!("{web}@mon"), &copy]);
    assert_same(&images.name("web.mon.qcow2"), &copy);
}

#[test]
fn the_backing_file_is_kept_by_a_name_that_leads_to_it() {
    let images = Images::new();
    let web = chain(&images);
    fs::create_dir(images.path("sub")).unwrap();
    let [beside, elsewhere] = ["beside.qcow2", "sub/elsewhere.qcow2"].map(|name| images.name(name));
    for copy in [&beside, &elsewhere] {
        let done = run_json(["convert", &web, copy, "--keep-backing", "--json", "--verify"]);
        assert_eq!(done["data-bytes"], 18 << 16, "only its own");
        assert_clean(Path::new(copy));
        assert_same(&web, copy);
        assert_eq!(info(copy)["backing-filename-format"], "qcow2");
    }
    assert_eq!(info(&beside)["backing-filename"], "base.qcow2");
    let absolute = images.path("base.qcow2").canonicalize().unwrap();
    assert_eq!(info(&elsewhere)["backing-filename"], absolute.to_str().unwrap());
}

#[test]
fn pipes_carry_raw_disks() {
    let images = Images::new();
    let web = chain(&images);
    let [raw, copy] = ["web.raw", "copy.qcow2"].map(|name| images.name(name));
    run_ok(["convert", &web, &raw]);
    let piped = run(["convert", &web, "-", "--json"]);
    assert!(piped.status.success() && piped.stdout == fs::read(&raw).unwrap(), "{}", stderr(&piped));
    let result: serde_json::Value = serde_json::from_str(&stderr(&piped)).expect("JSON on stderr");
    assert_eq!(result["disk-bytes"], 40 << 20);
    let mut child = vmstrata().args(["convert", "-", &copy, "-q"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&piped.stdout).unwrap();
    assert!(child.wait().unwrap().success());
    assert_clean(Path::new(&copy));
    assert_same(&web, &copy);
    // A reader that goes away is a failure.
    let mut child = vmstrata()
        .args(["convert", &web, "-"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("write the disk"), "{}", stderr(&output));
}

#[test]
fn waiting_for_input_ends_when_asked_to() {
    let images = Images::new();
    let copy = images.name("copy.qcow2");
    let mut child =
        vmstrata().args(["convert", "-", &copy]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&[1; 4096]).unwrap();
    wait_until("the draft is there", || writes_unseen(&child, &images));
    tool_ok("kill", ["-INT", &child.id().to_string()]);
    assert_eq!(child.wait().unwrap().code(), Some(1));
    drop(input);
    assert_eq!(images.files(), [""; 0]);
}

/// Whether the process has a file open in the images' directory that has no name.
fn writes_unseen(child: &Child, images: &Images) -> bool {
    let Ok(open) = fs::read_dir(format!("/proc/{}/fd", child.id())) else { return false };
    let mut files = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    files.any(|file| file.starts_with(images.path("")) && file.to_string_lossy().ends_with(" (deleted)"))
}

/// A stock server of one raw file.
struct Export {
    child: Child,
    uri: String,
}

impl Export {
    fn of(images: &Images, file: &str, options: &[&str]) -> Self {
        let socket = format!("{file}.sock");
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-f", "raw", "-x", "web", "-k", &images.name(&socket)]).args(options);
        let child = command.arg(images.name(file)).spawn().unwrap();
        wait_until("it listens", || images.path(&socket).exists());
        Self { child, uri: format!("nbd+unix:///web?socket={}", images.name(&socket)) }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn exports_are_read_and_overwritten() {
    let images = Images::new();
    let web = chain(&images);
    fs::write(images.path("far.raw"), vec![0xee; 48 << 20]).unwrap();
    let far = Export::of(&images, "far.raw", &[]);
    assert!(run_err(1, ["convert", &web, &far.uri]).contains("all that is on it will be lost"));
    let done = run_json(["convert", &web, &far.uri, "--force", "--verify", "--json"]);
    assert_eq!(done["verified"], true);
    let written = fs::read(images.path("far.raw")).unwrap();
    let raw = images.name("web.raw");
    run_ok(["convert", &web, &raw]);
    assert!(written[..40 << 20] == fs::read(&raw).unwrap());
    assert!(written[40 << 20..] == vec![0xee; 8 << 20], "past the disk's end");
    drop(far);
    let near = Export::of(&images, "web.raw", &["-r", "-e", "4"]);
    let copy = images.name("copy.qcow2");
    run_ok(["convert", &near.uri, &copy, "--compress", "zlib", "--verify"]);
    assert_clean(Path::new(&copy));
    assert_same(&web, &copy);
    fs::File::create(images.path("small.raw")).unwrap().set_len(39 << 20).unwrap();
    let small = Export::of(&images, "small.raw", &[]);
    let refused = run_err(1, ["convert", &web, &small.uri, "--force"]);
    assert!(refused.contains("40894464 bytes, and the disk 41943040"), "{refused}");
}

#[test]
fn devices_are_read_and_overwritten() {
    let images = Images::new();
    let web = chain(&images);
    let file = images.path("device");
    fs::write(&file, vec![0xee; 48 << 20]).unwrap();
    let Some(device) = LoopDevice::over(&file) else {
        eprintln!("not tested: devices need root and loop devices");
        return;
    };
    assert!(run_err(1, ["convert", &web, &device.0]).contains("all that is on it will be lost"));
    assert!(run_err(1, ["convert", &web, &device.0, "--force", "--to", "qcow2"]).contains("only a file"));
    run_ok(["convert", &web, &device.0, "--force", "--verify"]);
    let written = fs::read(&file).unwrap();
    assert!(written[40 << 20..] == vec![0xee; 8 << 20], "past the disk's end");
    let [part, copy] = ["part.qcow2", "copy.qcow2"].map(|name| images.name(name));
    run_ok(["convert", &device.0, &copy, "--from", "raw", "--verify"]);
    // What is called by a description is a part of it.
    let described = format!(
        r#"json:{{"driver":"raw","offset":0,"size":{},"file":{{"driver":"file","filename":"{}"}}}}"#,
        40 << 20,
        file.display()
    );
    run_ok(["convert", &described, &part, "--verify"]);
    for image in [&part, &copy] {
        assert_clean(Path::new(image));
    }
    assert_same(&web, &part);
    tool_ok("qemu-img", ["compare", "-q", "-f", "raw", file.to_str().unwrap(), &copy]);
}

#[test]
fn descriptions_name_what_stock_tools_name_by_them() {
    let images = Images::new();
    let web = chain(&images);
    let [copy, inner] = ["copy.qcow2", "inner.qcow2"].map(|name| images.name(name));
    let described = format!(r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{web}"}}}}"#);
    run_ok(["convert", &described, &copy, "--verify"]);
    assert_same(&web, &copy);
    fs::write(images.path("whole"), [vec![1; 1 << 20], vec![2; 3 << 20], vec![3; 1 << 20]].concat()).unwrap();
    let part = format!(
        r#"json:{{"driver":"raw","offset":1048576,"size":3145728,"file":{{"driver":"file","filename":"{}"}}}}"#,
        images.name("whole")
    );
    run_ok(["convert", &part, &inner, "--verify"]);
    assert_same(&part, &inner);
    let other = r#"json:{"driver":"qcow2","file":{"driver":"ssh","path":"x"}}"#;
    assert!(run_err(1, ["convert", other, &images.name("x")]).contains("\"ssh\""));
}

#[test]
fn a_copy_is_for_those_who_may_use_the_disk() {
    let images = Images::new();
    let web = chain(&images);
    let mode = |name: &str| fs::metadata(images.path(name)).unwrap().mode() & 0o777;
    for (number, (of_disk, of_copy)) in
        [(0o640, 0o640), (0o444, 0o644), (0o600, 0o600)].into_iter().enumerate()
    {
        fs::set_permissions(&web, fs::Permissions::from_mode(of_disk)).unwrap();
        let copy = format!("{number}.raw");
        run_ok(["convert", &web, &images.name(&copy)]);
        assert_eq!(mode(&copy), of_copy);
    }
    fs::set_permissions(&web, fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(images.path("0.raw"), fs::Permissions::from_mode(0o666)).unwrap();
    run_ok(["convert", &web, &images.name("0.raw"), "--force"]);
    assert_eq!(mode("0.raw"), 0o666, "it is the old file's when that is replaced");
    let piped = vmstrata().args(["convert", "-", &images.name("piped.raw")]).stdin(Stdio::null()).status();
    assert!(piped.unwrap().success());
    assert_eq!((mode("piped.raw"), fs::metadata(images.path("piped.raw")).unwrap().len()), (0o600, 0));
}

#[test]
fn a_long_chain_becomes_one_file() {
    let images = Images::new();
    let top = images.long_chain(300);
    let [raw, image] = ["flat.raw", "flat.qcow2"].map(|name| images.name(name));
    let top = top.to_str().unwrap();
    run_ok(["convert", top, &raw]);
    run_ok(["convert", top, &image]);
    assert_clean(Path::new(&image));
    assert_same(top, &raw);
    assert_same(&raw, &image);
}

#[test]
fn a_conversion_killed_at_any_step_leaves_nothing_or_all_of_it() {
    let images = Images::new();
    let (web, copy) = (chain(&images), images.name("copy.qcow2"));
    for compress in ["none", "zstd"] {
        let convert = ["convert", &web, &copy, "--quiet", "--compress", compress];
        let steps = some_of(calls(&convert), 15);
        let mut whole = 0;
        for call in &steps {
            fs::remove_file(&copy).unwrap_or_default();
            killed_at(call, &convert);
            if Path::new(&copy).exists() {
                whole += 1;
                assert_clean(Path::new(&copy));
                assert_same(&web, &copy);
            }
        }
        assert!(whole < steps.len(), "killed before it was named");
        fs::remove_file(&copy).unwrap_or_default();
        assert!(images.files().iter().all(|name| !name.contains("copy")), "{:?}", images.files());
    }
}

#[test]
fn a_conversion_killed_while_it_replaces_leaves_the_old_or_the_new() {
    let images = Images::new();
    let (web, copy) = (chain(&images), images.name("copy.qcow2"));
    let replace = ["convert", &web, &copy, "--force", "--quiet"];
    run_ok(["create", &copy, "1M"]);
    let mut seen = [0; 2];
    for call in some_of(calls(&replace), 10) {
        run_ok(["create", &copy, "1M", "--force"]);
        killed_at(&call, &replace);
        assert_clean(Path::new(&copy));
        let is_new = tool("qemu-img", ["compare", "-q", &web, &copy]).status.success();
        assert!(is_new || info(&copy)["virtual-size"] == 1 << 20);
        seen[usize::from(is_new)] += 1;
    }
    assert!(seen.iter().all(|times| *times > 0), "killed before and after: {seen:?}");
}

#[test]
fn an_image_that_another_program_writes_is_refused() {
    let images = Images::new();
    let web = chain(&images);
    let holder = Holder::open(Path::new(&web), false);
    let copy = images.name("copy.raw");
    assert!(run_err(1, ["convert", &web, &copy]).contains("take a snapshot"));
    holder.close();
    run_ok(["convert", &web, &copy]);
    assert!(fs::metadata(&copy).unwrap().blocks() * 512 < 8 << 20);
}
