//! Random reads of 1,000 layers with their indices, over those of one layer, on disks whose data is there.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::super::machine::{by_turns, settle};
use super::super::prepared::{self, Prepared};
use super::super::report::{Report, Row};
use super::super::results::Figure;
use super::super::server::{Kind, vmstrata};
use super::super::session::{self, Timing};
use super::take::timed;
use super::{CLUSTER, Options, SEED};
use crate::chain::{self, Base, Plan, Spec};

/// Pairs a round: what one disk shows differs by a tenth from one second to the next, which five pairs do not even out.
const PAIRS: u32 = 3;

/// Compares them in pairs, one after the other.
///
/// # Errors
/// When a server fails or serves a wrong byte.
pub(super) fn measure(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let layers = options.snapshots as u32;
    let (one, long) = (prepare(options, dir, 1)?, prepare(options, dir, layers)?);
    rustix::fs::sync();
    for prepared in [&one, &long] {
        prepared.paths().try_for_each(|path| prepared::warm(&path))?;
    }
    let run = options.pace.second;
    let timing = Timing { run, warm_up: run / 4, check: run / 4, whole: false };
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    settle();
    for round in 0..PAIRS * options.rounds {
        let mut turns = [(&one, &mut fast), (&long, &mut slow)];
        by_turns(&mut turns, round);
        for (prepared, rates) in turns {
            rates.push(read(prepared, timing)?);
        }
    }
    let ratios: Vec<f64> = slow.iter().zip(&fast).map(|(slow, fast)| slow / fast).collect();
    report.add(Row::median("4 KiB random reads, QD32: 1 layer", "IOPS", &fast));
    report.add(Row::median(&format!("4 KiB random reads, QD32: {layers} layers"), "IOPS", &slow));
    let name = format!("4 KiB random reads, QD32: {layers} layers / 1 layer");
    report.add(Row::median(&name, "", &ratios).at_least(0.95));
    Ok(())
}

fn prepare(options: &Options, dir: &Path, layers: u32) -> Result<Prepared> {
    let (size, cluster_size, fill) = (options.reads_size, CLUSTER, 0.9);
    let plan = Plan { layers, size, cluster_size, fill, overlap: 0.0, compress: 0.0, seed: SEED };
    let spec = Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None };
    let dir = dir.join(layers.to_string());
    let manifest = chain::generate(&dir, &spec)?;
    let mut build = Command::new(vmstrata());
    build.args(["index", "build", "--quiet"]).arg(manifest.top(&dir));
    timed(&mut build).context("an index of the chain")?;
    let owners = manifest.owners().collect();
    Ok(Prepared { dir, manifest, owners })
}

fn read(prepared: &Prepared, timing: Timing) -> Result<f64> {
    let values = session::read(Kind::Vmstrata, &prepared.chain(), &[Figure::RandomRead32], timing)?;
    let of = |(figure, value): &(Figure, f64)| (*figure == Figure::RandomRead32).then_some(*value);
    values.iter().find_map(of).context("nothing was read")
}
