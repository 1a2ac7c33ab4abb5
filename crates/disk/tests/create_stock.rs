//! New images: stock tools find them flawless, and under their name there is a whole image or what was there before.

use std::fs::OpenOptions;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::check_support::*;
use crate::common::stock::User;
use vmstrata_disk::{CreateOptions, ErrorKind, Format, create};
use vmstrata_qcow2::{CompressionType, RefcountOrder};
use vmstrata_types::ClusterBits;

const GIB: u64 = 1 << 30;

fn sized(size: u64) -> CreateOptions {
    CreateOptions { size: Some(size), ..CreateOptions::default() }
}

fn info(path: &Path) -> serde_json::Value {
    let output = run("qemu-img", &["info", "--output=json", path.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn files_in(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn every_shape_is_flawless_and_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    for bits in [9, 12, 16, 21] {
        for order in [0, 4, 6] {
            for (version, lazy, zstd) in [(2, false, false), (3, true, false), (3, false, true)] {
                if version == 2 && order != 4 {
                    continue;
                }
                let path = dir.path().join(format!("{bits}-{order}-{version}-{lazy}-{zstd}.qcow2"));
                let subclusters = version == 3 && bits >= 14;
                let options = CreateOptions {
                    cluster_bits: ClusterBits::new(bits).unwrap(),
                    subclusters,
                    refcount_order: RefcountOrder::new(order).unwrap(),
                    version,
                    lazy_refcounts: lazy,
                    compression: if zstd { CompressionType::Zstd } else { CompressionType::Zlib },
                    ..sized(20 << 20)
                };
                create(&path, &options).unwrap();
                assert!(agree(&path, "new").is_clean());
                let info = info(&path);
                let data = &info["format-specific"]["data"];
                assert_eq!(info["virtual-size"], 20 << 20);
                assert_eq!(info["cluster-size"], 1 << bits);
                assert_eq!(data["compat"], if version == 2 { "0.10" } else { "1.1" });
                if version == 3 {
                    assert_eq!(data["refcount-bits"], 1 << order);
                    assert_eq!(data["lazy-refcounts"], lazy);
                    assert_eq!(data["extended-l2"], subclusters);
                }
                assert_eq!(data["compression-type"], if zstd { "zstd" } else { "zlib" });
                qemu_io(&path, &["write -P 9 1M 3M", "read -P 9 1M 3M", "read -P 0 0 1M"]);
                assert_eq!(stock_rc(&path), Some(0));
            }
        }
    }
}

#[test]
fn an_overlay_takes_size_and_content_from_its_backing_file() {
    let dir = tempfile::tempdir().unwrap();
    let (base, middle, top) = ("base.raw", "middle.qcow2", "top.qcow2");
    std::fs::write(dir.path().join(base), vec![7; (3 << 20) + 100]).unwrap();
    let on = |name: &str, format| CreateOptions {
        backing: Some((PathBuf::from(name), format)),
        ..CreateOptions::default()
    };
    create(&dir.path().join(middle), &on(base, Format::Raw)).unwrap();
    let absolute = dir.path().join(middle);
    create(&dir.path().join(top), &on(absolute.to_str().unwrap(), Format::Qcow2)).unwrap();
    let middle_info = info(&dir.path().join(middle));
    assert_eq!(middle_info["virtual-size"], (3 << 20) + 512, "whole sectors");
    assert_eq!(
        (&middle_info["backing-filename"], &middle_info["backing-filename-format"]),
        (&base.into(), &"raw".into())
    );
    let top_info = info(&dir.path().join(top));
    assert_eq!(top_info["virtual-size"], (3 << 20) + 512);
    assert_eq!(top_info["backing-filename"], absolute.to_str().unwrap());
    qemu_io(&dir.path().join(top), &["read -P 7 0 3M"]);
}

#[test]
fn a_backing_file_that_is_not_there_or_not_of_its_format_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("raw"), vec![0; 4096]).unwrap();
    let path = dir.path().join("new.qcow2");
    for (name, format, part) in [
        ("missing", Format::Qcow2, "missing"),
        ("missing", Format::Raw, "missing"),
        ("raw", Format::Qcow2, "not a qcow2 image"),
        ("nbd://host/x", Format::Raw, "not supported"),
        ("json:{}", Format::Qcow2, "not supported"),
        (".", Format::Raw, "directory"),
    ] {
        let options = CreateOptions { backing: Some((name.into(), format)), ..sized(GIB) };
        let error = create(&path, &options).unwrap_err().to_string();
        assert!(error.contains(part), "{name}: {error}");
        assert_eq!(files_in(dir.path()), 1, "{name} left something behind");
    }
}

#[test]
fn what_is_there_is_replaced_only_when_forced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    std::fs::write(&path, b"precious").unwrap();
    let error = create(&path, &sized(GIB)).unwrap_err();
    assert!(error.to_string().contains("disk.qcow2") && error.to_string().contains("exists"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    create(&path, &CreateOptions { force: true, ..sized(GIB) }).unwrap();
    assert_eq!(stock_rc(&path), Some(0));
    assert_eq!(files_in(dir.path()), 1);
}

#[test]
fn dangling_links_count_as_being_there_and_forced_are_replaced_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("link");
    symlink("nowhere", &path).unwrap();
    create(&path, &sized(GIB)).unwrap_err();
    create(&path, &CreateOptions { force: true, ..sized(GIB) }).unwrap();
    assert!(path.symlink_metadata().unwrap().is_file() && files_in(dir.path()) == 1);
}

#[test]
fn a_file_in_use_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    create(&path, &sized(GIB)).unwrap();
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
    let before = inode(&path);
    let writer = User::writing(&path);
    let forced = CreateOptions { force: true, ..sized(GIB) };
    let error = create(&path, &forced).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    drop(writer);
    assert_eq!(inode(&path), before);
    create(&path, &forced).unwrap();
    assert_ne!(inode(&path), before);
}

#[test]
fn an_image_is_not_put_in_the_place_of_its_own_base() {
    let dir = tempfile::tempdir().unwrap();
    let [base, overlay] = ["base.qcow2", "overlay.qcow2"].map(|name| dir.path().join(name));
    create(&base, &sized(GIB)).unwrap();
    let on = |below: &Path| CreateOptions {
        backing: Some((below.to_owned(), Format::Qcow2)),
        force: true,
        ..CreateOptions::default()
    };
    let error = create(&base, &on(&base)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Loop { .. }), "{error}");
    create(&overlay, &on(&base)).unwrap();
    for below in [&base, &overlay] {
        let error = create(&base, &on(below)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::StoodOn { .. }), "{error}");
    }
    create(&overlay, &on(&base)).unwrap();
    // One that stock tools made elsewhere, of which nothing is known here.
    let elsewhere = tempfile::tempdir().unwrap();
    let stock = elsewhere.path().join("stock.qcow2");
    std::fs::remove_file(&overlay).unwrap();
    run(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            base.to_str().unwrap(),
            stock.to_str().unwrap(),
        ],
    );
    let error = create(&base, &on(&stock)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Loop { .. }), "{error}");
    create(&overlay, &on(&base)).unwrap();
    qemu_io(&overlay, &["read -P 0 0 1M"]);
}

#[test]
fn impossible_options_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.qcow2");
    for options in [
        CreateOptions::default(),
        CreateOptions { version: 4, ..sized(GIB) },
        CreateOptions { version: 2, lazy_refcounts: true, ..sized(GIB) },
        CreateOptions { cluster_bits: ClusterBits::MIN, ..sized(1 << 40) },
        CreateOptions { force: true, ..CreateOptions::default() },
    ] {
        create(&path, &options).unwrap_err();
        assert_eq!(files_in(dir.path()), 0, "{options:?}");
    }
    create(&dir.path().join("no/such/directory"), &sized(GIB)).unwrap_err();
    create(Path::new("/"), &sized(GIB)).unwrap_err();
}

#[test]
fn a_full_file_system_leaves_the_old_file_alone() {
    let full = Path::new("/dev/full");
    let error = create(full, &CreateOptions { force: true, ..sized(GIB) }).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
    // Limits on the size of files stand in for a full file system: the child may write 64 KiB.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    std::fs::write(&path, b"precious").unwrap();
    if let Some(target) = std::env::var_os("CREATE_UNDER_LIMIT") {
        let error = create(Path::new(&target), &CreateOptions { force: true, ..sized(GIB) }).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
        return;
    }
    let child = std::process::Command::new("sh")
        .arg("-c")
        .arg("trap '' XFSZ; ulimit -f 128; exec \"$0\" --exact create_stock::a_full_file_system_leaves_the_old_file_alone")
        .arg(std::env::current_exe().unwrap())
        .env("CREATE_UNDER_LIMIT", &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert_eq!(files_in(dir.path()), 1);
}

#[test]
fn the_new_image_can_be_read_by_all_as_the_umask_says() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    create(&path, &sized(GIB)).unwrap();
    let plain = dir.path().join("plain");
    OpenOptions::new().write(true).create_new(true).open(&plain).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), mode(&plain) & 0o644);
}
