//! The guest's root disk: an ext4 file system with the userland and files of known checksums.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Guest, must};
use crate::chain::pattern::{self, Writer};

/// What a root disk is to hold besides the userland.
#[derive(Clone, Copy, Debug)]
pub struct RootImage {
    /// Bytes of the disk.
    pub size: u64,
    /// Number of data files.
    pub files: u32,
    /// Bytes of each, a multiple of 64.
    pub file_size: u64,
}

impl RootImage {
    /// Makes the raw image in `dir`, unless it is there already; returns its path.
    ///
    /// # Errors
    /// When a tool is missing or the files do not fit.
    pub fn make(&self, guest: &Guest, dir: &Path) -> Result<PathBuf> {
        fs::create_dir_all(dir)?;
        let path = dir.join(format!("root-{}-{}x{}.raw", self.size >> 20, self.files, self.file_size));
        let init = guest.root.join("sbin/init").metadata()?.modified()?;
        if path.metadata().and_then(|meta| meta.modified()).is_ok_and(|made| made > init) {
            return Ok(path);
        }
        let files = guest.root.join("files");
        let stage = tempfile::tempdir_in(dir)?;
        let tree = stage.path().join("root");
        let copy = Command::new("cp").arg("-a").arg(&guest.root).arg(&tree).status()?;
        ensure!(copy.success(), "cannot copy {}", files.display());
        self.write_files(&tree.join("files"))?;
        let raw = stage.path().join("root.raw");
        make_ext4(&tree, &raw, self.size)?;
        fs::rename(&raw, &path)?;
        Ok(path)
    }

    fn write_files(&self, dir: &Path) -> Result<()> {
        let mut buf = vec![0; 1 << 20];
        for file in 0..self.files {
            let mut out = BufWriter::new(File::create(dir.join(format!("data-{file:03}")))?);
            let mut at = 0;
            while at < self.file_size {
                let len = (buf.len() as u64).min(self.file_size - at) as usize;
                pattern::fill(&mut buf[..len], at, Writer::client(file as u16), 0);
                out.write_all(&buf[..len])?;
                at += len as u64;
            }
            out.flush()?;
        }
        let sums =
            Command::new("sh").args(["-c", "sha256sum data-* > SHA256SUMS"]).current_dir(dir).status()?;
        ensure!(sums.success(), "sha256sum failed");
        Ok(())
    }
}

/// Makes an image of `size` bytes, an ext4 file system with what is in `tree`.
///
/// # Errors
/// When mkfs.ext4 is missing, or it does not fit.
pub(super) fn make_ext4(tree: &Path, raw: &Path, size: u64) -> Result<()> {
    File::create(raw)?.set_len(size)?;
    let options = ["-q", "-F", "-E", "root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0", "-d"];
    mkfs("mkfs.ext4", |mkfs| mkfs.args(options).args([tree, raw]))
}

/// Runs `mkfs.KIND`, which may lie where only root looks for programs.
pub(super) fn mkfs(program: &str, arguments: impl FnOnce(&mut Command) -> &mut Command) -> Result<()> {
    let mut command = Command::new(program);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    must(arguments(&mut command)).context("packages e2fsprogs and xfsprogs").map(drop)
}
