//! Chains made ready for a measurement: known, and in the page cache.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{Advice, fadvise};

use super::run::{CLUSTER, FILL, Options};
use super::session::Chain;
use crate::chain::{self, Base, Manifest, Plan, Spec};

const SEED: u64 = 20_260_101;
/// How often a file is read until the kernel takes its pages for in use, and changes nothing more.
const READS: u32 = 3;

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

    /// Its files.
    pub(super) fn paths(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.manifest.files.iter().map(|file| self.dir.join(file))
    }
}

/// How a chain of this length is made.
pub(super) fn spec(options: &Options, layers: u32) -> Spec {
    let size = options.size;
    let plan =
        Plan { layers, size, cluster_size: CLUSTER, fill: FILL, overlap: 0.0, compress: 0.0, seed: SEED };
    Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None }
}

/// The chain of `layers` layers, made unless it is there already.
pub(super) fn prepare(options: &Options, layers: u32) -> Result<Prepared> {
    let spec = spec(options, layers);
    let dir = options.dir.join(format!("bench-{layers}-{}", options.size));
    let there = Manifest::load(&dir).ok().filter(|manifest| manifest.matches(&spec));
    let manifest = match there {
        Some(manifest) => manifest,
        None => {
            eprintln!("making a chain of {layers} layers");
            chain::generate(&dir, &spec)?
        }
    };
    let owners = manifest.owners().collect();
    Ok(Prepared { dir, manifest, owners })
}

/// A raw file with the bytes of the disk, for the floor. All lengths own the same clusters, but their
/// data names its layer, so the floor's file is the one-layer chain's.
pub(super) fn raw_copy(options: &Options, one: &Prepared) -> Result<PathBuf> {
    let raw = options.dir.join(format!("bench-floor-{}.raw", options.size));
    if raw.metadata().is_ok_and(|meta| meta.len() == options.size) {
        return Ok(raw);
    }
    eprintln!("making the raw file of the floor");
    let partial = raw.with_extension("partial");
    let convert = std::process::Command::new("qemu-img")
        .args(["convert", "-O", "raw"])
        .args([&one.manifest.top(&one.dir), &partial])
        .status()?;
    ensure!(convert.success(), "qemu-img convert failed");
    fs::rename(&partial, &raw)?;
    Ok(raw)
}

/// Reads a file from the disk, so that it lies in the page cache as a guest that reads here and there leaves it: cluster by
/// cluster, and read more than once.
///
/// The kernel keeps what is written at once, or read ahead, in large pieces: larger ones the longer a file is. Reads of those
/// are half as fast again, so without this one file would be quicker than the thousand that its bytes are spread over, whoever
/// reads them. What writing left in the cache goes first for that reason. The second read of a page moves it among those
/// in use, which takes longer than to read it; what was read in more rounds than another would be slower for that.
pub(super) fn warm(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    fadvise(&file, 0, None, Advice::Random)?;
    let mut cluster = vec![0; CLUSTER as usize];
    for _ in 0..READS {
        file.rewind()?;
        while file.read(&mut cluster)? > 0 {}
    }
    Ok(())
}

/// Takes a file out of the page cache again.
pub(super) fn forget(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}
