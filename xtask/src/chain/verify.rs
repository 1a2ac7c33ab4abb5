//! Judges a whole disk, read as one stream from anywhere, against the chain it should be.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::manifest::Manifest;
use super::pattern::{self, Writer};

/// What a verified disk held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Clusters that held their layer's data.
    pub data: u64,
    /// Clusters that read as zeros, as they should.
    pub zero: u64,
}

/// Reads `disk` to its end and compares it with the chain of `manifest`.
///
/// # Errors
/// The first difference, a disk of another size, or a failed read.
pub fn stream(manifest: &Manifest, disk: &mut dyn Read) -> Result<Verified> {
    let plan = &manifest.plan;
    let mut original = match &manifest.from_raw {
        Some(path) => Some(File::open(path).with_context(|| format!("cannot open {}", path.display()))?),
        None => None,
    };
    let mut buf = vec![0; plan.cluster_size as usize];
    let mut reference = vec![0; buf.len()];
    let mut verified = Verified::default();
    for (cluster, owner) in (0..).zip(manifest.owners()) {
        let at = cluster * plan.cluster_size;
        let len = plan.cluster_size.min(plan.size - at) as usize;
        disk.read_exact(&mut buf[..len]).with_context(|| format!("reading the disk at {at:#x}"))?;
        match &mut original {
            Some(original) => {
                original.read_exact(&mut reference[..len])?;
                ensure!(buf[..len] == reference[..len], "the cluster at {at:#x} (layer {owner:?}) differs");
            }
            None => pattern::check(&buf[..len], at, owner.map(Writer::layer), plan.seed)?,
        }
        *if owner.is_some() { &mut verified.data } else { &mut verified.zero } += 1;
    }
    ensure!(disk.read(&mut [0])? == 0, "the disk is longer than {} bytes", plan.size);
    Ok(verified)
}

/// Verifies what an NBD server serves, copied out by `nbdcopy`.
///
/// # Errors
/// As [`stream`], and when `nbdcopy` fails.
pub fn nbd(manifest: &Manifest, uri: &str) -> Result<Verified> {
    let mut copy = Command::new("nbdcopy")
        .args([uri, "-"])
        .stdout(Stdio::piped())
        .spawn()
        .context("nbdcopy (package libnbd-bin) does not start")?;
    let mut out = copy.stdout.take().expect("piped");
    let verified = stream(manifest, &mut out);
    drop(out);
    let status = copy.wait()?;
    if verified.is_ok() && !status.success() {
        bail!("nbdcopy {uri} failed: {status}");
    }
    verified
}

/// Verifies a raw file.
///
/// # Errors
/// As [`stream`].
pub fn raw(manifest: &Manifest, path: &Path) -> Result<Verified> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    stream(manifest, &mut std::io::BufReader::with_capacity(1 << 20, file))
}
