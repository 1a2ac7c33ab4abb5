//! Random reads of 1,000 layers with their indices, over those of one layer, on disks whose data is there.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::cached::Cached;
use super::super::client::Client;
use super::super::floor::Files;
use super::super::load::{Access, Load};
use super::super::machine::{by_turns, settle};
use super::super::prepared::Prepared;
use super::super::report::{Report, Row};
use super::super::results::ratios;
use super::super::server::{Kind, Server, vmstrata};
use super::super::session::Chain;
use super::take::timed;
use super::{CLUSTER, Options, SEED};
use crate::chain::{self, Base, Plan, Spec};

/// What part of a second a turn lasts, in which one disk is read and the other waits. A virtual machine's processors change
/// their speed by half within a second, as what else their host runs comes and goes; the two turns of a pair meet the same.
const PART: u32 = 20;
/// Pairs of turns, each time the two are served.
const PAIRS: u32 = 60;

/// Compares them in pairs of turns, with both served at the same time.
///
/// # Errors
/// When a server fails or serves a wrong byte.
pub(super) fn measure(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let layers = options.snapshots as u32;
    let (one, long) = (prepare(options, dir, 1)?, prepare(options, dir, layers)?);
    rustix::fs::sync();
    let _cached = Cached::new(&[one.paths(), long.paths()])?;
    let (mut slow, mut fast) = (Rates::default(), Rates::default());
    settle();
    for round in 0..options.rounds {
        let (mut one, mut long) = (Reader::start(&one)?, Reader::start(&long)?);
        let mut both = [(&mut one, &mut fast), (&mut long, &mut slow)];
        by_turns(&mut both, round);
        for (reader, rates) in &mut both {
            rates.first.push(reader.read(options.pace.second / 4, 1)?);
        }
        for pair in 0..PAIRS {
            let (time, seed) = (options.pace.second / PART, u64::from(2 + pair));
            both.reverse();
            for (reader, rates) in &mut both {
                rates.lasting.push(reader.read(time, seed)?);
            }
            for (reader, rates) in &mut both {
                rates.plain.push(reader.files.read(time, seed)?);
            }
        }
        for (reader, _) in &mut both {
            reader.check(options.pace.second / 4)?;
        }
        one.stop()?;
        long.stop()?;
    }
    rows(layers, &slow, &fast, report);
    Ok(())
}

fn rows(layers: u32, slow: &Rates, fast: &Rates, report: &mut Report) {
    let of = |what: &str| format!("4 KiB random reads, QD32: {what}");
    report.add(Row::median(&of("1 layer"), "IOPS", &fast.lasting));
    report.add(Row::median(&of(&format!("{layers} layers")), "IOPS", &slow.lasting));
    let name = of(&format!("{layers} layers / 1 layer"));
    report.add(Row::median(&name, "", &ratios(&slow.lasting, &fast.lasting)).at_least(0.95));
    let name = "the same in the first quarter of a second, in which files are opened";
    report.add(Row::median(name, "", &ratios(&slow.first, &fast.first)));
    let name =
        format!("4 KiB reads by a loop of `pread`, without a server: files of {layers} layers / of 1 layer");
    report.add(Row::median(&name, "", &ratios(&slow.plain, &fast.plain)));
}

/// Requests a second, of one disk.
#[derive(Default)]
struct Rates {
    /// From the moment on that a client is there.
    first: Vec<f64>,
    /// After that.
    lasting: Vec<f64>,
    /// By nothing but `pread`.
    plain: Vec<f64>,
}

/// A disk that is served, and who reads it.
struct Reader<'a> {
    chain: Chain<'a>,
    files: Files,
    server: Server,
    client: Client,
}

impl<'a> Reader<'a> {
    fn start(prepared: &'a Prepared) -> Result<Self> {
        let (chain, files) = (prepared.chain(), Files::open(&prepared.paths())?);
        let mut server = Server::start(Kind::Vmstrata, &chain.read_only())?;
        let client = server.connect(SEED, true)?;
        Ok(Self { chain, files, server, client })
    }

    /// Reads for `time`; requests a second.
    fn read(&mut self, time: Duration, seed: u64) -> Result<f64> {
        let load = Load { access: Access::RandomRead, fua: false, block: 4 << 10, depth: 32, time, seed };
        Ok(self.client.run(&load)?.iops())
    }

    /// Looks at blocks drawn from the whole disk.
    fn check(&mut self, time: Duration) -> Result<()> {
        let Self { chain, client, .. } = self;
        client.verify(time, false, &|at| chain.writer(at))?;
        Ok(())
    }

    fn stop(self) -> Result<()> {
        drop(self.client);
        self.server.stop()
    }
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
