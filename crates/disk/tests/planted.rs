//! What somebody who may write a disk's directory has put there: links to what is not theirs, pipes that nobody writes to, and
//! images that name what is not theirs.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::flat::write;
use crate::common::scratch;
use rustix::fs::{CWD, FileType, Mode};
use vmstrata_disk::merge::{Direction, Merge, MergeOptions, ranges_of};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo};
use vmstrata_disk::{CreateOptions, Disk, OpenOptions, ResourceOptions, Resources, create};

const MIB: u64 = 1 << 20;

fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

fn take(disk: &Path, name: &str) -> vmstrata_disk::Result<()> {
    let (open, prepare) = (OpenOptions::default(), PrepareOptions::default());
    let resources = Resources::new(ResourceOptions::default());
    snapshot::create(&[disk.to_owned()], &named(name), &open, &prepare, &resources).map(drop)
}

fn delete(disk: &Path, name: &str) -> vmstrata_disk::Result<()> {
    let range = ranges_of(disk, &[name.to_owned()], &OpenOptions::default())?[0];
    let resources = Resources::new(ResourceOptions::default());
    let options = MergeOptions { direction: Direction::Stream, ..MergeOptions::default() };
    Merge::new(disk, range, &options, &resources)?.run().map(drop)
}

/// A disk with snapshots in a directory of its own.
fn disk(dir: &Path) -> PathBuf {
    let tenant = dir.join("tenant");
    std::fs::create_dir(&tenant).unwrap();
    let disk = tenant.join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(MIB), ..CreateOptions::default() }).unwrap();
    for name in ["s1", "s2"] {
        take(&disk, name).unwrap();
    }
    disk
}

/// Links as in a directory of services.
fn victim(dir: &Path) -> PathBuf {
    let victim = dir.join("wants");
    std::fs::create_dir(&victim).unwrap();
    std::fs::write(dir.join("real.service"), "unit").unwrap();
    for name in ["sshd.service", "firewall.service"] {
        symlink(dir.join("real.service"), victim.join(name)).unwrap();
    }
    victim
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_link_in_place_of_the_directory_of_clones_is_not_followed() {
    let dir = scratch();
    let (disk, victim) = (disk(dir.path()), victim(dir.path()));
    let before = names(&victim);
    symlink(&victim, disk.with_file_name(".web.s1.qcow2.clones")).unwrap();
    let deleted = delete(&disk, "s1");
    assert_eq!(names(&victim), before, "{deleted:?}");
    // Nor does a new disk on the layer tell of itself there.
    let other = dir.path().join("other.qcow2");
    let backing = Some((disk.with_file_name("web.s2.qcow2"), vmstrata_disk::Format::Qcow2));
    symlink(&victim, disk.with_file_name(".web.s2.qcow2.clones")).unwrap();
    create(&other, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    drop(Disk::open(&other, &OpenOptions::default(), &Resources::new(ResourceOptions::default())));
    assert_eq!(names(&victim), before);
}

#[test]
fn entries_that_are_not_ours_stay_when_a_layer_goes() {
    let dir = scratch();
    let disk = disk(dir.path());
    let clones = disk.with_file_name(".web.s1.qcow2.clones");
    std::fs::create_dir(&clones).unwrap();
    symlink(dir.path().join("gone.qcow2"), clones.join("theirs")).unwrap();
    delete(&disk, "s1").unwrap();
    assert_eq!(names(&clones), ["theirs"]);
    assert!(!disk.with_file_name("web.s1.qcow2").exists());
}

/// Does `work`, and fails if that waits for something that never comes.
fn at_once<T: Send + 'static>(what: String, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    done.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| panic!("{what} waits"))
}

#[test]
fn pipes_beside_a_disk_hold_nothing_up() {
    for name in [
        "web.qcow2.vmsx",
        "web.s1.qcow2.vmsx",
        "web.s2.qcow2.vmsx",
        ".web.qcow2.dropped",
        ".web.qcow2.dropped.new",
        ".web.qcow2.1-1.snapshot",
        ".web.s1.qcow2.clones",
        "some.qcow2",
    ] {
        let dir = scratch();
        let disk = disk(dir.path());
        let pipe = disk.with_file_name(name);
        let _ = std::fs::remove_file(&pipe);
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        at_once(name.to_owned(), move || {
            let open = OpenOptions::default();
            let _ = snapshot::list(&disk, &open);
            let _ = take(&disk, "s3");
            let _ = delete(&disk, "s1");
            if let Ok(running) = Disk::open(&disk, &open, &Resources::new(ResourceOptions::default())) {
                let _ = write(&running, 0, &[1; 512]);
                let _ = running.snapshot(&named("s4"));
                let _ = running.close();
            }
        });
        assert!(pipe.exists(), "{name} is not ours to remove");
    }
}

#[test]
fn a_disk_that_is_swapped_for_a_link_is_refused() {
    let dir = scratch();
    let disk = disk(dir.path());
    let real = disk.with_file_name("real.qcow2");
    std::fs::rename(&disk, &real).unwrap();
    symlink(&real, &disk).unwrap();
    at_once("a link".into(), move || take(&disk, "s3").unwrap_err());
}

#[test]
fn a_clone_is_for_those_whom_the_disk_is_for() {
    let dir = scratch();
    let disk = disk(dir.path());
    let clone = dir.path().join("clone.qcow2");
    for (mode, wanted) in [(0o600, 0o600), (0o640, 0o640), (0o444, 0o644)] {
        std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(mode)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&disk, Some(65534), Some(65534)).unwrap();
        }
        snapshot::clone(&disk, "s1", &clone, &OpenOptions::default()).unwrap();
        let (found, like) = (clone.metadata().unwrap(), disk.metadata().unwrap());
        assert_eq!((found.mode() & 0o777, found.uid(), found.gid()), (wanted, like.uid(), like.gid()));
        std::fs::remove_file(&clone).unwrap();
    }
}

/// In a directory that several tenants' disks share, an image can name another's snapshot.
#[test]
fn a_disk_with_a_list_of_backing_files_reads_nothing_else() {
    let dir = scratch();
    let victim = disk(dir.path());
    let layer = victim.with_file_name("web.s1.qcow2");
    let evil = victim.with_file_name("evil.qcow2");
    let backing = Some((layer.clone(), vmstrata_disk::Format::Qcow2));
    create(&evil, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    let alone = |allow_backing: Vec<PathBuf>| OpenOptions {
        allow_backing,
        allow_backing_alone: true,
        ..OpenOptions::default()
    };
    let resources = Resources::new(ResourceOptions::default());
    let open = |path: &Path, options: &OpenOptions| Disk::open(path, options, &resources);
    open(&evil, &OpenOptions::default()).unwrap().close().unwrap();
    let refused = open(&evil, &alone(Vec::new())).unwrap_err().to_string();
    assert!(refused.contains("outside the allowed directories"), "{refused}");
    open(&evil, &alone(vec![layer])).unwrap().close().unwrap();
    open(&evil, &alone(vec![dir.path().to_owned()])).unwrap().close().unwrap();
    // It could not be opened again with a snapshot beside it.
    let single = victim.with_file_name("single.qcow2");
    create(&single, &CreateOptions { size: Some(MIB), ..CreateOptions::default() }).unwrap();
    let single = open(&single, &alone(Vec::new())).unwrap();
    let refused = single.snapshot(&named("s1")).unwrap_err().to_string();
    assert!(refused.contains("outside the allowed directories"), "{refused}");
    single.close().unwrap();
}
