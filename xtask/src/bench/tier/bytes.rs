//! Bytes that go to the NAS, for those that the guest writes; without those of merges.

use std::time::Duration;

use anyhow::Result;

use super::super::fresh::BLOCK;
use super::super::load::{Access, Load};
use super::super::report::{Report, Row};
use super::stage::{NEVER, Side, Stage, distinct_bytes, random_writes};
use crate::chain::pattern::Writer;

/// Epochs of few writes, and how many writes each has.
const FEW_EPOCHS: u64 = 20;
const FEW: u64 = 100;
const PIECE: usize = 1 << 20;

pub(super) fn run(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    sequential(stage, report)?;
    random(stage, report)?;
    overwriting(stage, report)
}

fn tiered(stage: &Stage<'_>, name: &str, size: u64) -> Result<Side> {
    let image = stage.empty(name, size)?;
    stage.host(1, &image, name, (NEVER, false))
}

fn fill(side: &mut Side, bytes: u64, round: u16) -> Result<()> {
    (0..bytes).step_by(PIECE).try_for_each(|at| side.client.write(at, PIECE, Writer::client(round)))
}

fn sequential(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let mut side = tiered(stage, "sequential", stage.options.size)?;
    let mut samples = Vec::new();
    for round in 0..stage.options.rounds {
        let bytes = stage.options.size / 4;
        side.wait_for_merges()?;
        fill(&mut side, bytes, round as u16)?;
        samples.push(side.ship()? as f64 / bytes as f64);
    }
    report.add(Row::median("bytes to the NAS / written: sequential", "", &samples).at_most(1.05));
    side.stop()
}

/// Blocks that are not written again, all over a large disk.
fn random(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let options = stage.options;
    let mut side = tiered(stage, "random", options.sparse)?;
    let mut epoch = |round: u32, count: u64| -> Result<f64> {
        let access = Access::Share { round: round as u16, count };
        let load = Load { access, fua: false, block: BLOCK, depth: 8, time: Duration::MAX, seed: 0 };
        side.wait_for_merges()?;
        side.client.run(&load)?;
        let sent = stage.nas.network().sent_bytes(1)?;
        let shipped = side.ship()?;
        let with_headers = stage.nas.network().sent_bytes(1)? - sent;
        let written = (count * BLOCK as u64) as f64;
        eprintln!("         {:.3} with the protocol's own bytes", with_headers as f64 / written);
        Ok(shipped as f64 / written)
    };
    let many = (0..options.rounds).map(|round| epoch(round, options.counted)).collect::<Result<Vec<_>>>()?;
    let gib = options.sparse >> 30;
    let name =
        format!("bytes to the NAS / written: {} random writes an epoch over {gib} GiB", options.counted);
    report.add(Row::median(&name, "", &many).at_most(1.25));
    // Past those above, in the same order.
    let first = options.counted * u64::from(options.rounds) / FEW;
    let few = (0..FEW_EPOCHS).map(|round| epoch((first + round) as u32, FEW)).collect::<Result<Vec<_>>>()?;
    let name = format!("bytes to the NAS / written: {FEW} random writes an epoch over {gib} GiB");
    report.add(Row::median(&name, "", &few).at_most(2.2));
    side.stop()
}

/// Blocks that are written many times in one epoch, on a disk so full that their epochs are not merged meanwhile.
fn overwriting(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let mut side = tiered(stage, "overwriting", stage.options.size)?;
    fill(&mut side, stage.options.size, 0)?;
    side.ship()?;
    let mut samples = Vec::new();
    for round in 0..stage.options.rounds {
        // Less than a GiB, which would end the epoch.
        let load = random_writes(round.into(), 8, false, stage.options.turn / 10);
        side.wait_for_merges()?;
        let outcome = side.client.run_watched(&load, stage.options.size / 16, &mut ())?;
        samples.push(side.ship()? as f64 / distinct_bytes(&outcome) as f64);
    }
    report.add(
        Row::median("bytes to the NAS / distinct blocks of an epoch: overwriting", "", &samples).at_most(1.1),
    );
    side.stop()
}
