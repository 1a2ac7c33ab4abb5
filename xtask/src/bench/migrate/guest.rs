//! Transactions of SQLite in a guest, while its disk moves between two directories of this machine.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::super::cached::forget;
use super::super::fresh::full;
use super::super::machine::by_turns;
use super::super::mover::{Mover, beside};
use super::super::report::{Report, Row};
use super::super::server::Kind;
use super::Options;
use super::real::{CONTROLLED, SEQUENTIAL};
use crate::guest::flushes::Flushing;

pub(super) fn run(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    std::fs::create_dir(dir)?;
    let flushing = Flushing::prepare(dir)?;
    let mut mover = Mover::new(full(options.size, Kind::Vmstrata, &dir.join("disk"))?)?;
    let mut guest = flushing.transact(&mover.server.vhost_user())?;
    let mut without = Vec::new();
    // Of each way: during a move / without, and the move's rate.
    let mut found = [SEQUENTIAL, CONTROLLED].map(|way| (way, Vec::new(), Vec::new()));
    for round in 0..options.rounds {
        let start = Instant::now();
        let alone = guest.rate(|| start.elapsed() < options.turn)?;
        without.push(alone);
        let mut turns: Vec<_> = found.iter_mut().collect();
        by_turns(&mut turns, round);
        for ((_, how), ratios, rates) in turns {
            rustix::fs::sync();
            for entry in mover.path.parent().context("a directory")?.read_dir()? {
                let path = entry?.path();
                if path.is_file() {
                    forget(&path)?;
                }
            }
            let mut command = mover.command(None);
            command.args(*how);
            let ((said, took), during) = beside(&mut command, |runs| guest.rate(runs))?;
            ratios.push(during / alone);
            rates.push(mover.moved(&said)?.copied_bytes as f64 / 1e6 / took.as_secs_f64());
        }
    }
    guest.stop()?;
    mover.server.stop()?;
    report.add(Row::median("SQLite in a guest: transactions without a move", "a second", &without));
    for ((way, _), ratios, rates) in &found {
        report.add(Row::median(
            &format!("SQLite in a guest, {way}: transactions during a move / without"),
            "",
            ratios,
        ));
        report.add(Row::median(&format!("SQLite in a guest, {way}: the move"), "MB/s", rates));
    }
    Ok(())
}
