//! `vmstrata info` against `qemu-img info` of the same images.

use std::path::Path;

use crate::support::{Holder, Images, run_err, run_json, run_ok, tool, tool_json, tool_ok};
use serde_json::Value;

/// What both tools must agree on, of an object that either printed.
const SHARED: [&str; 7] = [
    "virtual-size",
    "actual-size",
    "cluster-size",
    "format",
    "dirty-flag",
    "backing-filename",
    "backing-filename-format",
];

fn qemu_info(path: &Path) -> Value {
    tool_json("qemu-img", ["info", "-U", "--output=json", path.to_str().unwrap()])
}

fn assert_same_info(path: &Path) {
    let (ours, theirs) = (run_json(["info", "--json", path.to_str().unwrap()]), qemu_info(path));
    for key in SHARED {
        assert_eq!(ours[key], theirs[key], "{key} of {}\nours: {ours:#}\nstock: {theirs:#}", path.display());
    }
    assert_eq!(ours["format-specific"], theirs["format-specific"], "{}", path.display());
}

#[test]
fn features_of_every_kind_of_image_are_what_qemu_img_says() {
    let images = Images::new();
    for (name, options) in [
        ("plain.qcow2", "compat=1.1"),
        ("old.qcow2", "compat=0.10"),
        ("small.qcow2", "cluster_size=512"),
        ("large.qcow2", "cluster_size=2M,refcount_bits=64"),
        ("one-bit.qcow2", "refcount_bits=1"),
        ("lazy.qcow2", "lazy_refcounts=on"),
        ("zstd.qcow2", "compression_type=zstd"),
        ("full.qcow2", "preallocation=metadata"),
    ] {
        assert_same_info(&images.create(name, &["-o", options, "40M"]));
    }
}

#[test]
fn backing_names_are_shown_as_stored_and_as_found() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    let relative = images.create("relative.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let absolute = images.create("absolute.qcow2", &["-b", &images.name("base.qcow2"), "-F", "qcow2"]);
    for path in [relative, absolute] {
        assert_same_info(&path);
        let info = run_json(["info", "--json", path.to_str().unwrap()]);
        assert_eq!(info["full-backing-filename"], images.name("base.qcow2"));
    }
}

#[test]
fn a_raw_file_is_its_own_disk() {
    let images = Images::new();
    tool_ok("qemu-img", ["create", "-q", "-f", "raw", &images.name("a.raw"), "3M"]);
    let (ours, theirs) =
        (run_json(["info", "--json", &images.name("a.raw")]), qemu_info(&images.path("a.raw")));
    assert_eq!(ours["virtual-size"], theirs["virtual-size"]);
    assert_eq!(ours["format"], "raw");
    assert_eq!(ours["chain"]["layers"], 1);
}

#[test]
fn a_qcow2_header_in_a_raw_disk_is_data_when_the_user_says_so() {
    let images = Images::new();
    images.create("guest.raw", &["16M"]);
    assert_eq!(run_json(["info", "--json", "-f", "raw", &images.name("guest.raw")])["format"], "raw");
    assert_eq!(run_json(["info", "--json", &images.name("guest.raw")])["format"], "qcow2");
}

#[test]
fn snapshots_are_listed() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    for name in ["before", "after upgrade"] {
        tool_ok("qemu-img", ["snapshot", "-c", name, path.to_str().unwrap()]);
    }
    let (ours, theirs) = (run_json(["info", "--json", path.to_str().unwrap()]), qemu_info(&path));
    let (ours, theirs) =
        (ours["snapshots"].as_array().unwrap().clone(), theirs["snapshots"].as_array().unwrap().clone());
    assert_eq!(ours.len(), 2);
    for (ours, theirs) in ours.iter().zip(&theirs) {
        for key in ["id", "name", "vm-state-size", "date-sec"] {
            assert_eq!(ours[key], theirs[key], "{key}");
        }
        assert_eq!(ours["disk-size"], 16 << 20);
    }
    assert!(
        run_ok(["info", path.to_str().unwrap()])
            .contains("snapshot:       2 after upgrade of a disk of 16 MiB")
    );
}

#[test]
fn a_dirty_image_says_so() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["-o", "lazy_refcounts=on", "16M"]);
    // qemu-io that aborts leaves what a crash leaves.
    tool("qemu-io", ["-c", "write 0 64k", "-c", "abort", path.to_str().unwrap()]);
    assert_eq!(qemu_info(&path)["dirty-flag"], true, "the fixture is not dirty");
    assert_same_info(&path);
    assert!(run_ok(["info", path.to_str().unwrap()]).contains("state:          dirty"));
}

#[test]
fn a_chain_of_300_layers_is_summed_up_and_listed_when_asked() {
    let images = Images::new();
    let top = images.long_chain(300);
    let text = run_ok(["info", top.to_str().unwrap()]);
    assert!(text.contains("chain:          300 layers"), "{text}");
    assert!(text.contains("... 298 more"), "{text}");
    assert!(text.lines().count() < 20, "{text}");

    let ours = run_json(["info", "--json", "--chain", top.to_str().unwrap()]);
    let theirs = tool_json("qemu-img", ["info", "--backing-chain", "--output=json", top.to_str().unwrap()]);
    let (ours, theirs) = (ours["layers"].as_array().unwrap(), theirs.as_array().unwrap());
    assert_eq!(ours.len(), 300);
    for (at, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        for key in SHARED {
            assert_eq!(ours[key], theirs[key], "{key} of layer {at} from the top");
        }
        assert_eq!(ours["layer"], 299 - at);
    }
    assert_eq!(run_ok(["info", "--chain", top.to_str().unwrap()]).matches(".qcow2\n").count(), 301);
}

#[test]
fn a_disk_in_use_can_be_looked_at() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let user = Holder::open(&path, false);
    let info = run_json(["info", "--json", path.to_str().unwrap()]);
    user.close();
    assert_eq!(info["virtual-size"], 16 << 20);
}

#[test]
fn chains_that_cannot_be_followed_say_where_they_break() {
    let images = Images::new();
    let size = "16M";
    images.create("orphan.qcow2", &["-u", "-b", "gone.qcow2", "-F", "qcow2", size]);
    images.create("self.qcow2", &["-u", "-b", "self.qcow2", "-F", "qcow2", size]);
    images.create("one.qcow2", &["-u", "-b", "two.qcow2", "-F", "qcow2", size]);
    images.create("two.qcow2", &["-u", "-b", "one.qcow2", "-F", "qcow2", size]);
    images.create("net.qcow2", &["-u", "-b", "nbd://host/export", "-F", "raw", size]);
    images.create("json.qcow2", &["-u", "-b", "json:{\"driver\":\"null-co\"}", "-F", "raw", size]);
    images.create("vmdk.qcow2", &["-u", "-b", "a.vmdk", "-F", "vmdk", size]);
    std::fs::write(images.path("a.vmdk"), "vmdk").unwrap();
    for (name, parts) in [
        ("absent.qcow2", &["absent.qcow2", "No such file"][..]),
        ("orphan.qcow2", &["gone.qcow2", "No such file"]),
        ("self.qcow2", &["self.qcow2", "names itself"]),
        ("one.qcow2", &["one.qcow2", "loops"]),
        ("net.qcow2", &["net.qcow2", "nbd://host/export", "not supported"]),
        ("json.qcow2", &["json.qcow2", "json:", "not supported"]),
        ("vmdk.qcow2", &["vmdk", "not supported"]),
    ] {
        let message = run_err(1, ["info", &images.name(name)]);
        for part in parts {
            assert!(message.contains(part), "{name}: {message}");
        }
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn a_backing_file_elsewhere_needs_the_operators_word() {
    let (images, elsewhere) = (Images::new(), Images::new());
    elsewhere.create("base.qcow2", &["16M"]);
    let path = images.create("a.qcow2", &["-b", &elsewhere.name("base.qcow2"), "-F", "qcow2"]);
    std::os::unix::fs::symlink(elsewhere.path("base.qcow2"), images.path("link.qcow2")).unwrap();
    let through_link = images.create("b.qcow2", &["-b", "link.qcow2", "-F", "qcow2"]);
    for path in [path, through_link] {
        let path = path.to_str().unwrap();
        let message = run_err(1, ["info", path]);
        assert!(
            message.contains("outside the allowed directories") && message.contains("--allow-backing"),
            "{message}"
        );
        run_ok(["info", path, "--allow-backing", &elsewhere.name("")]);
    }
}

#[test]
fn damaged_headers_name_file_field_and_offset() {
    let images = Images::new();
    for (name, at, bytes, part) in [
        ("cluster-bits", 20, &[0, 0, 0, 63][..], "cluster_bits"),
        ("version", 4, &[0, 0, 0, 9], "version"),
        ("encrypted", 32, &[0, 0, 0, 2], "crypt"),
        ("l1-size", 36, &[0xff; 4], "l1_size"),
        ("l1-at", 40, &[0xff; 8], "l1_table_offset"),
        ("refcounts-at", 48, &[0, 0, 0, 0, 0, 0, 0, 7], "refcount_table_offset"),
        ("external", 79, &[0x04], "external data file"),
        ("unknown", 72, &[0x80], "incompatible"),
        ("refcount-order", 96, &[0, 0, 0, 9], "refcount_order"),
    ] {
        let path = images.create(name, &["16M"]);
        let mut content = std::fs::read(&path).unwrap();
        content[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&path, content).unwrap();
        let message = run_err(1, ["info", path.to_str().unwrap()]);
        assert!(message.contains(name) && message.contains(part), "{name}: {message}");
    }
}

/// An image is from anyone: what it names as its backing file is shown, and nothing that a terminal obeys.
#[test]
fn names_that_an_image_has_from_others_do_nothing_to_a_terminal() {
    let images = Images::new();
    let path = images.create("web.qcow2", &["1M"]);
    let name = "a\u{1b}]0;pwned\u{7}\u{202e}\nchain fine";
    tool_ok("qemu-img", ["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", name, path.to_str().unwrap()]);
    std::fs::write(images.path(name), [0; 512]).unwrap();
    let text = run_ok(["info", path.to_str().unwrap()]);
    let shown = text.lines().find(|line| line.starts_with("backing file:")).unwrap();
    assert!(shown.ends_with("a\u{fffd}]0;pwned\u{fffd}\u{fffd}\u{fffd}chain fine (raw)"), "{shown:?}");
    assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{text:?}");
    std::fs::remove_file(images.path(name)).unwrap();
    let message = run_err(1, ["info", path.to_str().unwrap()]);
    assert!(
        message.contains("]0;pwned") && !message.contains(['\u{1b}', '\u{7}', '\u{202e}']),
        "{message:?}"
    );
}
