//! Files as block devices.

use std::path::Path;
use std::process::Command;

/// A loop device over a file, detached on drop; `None` without the right or the means to make one.
pub struct LoopDevice(pub String);

impl LoopDevice {
    pub fn over(file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let device = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !device.is_empty()).then_some(Self(device))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}
