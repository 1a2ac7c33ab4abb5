//! Judging what a guest has left, by stock tools.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};

/// Whether clusters of an image are leaked, which a killed server may do.
///
/// # Errors
/// When anything else is wrong with it.
pub fn leaks(image: &Path) -> Result<bool> {
    let check = Command::new("qemu-img").args(["check", "-q"]).arg(image).output()?;
    match check.status.code() {
        Some(0) => Ok(false),
        Some(3) => Ok(true),
        _ => bail!("{}: {}", image.display(), String::from_utf8_lossy(&check.stdout)),
    }
}

/// Makes sure that the file system on an image replays its journal and is then in order. `dir` has room for a copy.
///
/// # Errors
/// When it is not.
pub fn recovers(image: &Path, dir: &Path) -> Result<()> {
    let raw = dir.join("snapshot.raw");
    let convert = Command::new("qemu-img").args(["convert", "-O", "raw"]).args([image, &raw]).status()?;
    ensure!(convert.success(), "{} cannot be converted", image.display());
    let replayed = e2fsck(&raw, &["-p", "-E", "journal_only"])?;
    ensure!(matches!(replayed.status.code(), Some(0 | 1)), "{}: {replayed:?}", image.display());
    let checked = e2fsck(&raw, &["-f", "-n"])?;
    let said = String::from_utf8_lossy(&checked.stdout);
    ensure!(checked.status.success(), "{}: {said}", image.display());
    Ok(std::fs::remove_file(raw)?)
}

fn e2fsck(raw: &Path, options: &[&str]) -> Result<Output> {
    let mut command = Command::new("e2fsck");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(options).arg(raw);
    command.output().context("e2fsck (package e2fsprogs)")
}
