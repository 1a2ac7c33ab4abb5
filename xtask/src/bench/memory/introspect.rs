//! How long it takes to find the class of every page of a large guest.

use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use super::super::server;
use super::Options;
use super::sample::{Sample, Samples};
use super::stage::Stage;
use crate::guest::{Guest, Task, must};

/// Classifies the pages of a guest at work some times.
pub(super) fn measure(guest: &Guest, mib: u32, options: &Options, samples: &mut Samples) -> Result<()> {
    let stage = Stage::boot(guest, Task::Work("files"), mib, &options.dir)?;
    for _ in 0..options.rounds {
        let start = Instant::now();
        must(
            Command::new(server::vmstrata()).args(["vm", "pages", "--json", "--memory"]).arg(stage.memory()),
        )?;
        samples.add(Sample::Classify, start.elapsed().as_secs_f64());
    }
    Ok(())
}
