//! Snapshots of a disk that is served and written, through vmstrata and through stock QEMU.
//!
//! First the history: snapshots with a known number of changed clusters between. Then, at the end of the long chain,
//! snapshots under a guest that writes without a break, whose every request is timed.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::client::Client;
use super::super::qmp::Qmp;
use super::super::report::{Report, Row};
use super::super::results::{median, range};
use super::super::server::{Disk, Kind, Server};
use super::disk::{self, History, Layer};
use super::guest::Guest;
use super::machine::{Machine, Watch};
use super::take::{self, Take, Taken};
use super::throughput::{self, Throughput};
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
    /// Nothing else was done in the second before and the second after.
    spaced: bool,
}

/// What happened under a writing guest, in the guest's time.
struct Course {
    pace: Pace,
    moments: Vec<Moment>,
    /// Before each spaced snapshot, a moment at which none was taken.
    controls: Vec<Duration>,
    machine: Machine,
}

/// What a guest felt, and what the commands took: one value a snapshot.
pub(super) struct Felt {
    /// Longest latency of a request around a snapshot, ms.
    longest: Vec<f64>,
    /// Of those snapshots during which the machine itself did not stand still, ms; of none where that cannot be told.
    undisturbed: Vec<f64>,
    /// The same where no snapshot was taken, ms.
    usual: Vec<f64>,
    throughput: Throughput,
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
    let course = paced(&guest, options.pace, quiet, &mut take, dir)?;
    let (mut client, trace) = guest.stop()?;
    (quiet..quiet + course.moments.len()).for_each(|index| history.push(&name(index), None));
    history.verify(&mut client, 2000)?;
    let memory = server.resident_bytes()? as f64 / f64::from(1 << 20);
    report.add(Row::median("memory after all snapshots were taken live", "MiB", &[memory]));
    drop(client);
    server.stop()?;
    Ok((history, Felt::new(&course, &trace)))
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
    let course = paced(&guest, pace, 0, &mut take, dir)?;
    let (client, trace) = guest.stop()?;
    drop(client);
    server.stop()?;
    Ok(Felt::new(&course, &trace))
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

/// Snapshots at their moments; more, close ones, until the machine itself ran during as many as were asked for. Where it stands
/// still time and again, twice as many are enough.
fn paced(guest: &Guest, pace: Pace, first: usize, take: &mut dyn Take, dir: &Path) -> Result<Course> {
    let wanted = pace.close + pace.spaced;
    let mut course = Course { pace, moments: Vec::new(), controls: Vec::new(), machine: Machine::unseen() };
    let mut next = pace;
    while next.close + next.spaced > 0 {
        course.go_on(guest, next, first, take, dir)?;
        let missing = if course.machine.is_known() { wanted - course.undisturbed().count() } else { 0 };
        next = Pace { spaced: 0, close: missing.min(2 * wanted - course.moments.len()), ..pace };
    }
    Ok(course)
}

impl Course {
    /// Takes close snapshots, then those with a second before and after.
    fn go_on(
        &mut self,
        guest: &Guest,
        pace: Pace,
        first: usize,
        take: &mut dyn Take,
        dir: &Path,
    ) -> Result<()> {
        let watch = Watch::begin();
        let close = (0..pace.close).step_by(TOGETHER).map(|done| (pace.close - done).min(TOGETHER));
        for count in close {
            let _memory = pace.memory(dir, count * MEMORY)?;
            for _ in 0..count {
                self.take(guest, false, first, take)?;
                std::thread::sleep(pace.second.mul_f64(0.5));
            }
        }
        for _ in 0..pace.spaced {
            let _memory = pace.memory(dir, MEMORY)?;
            // In the seconds before and after nothing else is done.
            guest.wait_until_even(pace.second);
            self.controls.push(guest.now());
            std::thread::sleep(pace.second.mul_f64(1.1));
            guest.wait_until_even(pace.second);
            self.take(guest, true, first, take)?;
            std::thread::sleep(pace.second.mul_f64(1.1));
        }
        self.machine.add(watch, guest);
        Ok(())
    }

    fn take(&mut self, guest: &Guest, spaced: bool, first: usize, take: &mut dyn Take) -> Result<()> {
        let from = guest.now();
        let taken = take.take(&name(first + self.moments.len()))?;
        self.moments.push(Moment { from, to: guest.now(), taken, spaced });
        Ok(())
    }

    /// The snapshots during which the machine is known not to have stood still.
    fn undisturbed(&self) -> impl Iterator<Item = &Moment> {
        self.moments.iter().filter(|moment| self.machine.ran(moment.from, self.felt_until(moment)))
    }

    /// For how long after its command a snapshot is looked at.
    fn after(&self) -> Duration {
        self.pace.second.mul_f64(0.1)
    }

    fn felt_until(&self, moment: &Moment) -> Duration {
        moment.to + self.after()
    }
}

impl Felt {
    fn new(course: &Course, trace: &Trace) -> Self {
        let (moments, second) = (&course.moments, course.pace.second);
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        let longest = |moment: &Moment| ms(trace.longest(moment.from, course.felt_until(moment)));
        let usual = moments.iter().map(|moment| {
            let len = course.felt_until(moment) - moment.from;
            let to = moment.from.saturating_sub(course.after());
            ms(trace.longest(to.saturating_sub(len), to))
        });
        let commands = |spaced: bool| {
            let those = moments.iter().filter(|moment| moment.spaced == spaced);
            those.map(|moment| ms(moment.taken.command)).collect()
        };
        let spaced: Vec<Duration> = moments.iter().filter(|one| one.spaced).map(|one| one.from).collect();
        Self {
            longest: moments.iter().map(longest).collect(),
            undisturbed: course.undisturbed().map(longest).collect(),
            usual: usual.collect(),
            throughput: Throughput::new(trace, &spaced, &course.controls, second, &course.machine),
            commands: commands(true),
            close_commands: commands(false),
            pauses: moments.iter().filter_map(|moment| moment.taken.pause.map(ms)).collect(),
        }
    }
}

/// Rows of both. `alone` are the writes of a second without any server ([`throughput::rows`]).
pub(super) fn rows(ours: &Felt, qemu: &Felt, alone: &[f64], report: &mut Report) {
    latency_rows(ours, qemu, report);
    throughput::rows(&ours.throughput, &qemu.throughput, alone, report);
    let command = "time of the command (QEMU: `qemu-img create -b`, `blockdev-snapshot-sync`)";
    let close = "the same, of snapshots half a second after the last one";
    let compared =
        [(command, &ours.commands, &qemu.commands), (close, &ours.close_commands, &qemu.close_commands)];
    for (name, ours, qemu) in compared {
        beside(report, Row::median(name, "ms", ours).at_most(median(qemu)), qemu);
    }
}

fn latency_rows(ours: &Felt, qemu: &Felt, report: &mut Report) {
    let largest = |values: &[f64]| range(values).1;
    let longest = "snapshot of the live disk: longest latency of any 4 KiB write, QD8";
    let usual = "longest latency in as long a time without a snapshot";
    report.add(Row::largest(longest, "ms", &ours.longest).at_most(5.0).beside(largest(&qemu.longest)));
    beside(report, Row::median("the same, median of the snapshots", "ms", &ours.longest), &qemu.longest);
    if !ours.undisturbed.is_empty() && !qemu.undisturbed.is_empty() {
        let share = |felt: &Felt| 1.0 - felt.undisturbed.len() as f64 / felt.longest.len() as f64;
        let stalled = "snapshots during which the machine itself stood still for 3 ms or longer";
        report.add(Row::median(stalled, "of all", &[share(ours)]).beside(share(qemu)));
        let quiet = Row::largest("longest latency of the other snapshots", "ms", &ours.undisturbed);
        report.add(quiet.at_most(5.0).beside(largest(&qemu.undisturbed)));
    }
    report.add(Row::largest(usual, "ms", &ours.usual).beside(largest(&qemu.usual)));
    beside(report, Row::median("the same, median", "ms", &ours.usual), &qemu.usual);
    report.add(Row::largest("writes held, as the server reports it", "ms", &ours.pauses));
}

/// Adds a row with the median of what QEMU shows.
fn beside(report: &mut Report, row: Row, qemu: &[f64]) {
    report.add(row.beside(median(qemu)));
}
