//! Where files lie on real file systems, made by stock tools: what is found there is what the files hold.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rand::{RngCore, SeedableRng, rngs::SmallRng};
use tempfile::TempDir;
use vmstrata_memory::filesystem::{Files, ReadDevice};
use vmstrata_memory::introspect::FileSystem;

const PAGE: u64 = 4096;

/// An image, and how often it is read.
struct Image {
    file: File,
    reads: u64,
}

impl ReadDevice for &mut Image {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Option<()> {
        self.reads += 1;
        self.file.read_exact_at(into, offset).ok()
    }
}

fn tool(name: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(name);
    let output = command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(output.status.success(), "{name} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn random(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// Files of every shape: small, large, with an uneven end, and in many pieces with holes between.
fn tree(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("empty"), []).unwrap();
    for (name, len) in [("small", 1000), ("page", 4096), ("large", 5_000_017)] {
        fs::write(dir.join(name), random(len, len as u64)).unwrap();
    }
    for number in 0..300 {
        fs::write(dir.join(format!("many-{number}")), random(2000 + number, number as u64)).unwrap();
    }
    let sparse = File::create(dir.join("sparse")).unwrap();
    for piece in 0..1200_u64 {
        sparse.write_all_at(&random(4096, 7000 + piece), piece * 5 * PAGE).unwrap();
    }
}

/// Every regular file of `dir` by its name.
fn files(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Each page of each file is where it is said to be; one that is nowhere is all zeros. Returns pages found.
fn judge(system: FileSystem, image: &Path, dir: &Path, inodes: &BTreeMap<String, u64>) -> u64 {
    let mut image = Image { file: File::open(image).unwrap(), reads: 0 };
    let bytes = image.file.try_clone().unwrap();
    let mut found = 0;
    let mut opened = Files::open(system, &mut image).expect("a file system");
    for path in files(dir) {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let content = fs::read(&path).unwrap();
        for (page, at) in content.chunks(PAGE as usize).zip((0..).step_by(PAGE as usize)) {
            let mut there = vec![0; page.len()];
            let mut done = 0;
            while done < page.len() {
                let Some(run) = opened.find(inodes[&name], at + done as u64) else { break };
                let len = (page.len() - done).min(run.len as usize);
                bytes.read_exact_at(&mut there[done..done + len], run.offset).unwrap();
                done += len;
            }
            assert!(there == page, "{name} at {at:#x}, of which {done} bytes were found");
            found += u64::from(done > 0);
        }
        let end = content.len().next_multiple_of(1 << 16) as u64;
        assert_eq!(opened.find(inodes[&name], end + (1 << 30)), None, "past the end of {name}");
    }
    assert_eq!(opened.find(u64::MAX, 0), None);
    assert_eq!(opened.find(0, 0), None);
    drop(opened);
    assert!(image.reads < 40_000, "{} reads for {found} pages", image.reads);
    found
}

fn make_ext4(options: &[&str]) -> (TempDir, PathBuf, BTreeMap<String, u64>) {
    let dir = tempfile::tempdir().unwrap();
    let (source, image) = (dir.path().join("tree"), dir.path().join("image"));
    tree(&source);
    File::create(&image).unwrap().set_len(96 << 20).unwrap();
    let (from, to) = (source.to_str().unwrap(), image.to_str().unwrap());
    tool("mkfs.ext4", &[&["-q", "-F", "-d", from], options, &[to]].concat());
    // Inode, mode, user, group, size, date, time, name.
    let list = tool("debugfs", &["-R", "ls -l /", to]);
    let inode = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        Some(((*words.last()?).to_owned(), words.first()?.parse().ok()?))
    };
    let inodes = list.lines().filter_map(inode).collect();
    (dir, image, inodes)
}

#[test]
fn files_of_ext4_are_where_they_are_said_to_be() {
    let shapes: [&[&str]; 5] = [
        &["-b", "4096"],
        &["-b", "1024"],
        &["-b", "2048", "-O", "^64bit,^flex_bg,^metadata_csum"],
        &["-b", "1024", "-O", "^extents,^64bit,^metadata_csum", "-I", "128"],
        &["-b", "4096", "-O", "^extents,^64bit", "-N", "20000"],
    ];
    for options in shapes {
        let (dir, image, inodes) = make_ext4(options);
        let found = judge(FileSystem::Ext4, &image, &dir.path().join("tree"), &inodes);
        // All that is no hole; ends of files that were zeros by chance aside, there is none.
        assert_eq!(found, 1200 + 300 + 1 + 1 + 1221, "{options:?}");
    }
}

/// Mounting needs a superuser, and a kernel that knows the version; without them, files that mkfs makes are looked for,
/// which lie in one piece each.
#[test]
fn files_of_xfs_are_where_they_are_said_to_be() {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let shapes: [(&[&str], bool); 4] = [
        (&["-m", "crc=1"], is_root),
        (&["-b", "size=1024"], is_root),
        (&["-i", "size=1024"], false),
        (&["-m", "crc=0"], false),
    ];
    for (options, is_mounted) in shapes {
        let dir = tempfile::tempdir().unwrap();
        let (source, image) = (dir.path().join("tree"), dir.path().join("image"));
        tree(&source);
        File::create(&image).unwrap().set_len(320 << 20).unwrap();
        let make = if is_mounted { fill_xfs } else { proto_xfs };
        let found = judge(FileSystem::Xfs, &image, &source, &make(&source, &image, options));
        // mkfs writes holes.
        let expected = if is_mounted { 1200 } else { 1199 * 5 + 1 };
        assert_eq!(found, expected + 300 + 1 + 1 + 1221, "{options:?}");
    }
}

/// A mounted file system, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(image: &Path, at: PathBuf) -> Self {
        fs::create_dir_all(&at).unwrap();
        tool("mount", &["-o", "loop", image.to_str().unwrap(), at.to_str().unwrap()]);
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Has the kernel write the files, with their holes.
fn fill_xfs(source: &Path, image: &Path, options: &[&str]) -> BTreeMap<String, u64> {
    let path = image.to_str().unwrap();
    tool("mkfs.xfs", &[&["-q"], options, &[path]].concat());
    let mounted = Mounted::new(image, image.with_extension("mounted"));
    let from = source.to_str().unwrap();
    tool("cp", &["-a", "--sparse=always", &format!("{from}/."), mounted.0.to_str().unwrap()]);
    let inode = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, path.metadata().unwrap().ino())
    };
    files(&mounted.0).into_iter().map(inode).collect()
}

/// Has mkfs write the files.
fn proto_xfs(source: &Path, image: &Path, options: &[&str]) -> BTreeMap<String, u64> {
    let proto = image.with_extension("proto");
    let line = |path: PathBuf| {
        format!("{} ---644 0 0 {}\n", path.file_name().unwrap().to_str().unwrap(), path.display())
    };
    let lines: String = files(source).into_iter().map(line).collect();
    fs::write(&proto, format!("/none\n0 0\nd--755 0 0\n{lines}$\n")).unwrap();
    let path = image.to_str().unwrap();
    tool("mkfs.xfs", &[&["-q", "-p", proto.to_str().unwrap()], options, &[path]].concat());
    // "INODE NAME" of each.
    let list = tool("xfs_db", &["-r", "-c", "blockget -n", "-c", "ncheck", path]);
    let inode = |line: &str| {
        let (number, name) = line.trim().split_once(' ')?;
        Some((name.trim().to_owned(), number.parse().ok()?))
    };
    list.lines().filter_map(inode).collect()
}
