//! `vmstrata create` as stock tools see its images.

use crate::support;
use std::fs;
use std::path::Path;

use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool_json, tool_ok};
use serde_json::Value;

fn qemu_info(path: &Path) -> Value {
    tool_json("qemu-img", ["info", "--output=json", path.to_str().unwrap()])
}

/// Data written through the new image by stock tools reads back, and the image stays clean.
fn assert_usable(path: &Path) {
    let path_text = path.to_str().unwrap();
    for command in ["write -P 7 64k 128k", "read -P 7 64k 128k"] {
        let said = tool_ok("qemu-io", ["-c", command, path_text]);
        assert!(!said.contains("failed"), "{said}");
    }
    assert_clean(path);
}

#[test]
fn every_option_is_what_qemu_img_finds_in_the_image() {
    let images = Images::new();
    for (args, keys) in [
        (&[][..], &[("compat", "1.1"), ("refcount-bits", "16"), ("compression-type", "zlib")][..]),
        (&["--format-version", "2"], &[("compat", "0.10"), ("refcount-bits", "16")]),
        (&["--refcount-bits", "1"], &[("refcount-bits", "1")]),
        (&["--refcount-bits", "64"], &[("refcount-bits", "64")]),
        (&["--lazy-refcounts"], &[("lazy-refcounts", "true")]),
        (&["--compression", "zstd"], &[("compression-type", "zstd")]),
        (&["--subclusters"], &[("extended-l2", "true")]),
        (&["--cluster-size", "512"], &[]),
        (&["--cluster-size", "2M"], &[]),
    ] {
        let path = images.path("a.qcow2");
        run_ok([&["create", "--force", path.to_str().unwrap(), "40M"], args].concat());
        assert_clean(&path);
        let info = qemu_info(&path);
        assert_eq!(info["virtual-size"], 40 << 20);
        for (key, value) in keys {
            let found = &info["format-specific"]["data"][key];
            assert_eq!(
                found.as_str().map_or_else(|| found.to_string(), str::to_owned),
                *value,
                "{key}: {info:#}"
            );
        }
        if let [option, size] = args
            && *option == "--cluster-size"
        {
            assert_eq!(info["cluster-size"], if *size == "512" { 512 } else { 2 << 20 });
        }
        assert_usable(&path);
    }
}

#[test]
fn sizes_have_suffixes_and_huge_disks_are_small_files() {
    let images = Images::new();
    for (text, bytes) in [("1M", 1_u64 << 20), ("513", 513_u64.next_multiple_of(512)), ("8T", 8 << 40)] {
        let path = images.path(text);
        run_ok(["create", path.to_str().unwrap(), text]);
        assert_eq!(qemu_info(&path)["virtual-size"], bytes, "{text}");
        assert!(fs::metadata(&path).unwrap().len() < 4 << 20, "{text}");
        assert_clean(&path);
    }
}

#[test]
fn size_and_format_come_from_the_backing_file() {
    let images = Images::new();
    images.create("base.qcow2", &["24M"]);
    images.write_layer("base.qcow2", &["write -P 5 1M 64k"]);
    tool_ok("qemu-img", ["create", "-q", "-f", "raw", &images.name("base.raw"), "9M"]);
    for (base, format, size) in [("base.qcow2", "qcow2", 24 << 20), ("base.raw", "raw", 9 << 20)] {
        let path = images.path(&format!("on-{format}.qcow2"));
        run_ok(["create", path.to_str().unwrap(), "--backing", base]);
        let info = qemu_info(&path);
        assert_eq!(info["virtual-size"], size);
        assert_eq!(info["backing-filename"], base, "stored as given");
        assert_eq!(info["backing-filename-format"], format);
        assert_usable(&path);
    }
    let on_qcow2 = images.name("on-qcow2.qcow2");
    let said = tool_ok("qemu-io", ["-c", "read -P 5 1M 64k", &on_qcow2]);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn a_backing_file_elsewhere_can_be_named_absolutely() {
    let (images, elsewhere) = (Images::new(), Images::new());
    elsewhere.create("base.qcow2", &["16M"]);
    let path = images.path("a.qcow2");
    let args = ["create", path.to_str().unwrap(), "32M", "-b", &elsewhere.name("base.qcow2"), "-F", "qcow2"];
    let made = run_json([&args[..], &["--json"]].concat());
    assert_eq!(made["virtual-size"], 32 << 20);
    assert_eq!(made["filename"], path.to_str().unwrap());
    assert_eq!(qemu_info(&path)["full-backing-filename"], elsewhere.name("base.qcow2"));
}

#[test]
fn a_file_that_exists_is_kept_unless_forced() {
    let images = Images::new();
    let path = images.path("precious");
    fs::write(&path, "precious").unwrap();
    let message = run_err(1, ["create", path.to_str().unwrap(), "1M"]);
    assert!(message.contains("exists") && message.contains("--force"), "{message}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    run_ok(["create", path.to_str().unwrap(), "1M", "--force"]);
    assert_clean(&path);
}

#[test]
fn what_cannot_be_made_leaves_nothing_behind() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    let target = images.name("a.qcow2");
    for (args, part) in [
        (&["1M", "--cluster-size", "256"][..], "cluster"),
        (&["1M", "--cluster-size", "60K"], "cluster"),
        (&["1M", "--refcount-bits", "12"], "refcount"),
        (&["1M", "--cluster-size", "8K", "--subclusters"], "too small for subclusters"),
        (&["1M", "--format-version", "2", "--subclusters"], "cannot have subclusters"),
        (&["1M", "--format-version", "2", "--lazy-refcounts"], "lazy refcounts"),
        (&["1M", "--format-version", "2", "--compression", "zstd"], "zlib"),
        (&["1E", "--cluster-size", "512"], "too large"),
        (&["-b", "absent.qcow2"], "absent.qcow2"),
        (&["-b", "json:{}"], "not supported"),
        (&["-b", "a.qcow2"], "No such file"),
    ] {
        let message = run_err(1, [&["create", &target], args].concat());
        assert!(message.contains(part), "{args:?}: {message}");
        assert_eq!(fs::read_dir(images.path("")).unwrap().count(), 1, "{args:?} left something");
    }
}

#[test]
fn an_image_cannot_replace_a_layer_below_itself() {
    let images = Images::new();
    images.create("base.qcow2", &["16M"]);
    images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let before = fs::read(images.path("base.qcow2")).unwrap();
    let message = run_err(1, ["create", &images.name("base.qcow2"), "-b", "top.qcow2", "--force"]);
    assert!(message.contains("base.qcow2") && message.contains("stands on it"), "{message}");
    assert_eq!(fs::read(images.path("base.qcow2")).unwrap(), before);
}

#[test]
fn a_file_in_use_is_not_replaced() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    let before = fs::read(&path).unwrap();
    let user = support::Holder::open(&path, false);
    let message = run_err(1, ["create", path.to_str().unwrap(), "1M", "--force"]);
    assert!(message.contains("in use"), "{message}");
    user.close();
    assert_eq!(fs::read(&path).unwrap(), before);
}
