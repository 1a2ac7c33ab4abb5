//! `cargo xtask chain`: the generator's command line.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use xtask::chain::{Base, Manifest, Plan, Spec, generate, verify};
use xtask::size::parse_size;

/// Example: `cargo xtask chain --dir /tmp/c --layers 500 --size 4G --overlap 0.2`
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Chain {
    #[command(subcommand)]
    verify: Option<Action>,
    #[command(flatten)]
    make: Option<Make>,
}

#[derive(Subcommand)]
enum Action {
    /// Read a whole disk and compare every sector with the chain in --dir.
    Verify(Verify),
}

#[derive(Args)]
struct Make {
    /// Directory to write the layers and chain.json into.
    #[arg(long)]
    dir: PathBuf,
    /// Number of layers, the base included.
    #[arg(long, default_value_t = 10)]
    layers: u32,
    /// Size of the disk; with --from-raw, that image's size.
    #[arg(long, value_parser = parse_size, default_value = "4G")]
    size: u64,
    /// Part of the clusters that hold data.
    #[arg(long, default_value_t = 0.9)]
    fill: f64,
    /// Chance that a cluster has older data in a lower layer too.
    #[arg(long, default_value_t = 0.0)]
    overlap: f64,
    /// Cluster size, 512 to 2M.
    #[arg(long, value_parser = parse_size, default_value = "64K")]
    cluster_size: u64,
    /// Part of the data clusters stored compressed (zlib).
    #[arg(long, default_value_t = 0.0)]
    compress: f64,
    /// Tells chains of equal parameters apart.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Format of the lowest layer.
    #[arg(long, value_enum, default_value_t = Base::Qcow2)]
    base: Base,
    /// Leave the backing file's format out of the headers.
    #[arg(long)]
    no_backing_format: bool,
    /// Spread the clusters of this raw image over the layers instead of pattern data.
    #[arg(long)]
    from_raw: Option<PathBuf>,
}

#[derive(Args)]
struct Verify {
    /// Directory of the chain.
    #[arg(long)]
    dir: PathBuf,
    /// A raw copy of the disk.
    #[arg(long, required_unless_present = "nbd", conflicts_with = "nbd")]
    raw: Option<PathBuf>,
    /// URI of an NBD server, for example `nbd+unix:///web?socket=/run/nbd.sock`.
    #[arg(long)]
    nbd: Option<String>,
}

impl Chain {
    pub(crate) fn run(self) -> Result<()> {
        match (self.verify, self.make) {
            (Some(Action::Verify(verify)), _) => verify.run(),
            (None, Some(make)) => make.run(),
            (None, None) => unreachable!("clap asks for --dir"),
        }
    }
}

impl Make {
    fn run(self) -> Result<()> {
        let fractions = [self.fill, self.overlap, self.compress];
        ensure!(fractions.iter().all(|x| (0.0..=1.0).contains(x)), "fractions lie between 0 and 1");
        let size = match &self.from_raw {
            Some(path) => path.metadata()?.len(),
            None => self.size,
        };
        let spec = Spec {
            plan: Plan {
                layers: self.layers,
                size,
                cluster_size: self.cluster_size,
                fill: self.fill,
                overlap: self.overlap,
                compress: self.compress,
                seed: self.seed,
            },
            base: self.base,
            backing_format: !self.no_backing_format,
            from_raw: self.from_raw,
        };
        let start = Instant::now();
        let manifest = generate(&self.dir, &spec)?;
        println!(
            "{} layers in {:.1} s, the newest is {}",
            manifest.files.len(),
            start.elapsed().as_secs_f64(),
            manifest.top(&self.dir).display()
        );
        Ok(())
    }
}

impl Verify {
    fn run(self) -> Result<()> {
        let manifest = Manifest::load(&self.dir)?;
        let verified = match (&self.raw, &self.nbd) {
            (Some(path), _) => verify::raw(&manifest, path)?,
            (None, Some(uri)) => verify::nbd(&manifest, uri)?,
            (None, None) => unreachable!("clap asks for one of the two"),
        };
        println!("{} clusters of data and {} of zeros are right", verified.data, verified.zero);
        Ok(())
    }
}
