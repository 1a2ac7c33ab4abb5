//! What takes longer the larger a guest is: to find the class of every page, to take it, and to start it again.

use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use super::super::machine::settle;
use super::super::server;
use super::Options;
use super::sample::{Of, Sample, Samples};
use super::stage::Stage;
use super::{rollback, taken};
use crate::guest::{Guest, Task, must};

/// Work that leaves most of a large guest's memory free, and work that fills it with file cache.
const ROOMY: &str = "files";
const FULL: &str = "archive";
/// How often classes are found in a round.
const TIMES: usize = 5;

/// Measures guests with `mib` of memory.
pub(super) fn measure(guest: &Guest, mib: u32, options: &Options, samples: &mut Samples) -> Result<()> {
    samples.of = Of::Large(mib);
    {
        let stage = Stage::boot(guest, Task::Work(ROOMY), mib, &options.dir)?;
        classify(&stage, options.rounds, samples)?;
    }
    samples.of = Of::LargeFull(mib);
    let mut stage = Stage::boot(guest, Task::Work(FULL), mib, &options.dir)?;
    classify(&stage, options.rounds, samples)?;
    for round in 0..options.rounds {
        taken::modes(&stage, round, samples)?;
    }
    rollback::measure(&mut stage, options, samples)
}

fn classify(stage: &Stage, rounds: usize, samples: &mut Samples) -> Result<()> {
    settle();
    for _ in 0..rounds * TIMES {
        let start = Instant::now();
        // On one processor, while the guest is held.
        let mut pages = Command::new("taskset");
        pages.args(["--cpu-list", "0"]).arg(server::vmstrata());
        must(pages.args(["vm", "pages", "--json", "--pause", "--qmp"]).arg(stage.guest.monitor()))?;
        samples.add(Sample::Classify, start.elapsed().as_secs_f64());
    }
    Ok(())
}
