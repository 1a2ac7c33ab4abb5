//! `chain.json`, beside a chain: how it was made and which layer owns each cluster.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{Base, Plan, Spec};

/// The manifest's name in the chain's directory.
pub const FILE_NAME: &str = "chain.json";

/// What a chain's directory says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The parameters; with pattern data they alone determine every byte of the disk.
    pub plan: Plan,
    /// Whether the lowest layer is a raw file.
    pub raw_base: bool,
    /// Whether headers name the format of the backing file.
    pub backing_format: bool,
    /// The image the data came from; `None` for pattern data.
    pub from_raw: Option<PathBuf>,
    /// File names from the base up; the last is the active layer.
    pub files: Vec<String>,
    /// Runs `[layer, clusters]` that cover the disk in guest order; layer -1 reads as zeros.
    pub owners: Vec<(i32, u64)>,
}

impl Manifest {
    pub(super) fn new(spec: &Spec, files: Vec<String>, owners: &[Option<u16>]) -> Self {
        let mut runs: Vec<(i32, u64)> = Vec::new();
        for owner in owners {
            let layer = owner.map_or(-1, i32::from);
            match runs.last_mut() {
                Some((last, count)) if *last == layer => *count += 1,
                _ => runs.push((layer, 1)),
            }
        }
        Self {
            plan: spec.plan.clone(),
            raw_base: spec.base == Base::Raw,
            backing_format: spec.backing_format,
            from_raw: spec.from_raw.clone(),
            files,
            owners: runs,
        }
    }

    /// Reads the manifest of the chain in `dir`.
    ///
    /// # Errors
    /// When there is none, or it does not describe a chain.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE_NAME);
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let manifest: Self =
            serde_json::from_slice(&text).with_context(|| format!("{} is no manifest", path.display()))?;
        ensure!(!manifest.files.is_empty(), "{} names no layer", path.display());
        Ok(manifest)
    }

    /// Writes the manifest into `dir`; being written last, it also says that the chain is complete.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let path = dir.join(FILE_NAME);
        fs::write(&path, serde_json::to_vec(self)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Whether this chain is what `spec` asks for.
    pub fn matches(&self, spec: &Spec) -> bool {
        let raw = spec.base == Base::Raw;
        (&self.plan, self.raw_base, self.backing_format, &self.from_raw)
            == (&spec.plan, raw, spec.backing_format, &spec.from_raw)
    }

    /// Path of the active layer of the chain in `dir`.
    pub fn top(&self, dir: &Path) -> PathBuf {
        dir.join(self.files.last().expect("a chain has a layer"))
    }

    /// The newest layer of every cluster in guest order.
    pub fn owners(&self) -> impl Iterator<Item = Option<u16>> {
        let run =
            |(layer, count): &(i32, u64)| std::iter::repeat_n(u16::try_from(*layer).ok(), *count as usize);
        self.owners.iter().flat_map(run)
    }
}
