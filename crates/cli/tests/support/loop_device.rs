//! Files as block devices, and file systems on those.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::tool_ok;

/// A loop device over a file, detached on drop.
pub struct LoopDevice(pub String);

impl LoopDevice {
    /// `None` without the right or the means to make one.
    pub fn over(file: &Path) -> Option<Self> {
        Self::with(&[], file)
    }

    /// The same with more arguments of `losetup`.
    pub fn with(args: &[&str], file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).args(args).arg(file).output().ok()?;
        let device = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !device.is_empty()).then_some(Self(device))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A file system of a device that is mounted, unmounted on drop.
pub struct FileSystem(pub PathBuf);

impl FileSystem {
    /// Mounts it on a directory, which is made if it is not there.
    pub fn new(device: &LoopDevice, at: &Path, options: &str) -> Self {
        fs::create_dir_all(at).unwrap();
        tool_ok("mount", ["-o", options, &device.0, at.to_str().unwrap()]);
        Self(at.to_owned())
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
