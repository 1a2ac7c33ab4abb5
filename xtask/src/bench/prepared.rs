//! Chains made ready for a measurement, and what is known of them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::run::{CLUSTER, FILL, Options};
use super::session::Chain;
use crate::chain::{self, Base, Manifest, Plan, Spec};

const SEED: u64 = 20_260_101;

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
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.manifest.files.iter().map(|file| self.dir.join(file)).collect()
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
