//! A server with a long log is killed, and starts as after a power failure.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::super::fleet::{Fleet, Served};
use super::super::fresh::BLOCK;
use super::super::history::take::timed;
use super::super::report::{Report, Row};
use super::{DISKS, Options, SIZE, flushed};

/// Turns in which the log fills.
const TURNS: u32 = 4;

pub(super) fn run(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let (mut times, mut bytes) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let dir = dir.join(round.to_string());
        let size = ["--flush-log-size".to_owned(), options.log.to_string()];
        let mut fleet = Fleet::start(Served::WithLog, (DISKS, SIZE), &dir, &size)?;
        for _ in 0..TURNS {
            fleet.work(|round, _| flushed(options, round, 8, BLOCK))?;
        }
        fleet.server.crash()?;
        set_other_boot(&dir.join(Served::WithLog.name()).join("flush.log"))?;
        rustix::fs::sync();
        fs::write("/proc/sys/vm/drop_caches", "3").context("drop the page cache: as the superuser")?;
        let start = Instant::now();
        fleet.server.restart()?;
        fleet.wait()?;
        times.push(start.elapsed().as_secs_f64());
        let log = fleet.server.log();
        let said =
            log.lines().rfind(|line| line.contains("the flush log was recovered")).context("no recovery")?;
        let read = said.split_once("bytes=").and_then(|(_, rest)| rest.split(' ').next()).context("bytes")?;
        let read: u64 = read.parse()?;
        ensure!(read > 0, "the log was empty: {log}");
        bytes.push(read as f64 / f64::from(1 << 20));
        let images = fleet.images.clone();
        fleet.stop()?;
        for image in images {
            timed(Command::new("qemu-img").args(["check", "-q"]).arg(image))?;
        }
        fs::remove_dir_all(&dir)?;
    }
    let name = format!("a log of {} MiB, {DISKS} disks: from the start to being served", options.log >> 20);
    report.add(Row::median(&name, "s", &times).at_most(5.0));
    report.add(Row::median("the same: what was in the log", "MiB", &bytes));
    Ok(())
}

/// Has the log's headers name another boot of the host: bytes 48 to 63, before a checksum of all before it.
fn set_other_boot(log: &Path) -> Result<()> {
    let file = File::options().read(true).write(true).open(log)?;
    for header in 0..2 {
        let mut bytes = [0; 88];
        file.read_exact_at(&mut bytes, header * 4096)?;
        bytes[48..64].fill(7);
        let sum = crc32c::crc32c(&bytes[..80]).to_le_bytes();
        bytes[80..84].copy_from_slice(&sum);
        file.write_all_at(&bytes, header * 4096)?;
    }
    Ok(file.sync_all()?)
}
