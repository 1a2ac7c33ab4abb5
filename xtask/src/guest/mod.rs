//! A small Linux that boots in stock QEMU.

use crate::bench::server::Kind;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub fn disks(_dir: &Path, _lengths: &[u32]) -> Result<Vec<(u32, PathBuf)>> {
    anyhow::bail!("not yet")
}
pub fn boot_through(_kind: Kind, _disk: &Path) -> Result<Duration> {
    anyhow::bail!("not yet")
}
