//! A mounted directory of a real NFS server is a directory in which repositories and images are kept.

use std::fs;
use std::path::Path;
use std::process::Command;

use vmstrata_repo::{DirectoryRepository, Repository};
use xtask::nas::{Mount, Nas};

use crate::suite;

#[test]
fn a_mounted_directory_of_an_nfs_server_is_a_repository_and_has_images() {
    if let Err(why) = xtask::nas::check() {
        eprintln!("not tested: {why}");
        return;
    }
    let (nas, at) = (Nas::start(1).unwrap(), tempfile::tempdir().unwrap());
    let mount = Mount::new(&nas, 1, at.path()).unwrap();
    let open = |name: &str| -> DirectoryRepository {
        let dir = mount.dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        DirectoryRepository::open(&dir, suite::is_tested).unwrap()
    };
    let repository = open("kind");
    suite::test_kind(&repository);
    let racers = [open("race"), open("race"), open("race")];
    suite::test_race(&racers.each_ref().map(|racer| racer as &dyn Repository), 20);

    let image = mount.dir().join("disk.qcow2");
    let run = |program: &str, args: &[&str], path: &Path| {
        let output = Command::new(program).args(args).arg(path).output().unwrap();
        assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "size=8M"], &image);
    run("qemu-io", &["-c", "write -P 7 1M 2M", "-c", "flush", "-c", "read -P 7 1M 2M"], &image);
    let kept = nas.export().join("disk.qcow2");
    assert_eq!(fs::read(&kept).unwrap(), fs::read(&image).unwrap(), "the NAS has what was written");
    run("qemu-img", &["check", "-q"], &kept);
}
