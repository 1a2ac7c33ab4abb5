//! Writes while epochs are shipped, beside the same disk alone and on the NAS.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::super::fresh::full;
use super::super::load::Load;
use super::super::machine::{by_turns, settle};
use super::super::report::{Report, Row};
use super::super::results::ratios;
use super::super::server::Kind;
use super::stage::{Peer, Side, Stage, random_writes};
use crate::nas::WIRE_BYTES_PER_S;

/// Who takes a turn.
enum Who<'a> {
    Tiered(&'a mut Side),
    Local(&'a mut Side),
    OnNas(usize, &'a mut Peer),
}

/// What rounds gave.
#[derive(Default)]
struct Samples {
    tiered: Vec<f64>,
    local: Vec<f64>,
    /// Times of 99 of 100 requests, in ms.
    tiered_p99: Vec<f64>,
    local_p99: Vec<f64>,
    /// By QEMU's cache mode.
    on_nas: [Vec<f64>; 2],
    /// Of the host's processor for a GiB that is shipped while no guest writes, and how much of the wire that uses.
    processor_s: Vec<f64>,
    of_wire: Vec<f64>,
}

/// QEMU's cache modes.
const CACHES: [&str; 2] = ["none", "writeback"];

pub(super) fn run(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let options = stage.options;
    let image = |name: &str| full(options.size, Kind::Vmstrata, &stage.dir.join(name));
    let (tiered, local) = (image("tiered")?, image("local")?);
    // Before a guest writes to it.
    let mut peers = CACHES.map(|cache| stage.peer(&local, cache));
    let [none, writeback] = &mut peers;
    let (none, writeback) = match (none, writeback) {
        (Ok(none), Ok(writeback)) => (none, writeback),
        _ => return peers.into_iter().find_map(Result::err).map_or(Ok(()), Err),
    };
    let mut local = stage.local(&local)?;
    let random = |round_trip: Duration| {
        let name = format!("4 KiB random writes, QD8, NAS at {} ms", round_trip.as_millis());
        Work { name, round_trip, depth: 8, fua: false, bound: 0.8 }
    };
    let (name, round_trip) = ("4 KiB random writes, each FUA, QD1".to_owned(), options.round_trips[0]);
    let flushed = Work { name, round_trip, depth: 1, fua: true, bound: 0.9 };
    let works = options.round_trips.iter().map(|time| random(*time)).chain([flushed]);
    for (number, work) in works.enumerate() {
        // Nobody merges what is published, and the NAS is in memory: each with a repository of its own.
        let name = format!("writes-{number}");
        stage.nas.set_round_trip(Duration::ZERO);
        let mut side = stage.host(1, &tiered, &name, (options.window, false))?;
        stage.nas.set_round_trip(work.round_trip);
        work.measure(stage, (&mut side, &mut local), [&mut *none, &mut *writeback], report)?;
        side.stop()?;
        stage.forget(1, &name)?;
    }
    local.stop()
}

struct Work {
    name: String,
    round_trip: Duration,
    depth: usize,
    fua: bool,
    /// Of tiered / local.
    bound: f64,
}

impl Work {
    fn measure(
        &self,
        stage: &Stage<'_>,
        (tiered, local): (&mut Side, &mut Side),
        [none, writeback]: [&mut Peer; 2],
        report: &mut Report,
    ) -> Result<()> {
        let mut samples = Samples::default();
        for round in 0..stage.options.rounds {
            settle();
            let mut order = [
                Who::Tiered(&mut *tiered),
                Who::Local(&mut *local),
                Who::OnNas(0, &mut *none),
                Who::OnNas(1, &mut *writeback),
            ];
            by_turns(&mut order, round);
            let load = random_writes(round.into(), self.depth, self.fua, stage.options.turn);
            for who in order {
                samples.take(who, &load)?;
            }
        }
        self.report(&samples, report);
        Ok(())
    }

    fn report(&self, samples: &Samples, report: &mut Report) {
        let name = |what: &str| format!("{}{what}", self.name);
        report.add(Row::median(&name(""), "IOPS", &samples.tiered));
        report.add(
            Row::median(&name(": tiered / local"), "", &ratios(&samples.tiered, &samples.local))
                .at_least(self.bound),
        );
        let slower = ratios(&samples.tiered_p99, &samples.local_p99);
        let slower = Row::median(&name(": p99, tiered / local"), "", &slower);
        report.add(if self.fua { slower } else { slower.at_most(2.0) });
        for (cache, on_nas) in CACHES.iter().zip(&samples.on_nas) {
            report.add(Row::median(
                &name(&format!(": tiered / on the NAS, cache={cache}")),
                "",
                &ratios(&samples.tiered, on_nas),
            ));
        }
        report.add(Row::median(&name(": processor time for a GiB shipped"), "s", &samples.processor_s));
        report.add(Row::median(&name(": what is left is shipped, of the wire"), "", &samples.of_wire));
    }
}

impl Samples {
    fn take(&mut self, who: Who<'_>, load: &Load) -> Result<()> {
        match who {
            Who::Tiered(side) => {
                let (rate, p99) = side.client.run_timed(load)?;
                self.tiered.push(rate);
                self.tiered_p99.push(p99);
                // What is left is shipped before others have their turn.
                let before = side.processor_s()?;
                let start = Instant::now();
                let bytes = side.ship()? as f64;
                self.of_wire.push(bytes / start.elapsed().as_secs_f64() / WIRE_BYTES_PER_S);
                let s = side.processor_s()? - before;
                self.processor_s.push(s / (bytes.max(1.0) / f64::from(1 << 30)));
            }
            Who::Local(side) => {
                let (rate, p99) = side.client.run_timed(load)?;
                self.local.push(rate);
                self.local_p99.push(p99);
            }
            Who::OnNas(cache, peer) => {
                // Its rate is far steadier than those beside it.
                let time = load.time.min(Duration::from_secs(5));
                self.on_nas[cache].push(peer.client.run_timed(&Load { time, ..*load })?.0);
                peer.client.flush()?;
            }
        }
        Ok(())
    }
}
