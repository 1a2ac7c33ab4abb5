//! The chain generator: qcow2 chains of any length, written directly and fast.
//!
//! ```text
//!   Plan (which layer holds what) ──► image::write, one file per layer, on all cores ──► chain.json
//!        └──────────────────────────► verify: judges any copy of the disk with the plan alone
//! ```
//!
//! A chain's data comes either from [`pattern`], so that every sector says where it belongs, or from an
//! existing raw image whose clusters are spread over the layers, which is how the authors of sQemu built
//! theirs. File names are `layer-0000.qcow2` (the base) upwards; each names the one below relatively, so a
//! chain's directory can be moved.

mod batch;
pub mod image;
pub mod manifest;
pub mod pattern;
pub mod plan;
pub mod verify;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, ensure};

pub use image::{Backing, Shape};
pub use manifest::Manifest;
use pattern::Writer;
pub use plan::Plan;

/// Format of the lowest layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Base {
    /// A qcow2 file without a backing file.
    Qcow2,
    /// A sparse raw file.
    Raw,
}

/// Everything the generator is told.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Who owns what.
    pub plan: Plan,
    /// Format of the lowest layer.
    pub base: Base,
    /// Whether headers name the backing file's format; QEMU warns where they do not.
    pub backing_format: bool,
    /// Take the data from this raw image instead of the pattern; `plan.size` must be its size.
    pub from_raw: Option<PathBuf>,
}

/// Writes the chain into `dir` (created when missing) and its manifest beside it.
///
/// # Errors
/// When the parameters make no chain, or files cannot be written.
pub fn generate(dir: &Path, spec: &Spec) -> Result<Manifest> {
    let plan = &spec.plan;
    ensure!((1..=65_535).contains(&plan.layers), "a chain has 1 to 65,535 layers");
    ensure!(plan.size > 0 && plan.size.is_multiple_of(512), "a disk's size is a multiple of 512");
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let source = spec.from_raw.as_deref().map(Source::open).transpose()?;
    let owners = owners(plan, source.as_ref())?;
    let layers = contents(plan, &owners);
    let files: Vec<String> = (0..plan.layers).map(|layer| file_name(layer, spec.base)).collect();

    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        loop {
            let layer = next.fetch_add(1, Ordering::Relaxed);
            let Some(clusters) = layers.get(layer) else { return Ok(()) };
            let content =
                LayerContent { plan, layer: layer as u16, owners: &owners, source: source.as_ref() };
            write_layer(dir, spec, &files, &content, clusters)
                .with_context(|| format!("layer {layer} ({})", files[layer]))?;
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(layers.len());
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| anyhow!("a writer panicked"))?)
    })?;

    let manifest = Manifest::new(spec, files, &owners);
    manifest.save(dir)?;
    Ok(manifest)
}

fn file_name(layer: u32, base: Base) -> String {
    let extension = if layer == 0 && base == Base::Raw { "raw" } else { "qcow2" };
    format!("layer-{layer:04}.{extension}")
}

/// The newest layer of each cluster: from the plan's fill, or of every cluster of the source that is not zero.
fn owners(plan: &Plan, source: Option<&Source>) -> Result<Vec<Option<u16>>> {
    let Some(source) = source else {
        return Ok((0..plan.clusters()).map(|cluster| plan.owner(cluster)).collect());
    };
    ensure!(source.size == plan.size, "the raw image has {} bytes, the plan {}", source.size, plan.size);
    let mut buf = vec![0; plan.cluster_size as usize];
    let owner = |cluster| -> Result<Option<u16>> {
        source.read(cluster * plan.cluster_size, &mut buf)?;
        Ok(buf.iter().any(|byte| *byte != 0).then(|| plan.owner_when_filled(cluster)))
    };
    (0..plan.clusters()).map(owner).collect()
}

/// `[layer][..]`: the clusters each layer holds, its own and the older copies below their owners, ascending.
fn contents(plan: &Plan, owners: &[Option<u16>]) -> Vec<Vec<u64>> {
    let mut layers = vec![Vec::new(); plan.layers as usize];
    for (cluster, owner) in (0..).zip(owners) {
        let Some(owner) = *owner else { continue };
        layers[owner as usize].push(cluster);
        for lower in plan.lower_copies(cluster, owner) {
            layers[lower as usize].push(cluster);
        }
    }
    layers
}

fn write_layer(
    dir: &Path,
    spec: &Spec,
    files: &[String],
    content: &LayerContent<'_>,
    clusters: &[u64],
) -> Result<()> {
    let layer = content.layer as usize;
    let path = dir.join(&files[layer]);
    if layer == 0 && spec.base == Base::Raw {
        return write_raw(&path, &spec.plan, clusters, content);
    }
    let backing = layer.checked_sub(1).map(|below| Backing {
        name: files[below].clone(),
        format: spec.backing_format.then(|| if files[below].ends_with("raw") { "raw" } else { "qcow2" }),
    });
    let shape = Shape { size: spec.plan.size, cluster_size: spec.plan.cluster_size, backing };
    image::write(&path, &shape, clusters, content)
}

fn write_raw(path: &Path, plan: &Plan, clusters: &[u64], content: &dyn image::Content) -> Result<()> {
    let file = File::create(path)?;
    file.set_len(plan.size)?;
    let mut buf = vec![0; plan.cluster_size as usize];
    for &cluster in clusters {
        content.fill(cluster, &mut buf)?;
        let at = cluster * plan.cluster_size;
        let len = plan.cluster_size.min(plan.size - at) as usize;
        file.write_all_at(&buf[..len], at)?;
    }
    Ok(())
}

/// A raw image whose clusters become the chain's.
struct Source {
    file: File,
    size: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }

    /// Bytes past the image's end read as zeros.
    fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let len = (buf.len() as u64).min(self.size.saturating_sub(at)) as usize;
        self.file.read_exact_at(&mut buf[..len], at)?;
        buf[len..].fill(0);
        Ok(())
    }
}

/// What one layer holds: the newest data where it owns the cluster, older data where it does not.
struct LayerContent<'a> {
    plan: &'a Plan,
    layer: u16,
    owners: &'a [Option<u16>],
    source: Option<&'a Source>,
}

impl image::Content for LayerContent<'_> {
    fn fill(&self, cluster: u64, buf: &mut [u8]) -> Result<()> {
        let at = cluster * self.plan.cluster_size;
        match self.source {
            Some(source) if self.owners[cluster as usize] == Some(self.layer) => source.read(at, buf),
            _ => {
                pattern::fill(buf, at, Writer::layer(self.layer), self.plan.seed);
                Ok(())
            }
        }
    }

    fn compress(&self, cluster: u64) -> bool {
        self.plan.is_compressed(cluster)
    }
}
