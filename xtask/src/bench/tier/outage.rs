//! Hosts and a NAS that go and come back.

use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::super::fresh::{BLOCK, full};
use super::super::machine::settle;
use super::super::report::{Report, Row};
use super::super::server::Kind;
use super::stage::{NEVER, Stage, random_writes};
use crate::chain::pattern::Writer;
use crate::nas::WIRE_BYTES_PER_S;

/// From the command to the first read on another host, with epochs that nobody has merged.
pub(super) fn take_over(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let options = stage.options;
    let image = stage.empty("taken-over", options.size)?;
    let mut first = stage.host(1, &image, "taken-over", (NEVER, false))?;
    let writer = Writer::client(1);
    let place = |number: u64| number * BLOCK as u64 % options.size;
    for number in 0..options.epochs {
        first.client.write(place(number), BLOCK, writer)?;
        first.host.sync()?;
    }
    let layers = first.host.status()?.layers as u64;
    ensure!(layers == options.epochs + 1, "{layers} layers");
    drop(first.client);
    first.host.crash()?;
    stage.nas.set_round_trip(options.far);
    let mut times = Vec::new();
    for round in 0..u64::from(options.rounds) {
        // A host that has nothing of the disk.
        let dir = stage.host_dir(2, "taken-over");
        if dir.exists() {
            std::fs::remove_dir_all(&dir)?;
        }
        settle();
        let start = Instant::now();
        let mut second = stage.host(2, &image, "taken-over", (NEVER, true))?;
        let at = place(round * options.epochs / u64::from(options.rounds));
        second.client.read(at, BLOCK)?;
        times.push(start.elapsed().as_secs_f64());
        second.client.check(at, BLOCK, &|_| Some(writer))?;
        drop(second.client);
        second.host.crash()?;
    }
    let (epochs, ms) = (options.epochs, options.far.as_millis());
    let name = format!("take-over of {epochs} epochs, NAS at {ms} ms: command to first read");
    report.add(Row::median(&name, "s", &times).at_most(2.0));
    Ok(())
}

/// A full disk, a guest that writes all the time, and a NAS that is killed and started again.
pub(super) fn outage(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let options = stage.options;
    let image = full(options.size, Kind::Vmstrata, &stage.dir.join("outage"))?;
    let mut side = stage.host(1, &image, "outage", (options.short_window, false))?;
    let (mut rates, mut errors) = (Vec::new(), 0);
    for round in 0..options.rounds {
        let load = random_writes(round.into(), 8, false, options.short_window + options.outage);
        let client = &mut side.client;
        thread::scope(|scope| -> Result<()> {
            let guest = scope.spawn(move || client.run(&load));
            thread::sleep(options.short_window);
            stage.nas.crash()?;
            errors += usize::from(guest.join().expect("no panic").is_err());
            Ok(())
        })?;
        stage.nas.boot()?;
        let start = Instant::now();
        let bytes = side.ship()?;
        ensure!(bytes > 0, "nothing was left to ship");
        rates.push(bytes as f64 / start.elapsed().as_secs_f64() / WIRE_BYTES_PER_S);
    }
    let s = options.outage.as_secs();
    report.add(
        Row::largest(&format!("guests' errors while the NAS is gone for {s} s"), "", &[errors as f64])
            .at_most(0.0),
    );
    report.add(Row::median("what was written meanwhile is shipped, of the wire", "", &rates).at_least(0.9));
    side.stop()
}

/// A host is killed while the NAS is gone, and begins again with what was not shipped.
pub(super) fn restart(stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let options = stage.options;
    let image = full(options.size, Kind::Vmstrata, &stage.dir.join("restart"))?;
    let start = || stage.host(1, &image, "restart", (options.short_window, false));
    let (mut times, mut left) = (Vec::new(), Vec::new());
    let mut side = start()?;
    for round in 0..options.rounds {
        stage.nas.crash()?;
        let writer = Writer::client(2 + round as u16);
        let piece = 1 << 20;
        for at in (0..options.size).step_by(piece) {
            side.client.write(at, piece, writer)?;
        }
        side.client.flush()?;
        left.push(side.host.status()?.unpublished_bytes as f64 / f64::from(1 << 30));
        drop(side.client);
        side.host.crash()?;
        stage.nas.boot()?;
        settle();
        let begun = Instant::now();
        side = start()?;
        side.client.read(0, BLOCK)?;
        times.push(begun.elapsed().as_secs_f64() * 1000.0);
        side.client.check(options.size / 2, BLOCK, &|_| Some(writer))?;
        side.host.sync().context("what was left")?;
    }
    report.add(Row::median("not shipped when the host is killed", "GiB", &left));
    report.add(Row::median("restart of that host: command to first read", "ms", &times).at_most(100.0));
    side.stop()
}
