//! What the tests against stock tools share.
#![allow(dead_code)] // Each test binary uses its own part.

pub(crate) mod image;

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, Output};

use vmstrata_qcow2::NewImage;

/// Runs `qemu-img` in `dir`.
pub(crate) fn qemu_img(dir: &Path, args: &[&str]) -> Output {
    Command::new("qemu-img").args(args).current_dir(dir).output().expect("qemu-img is installed")
}

/// Runs `qemu-img` in `dir`, expects success, and returns what it printed.
pub(crate) fn qemu_img_ok(dir: &Path, args: &[&str]) -> String {
    let output = qemu_img(dir, args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "qemu-img {args:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Writes a new image as its documentation says: the parts, zeros elsewhere.
pub(crate) fn write(image: &NewImage, path: &Path) {
    let mut file = File::create(path).expect("create image file");
    file.set_len(image.file_len).expect("set length");
    for (at, bytes) in &image.parts {
        file.seek(SeekFrom::Start(at.get())).expect("seek");
        file.write_all(bytes).expect("write part");
    }
}
