//! Chains made ready for a measurement: known, and in the page cache.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::session::Chain;
use crate::chain::Manifest;

/// A chain on disk with its owners at hand.
pub(super) struct Prepared {
    pub(super) dir: PathBuf,
    pub(super) manifest: Manifest,
    pub(super) owners: Vec<Option<u16>>,
}

impl Prepared {
    pub(super) fn chain(&self) -> Chain<'_> {
        Chain { dir: &self.dir, manifest: &self.manifest, owners: &self.owners }
    }
}

/// Reads a file from the disk once, so that it lies in the page cache, and lies there as reading puts it.
///
/// What writing left in the cache goes first: the kernel keeps large writes in large pieces, and reads of those are half
/// as fast again, so a file would be quicker than another only for the way it was made.
pub(super) fn warm(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Sequential)?;
    io::copy(&mut io::BufReader::with_capacity(1 << 20, &mut file), &mut io::sink())?;
    Ok(())
}
