//! Checking a file in use, and files that are no images.

use crate::common::scratch;
use crate::common::stock::{User, path_str, qemu_img};
use vmstrata_check::{Options, Repair};
use vmstrata_disk::{CheckOptions, check};

#[test]
fn a_writer_is_in_the_way_unless_sharing_is_forced() {
    let dir = scratch();
    let path = dir.path().join("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1M"]);
    let writer = User::writing(&path);
    let refused = |repair, force_share| {
        let image = Options { repair, ..Options::default() };
        let error =
            check(&path, &CheckOptions { image, force_share, ..CheckOptions::default() }).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error}");
    };
    [Repair::None, Repair::Leaks, Repair::All].into_iter().for_each(|repair| refused(repair, false));
    assert!(check(&path, &CheckOptions { force_share: true, ..CheckOptions::default() }).unwrap().is_clean());
    // A repair must never share.
    refused(Repair::All, true);
    drop(writer);
    assert!(check(&path, &CheckOptions::default()).unwrap().is_clean());
}

#[test]
fn an_error_names_the_file() {
    let dir = scratch();
    let raw = dir.path().join("raw");
    std::fs::write(&raw, vec![0; 1 << 20]).unwrap();
    for (path, says) in
        [(&*raw, "does not support checks"), (dir.path(), "directory"), (&dir.path().join("none"), "")]
    {
        let error = check(path, &CheckOptions::default()).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains(path_str(path)), "{error}");
    }
}
