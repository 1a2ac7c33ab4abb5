//! A directory does what every kind of repository must do.

use crate::suite;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use vmstrata_repo::{DirectoryRepository, Repository};

fn private_directory() -> tempfile::TempDir {
    tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().expect("a directory")
}

#[test]
fn a_directory_is_a_repository() {
    let dir = private_directory();
    let repository = DirectoryRepository::open(dir.path(), suite::is_tested).expect("opens");
    std::fs::write(dir.path().join("foreign"), "not an object").expect("writes");
    suite::test_kind(&repository);
    let mut left: Vec<_> = std::fs::read_dir(dir.path())
        .expect("lists")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["foreign", "lock"]);
}

#[test]
fn of_several_that_create_an_object_in_a_directory_one_does() {
    let dir = private_directory();
    let open = || DirectoryRepository::open(dir.path(), suite::is_tested).expect("opens");
    let racers = [open(), open(), open(), open()];
    suite::test_race(&racers.each_ref().map(|racer| racer as &dyn Repository), 50);
}
