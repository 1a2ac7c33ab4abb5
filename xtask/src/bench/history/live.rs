//! Snapshots of a disk that is served and written, through vmstrata and through stock QEMU.
//!
//! First the history: snapshots with a known number of changed clusters between. Then, at the end of the long chain,
//! snapshots under a guest that writes without a break, whose every request is timed.
//!
//! ```text
//!   ─┤ second │ second ├─ snapshot ─┤ second ├─
//!       └ control ┘ └─── effect ──────┘
//! ```
//!
//! A shared machine does more in one second and less in the next, whoever serves the disk. The control, two seconds between
//! which nothing happens, shows the machine's part.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::client::Client;
use super::super::qmp::Qmp;
use super::super::report::{Report, Row};
use super::super::results::{median, quantile};
use super::super::server::{Disk, Kind, Server};
use super::disk::{self, History, Layer};
use super::guest::Guest;
use super::take::{self, Take, Taken};
use super::trace::Trace;
use super::{BLOCK, CLUSTER, Options, Pace, SEED};
use crate::chain::pattern::{Writer, mix};

/// Memory made ready for a snapshot: more than the copies that it causes.
const MEMORY: usize = 128 << 20;
/// Close snapshots that memory is made ready for at a time.
const TOGETHER: usize = 5;

/// A snapshot under a writing guest.
struct Moment {
    from: Duration,
    to: Duration,
    taken: Taken,
    /// In the two seconds before and in the second after nothing else was done.
    spaced: bool,
}

/// What a guest felt, and what the commands took: one value a snapshot.
#[derive(Default)]
pub(super) struct Felt {
    /// Longest latency of a request around a snapshot, ms.
    longest: Vec<f64>,
    /// The same in as long a time before it, ms.
    usual: Vec<f64>,
    /// Requests of the second after a snapshot over those of the second before.
    after: Vec<f64>,
    /// The same of two seconds between which no snapshot was taken.
    control: Vec<f64>,
    /// Of the command, ms: of snapshots that were taken seconds after the last one.
    commands: Vec<f64>,
    /// Of those that were taken close to the last one, ms.
    close_commands: Vec<f64>,
    /// For how long writes were held, as the server says, ms.
    pauses: Vec<f64>,
}

/// Makes the history through vmstrata.
///
/// # Errors
/// When a command fails, or a block read back is wrong.
pub(super) fn vmstrata(options: &Options, dir: &Path, report: &mut Report) -> Result<(History, Felt)> {
    let path = dir.join("web.qcow2");
    disk::create(&path, options.size)?;
    let mut server =
        Server::start(Kind::Vmstrata, &Disk { path: path.clone(), writable: true, backing: None })?;
    let mut client = server.connect(SEED, false)?;
    let mut take = take::Vmstrata { disk: path.clone(), control: server.control() };
    let mut history = History { disk: path, layers: Vec::new(), written: HashMap::new() };
    let quiet = options.snapshots - options.pace.spaced - options.pace.close;
    for (index, count) in disk::changes(quiet).enumerate() {
        let clusters = disk::draw(options.working_set, options.size, count, index as u64);
        change(&mut client, &mut history, &clusters, index)?;
        take.take(&name(index))?;
        // The base holds more than what was written before the first snapshot.
        history.push(&name(index), (index > 0).then_some(clusters));
    }
    let guest = Guest::start(client, options.working_set);
    let moments = paced(&guest, options.pace, quiet, &mut take, dir)?;
    let (mut client, trace) = guest.stop()?;
    (quiet..options.snapshots).for_each(|index| history.push(&name(index), None));
    history.verify(&mut client, 2000)?;
    let memory = server.resident_bytes()? as f64 / f64::from(1 << 20);
    report.add(Row::median("memory after all snapshots were taken live", "MiB", &[memory]));
    drop(client);
    server.stop()?;
    Ok((history, Felt::new(&moments, options.pace.second, &trace)))
}

/// Takes snapshots of a disk of the same kind through stock QEMU: fewer, as they take their time.
///
/// # Errors
/// When QEMU fails.
pub(super) fn qemu(options: &Options, dir: &Path) -> Result<Felt> {
    let path = dir.join("qemu.qcow2");
    disk::create(&path, options.size)?;
    let mut server = Server::start(Kind::Qemu, &Disk { path: path.clone(), writable: true, backing: None })?;
    let client = server.connect(SEED, false)?;
    let active = ("disk".to_owned(), path);
    let qmp = Qmp::connect(&server.control())?;
    let mut take = take::Qemu { qmp, dir: dir.to_owned(), active, size: options.size };
    let guest = Guest::start(client, options.working_set);
    let pace = Pace {
        // As many of one kind to one of the other: what a flush takes depends on how long ago the last one was.
        spaced: options.pace.spaced.div_ceil(3),
        close: options.pace.close.div_ceil(3),
        ..options.pace
    };
    let moments = paced(&guest, pace, 0, &mut take, dir)?;
    let (client, trace) = guest.stop()?;
    drop(client);
    server.stop()?;
    Ok(Felt::new(&moments, pace.second, &trace))
}

fn name(index: usize) -> String {
    format!("s{index:04}")
}

impl History {
    fn push(&mut self, name: &str, changed: Option<Vec<u64>>) {
        self.layers.push(Layer { path: self.disk.with_extension(format!("{name}.qcow2")), changed });
    }
}

/// One block written in each of `clusters`.
fn change(client: &mut Client, history: &mut History, clusters: &[u64], index: usize) -> Result<()> {
    let round = u16::try_from(index).context("too many snapshots")?;
    for cluster in clusters {
        let blocks = CLUSTER / BLOCK as u64;
        let at = cluster * CLUSTER + mix(*cluster ^ u64::from(round)) % blocks * BLOCK as u64;
        client.write(at, BLOCK, Writer::client(round))?;
        history.written.insert(at, round);
    }
    Ok(())
}

/// Takes close snapshots, then spaced ones.
fn paced(guest: &Guest, pace: Pace, first: usize, take: &mut dyn Take, dir: &Path) -> Result<Vec<Moment>> {
    let mut moments = Vec::new();
    let mut one = |spaced| -> Result<()> {
        let from = guest.now();
        let taken = take.take(&name(first + moments.len()))?;
        moments.push(Moment { from, to: guest.now(), taken, spaced });
        Ok(())
    };
    for done in (0..pace.close).step_by(TOGETHER) {
        let count = (pace.close - done).min(TOGETHER);
        let _memory = pace.memory(dir, count * MEMORY)?;
        for _ in 0..count {
            one(false)?;
            std::thread::sleep(pace.second.mul_f64(0.5));
        }
    }
    for _ in 0..pace.spaced {
        let _memory = pace.memory(dir, MEMORY)?;
        std::thread::sleep(pace.second.mul_f64(2.1));
        one(true)?;
        std::thread::sleep(pace.second.mul_f64(1.1));
    }
    Ok(moments)
}

impl Felt {
    fn new(moments: &[Moment], second: Duration, trace: &Trace) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        let mut felt = Self::default();
        for Moment { from, to, taken, spaced } in moments {
            // A snapshot is felt until some time after its command.
            let after = second.mul_f64(0.1);
            let len = *to + after - *from;
            felt.longest.push(ms(trace.longest(*from, *from + len)));
            let before = from.saturating_sub(after);
            felt.usual.push(ms(trace.longest(before.saturating_sub(len), before)));
            felt.pauses.extend(taken.pause.map(ms));
            if *spaced {
                felt.commands.push(ms(taken.command));
                felt.after.push(trace.change(*from, second));
                felt.control.push(trace.change(*from - second, second));
            } else {
                felt.close_commands.push(ms(taken.command));
            }
        }
        felt
    }
}

/// Rows of both.
pub(super) fn rows(ours: &Felt, qemu: &Felt, report: &mut Report) {
    let longest = "snapshot of the live disk: longest latency of a 4 KiB write, QD8";
    let usual = "the same in as long a time without a snapshot";
    for (part, words) in [(0.5, ""), (0.99, ", p99 of them")] {
        let row = |name: &str, ours: &[f64], qemu: &[f64]| {
            Row::quantile(&format!("{name}{words}"), "ms", ours, part).beside(quantile(qemu, part))
        };
        report.add(row(longest, &ours.longest, &qemu.longest).at_most(5.0));
        report.add(row(usual, &ours.usual, &qemu.usual));
    }
    report.add(Row::median("writes held, as the server reports it", "ms", &ours.pauses));
    let mut add = |row: Row, qemu: &[f64]| report.add(row.beside(median(qemu)));
    let after = "writes in the second after / before a snapshot";
    let control = "the same of two seconds between which no snapshot was taken";
    add(Row::median(after, "", &ours.after).at_least(0.9), &qemu.after);
    add(Row::median(control, "", &ours.control), &qemu.control);
    let command = "time of the command (QEMU: `qemu-img create -b`, `blockdev-snapshot-sync`)";
    let close = "the same, of snapshots half a second after the last one";
    let compared =
        [(command, &ours.commands, &qemu.commands), (close, &ours.close_commands, &qemu.close_commands)];
    for (name, ours, qemu) in compared {
        add(Row::median(name, "ms", ours).at_most(median(qemu)), qemu);
    }
}
