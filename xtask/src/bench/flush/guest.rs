//! Databases and ext4 in a guest, on disks of one server.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::super::fleet::{Fleet, Keyed, Served, empty};
use super::super::machine::{by_turns, settle};
use super::super::report::{Report, Row};
use super::super::results::{median, ratios};
use super::super::server::{Disk, Kind, Server};
use super::Options;
use crate::guest::flushes::{Flushing, WORKLOADS};

/// Bytes of the disk of databases, of that of files, and of that of a journal.
const SIZES: [u64; 3] = [1 << 30, 1 << 30, 64 << 20];
/// How old a write of the tiered disk becomes before it is published.
const WINDOW_S: u32 = 30;

/// Who serves, and whether the disk of files is tiered.
const SIDES: [(Served, bool); 4] = [
    (Served::WithLog, false),
    (Served::WithoutLog, false),
    (Served::Qemu, false),
    (Served::WithoutLog, true),
];
/// Workloads of databases, which have a bound; the others compare journals.
const DATABASES: usize = 2;

pub(super) fn run(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let flushing = Flushing::prepare(dir)?;
    let databases = databases(&flushing, dir)?;
    // `[side][workload][round]`
    let mut rates = vec![vec![Vec::new(); WORKLOADS.len()]; SIDES.len()];
    for round in 0..options.rounds {
        let mut turns: Vec<_> = SIDES.iter().zip(&mut rates).collect();
        by_turns(&mut turns, round);
        for (&(side, is_tiered), rates) in turns {
            let dir = tempfile::tempdir_in(dir)?;
            let disks = disks(side, is_tiered, &databases, dir.path())?;
            // Or the guest's flushes would wait for the copy.
            rustix::fs::sync();
            settle();
            let fleet = Fleet::over(side, &disks, dir.path(), &[])?;
            let sockets = [0, 1, 2].map(|disk: usize| fleet.sockets[disk].as_path());
            let found = flushing.work(sockets, options.operations)?;
            fleet.stop()?;
            rates.iter_mut().zip(found).for_each(|(rates, rate)| rates.push(rate));
        }
    }
    for (index, workload) in WORKLOADS.iter().enumerate() {
        let [log, without, qemu, tiered] = [0, 1, 2, 3].map(|side: usize| &rates[side][index]);
        report.add(Row::median(&format!("guest, {workload}"), "a second", log).beside(median(qemu)));
        let row =
            Row::median(&format!("guest, {workload}: with the log / without"), "", &ratios(log, without));
        report.add(if index < DATABASES { row.at_least(1.3) } else { row });
        if index >= DATABASES {
            report.add(Row::median(&format!("guest, {workload}: without the log"), "a second", without));
            report.add(Row::median(&format!("guest, {workload}: files in a tier"), "a second", tiered));
        }
    }
    Ok(())
}

/// The disks of a side: databases, files, a journal.
fn disks(side: Served, is_tiered: bool, databases: &Path, dir: &Path) -> Result<Vec<Keyed>> {
    let image = dir.join("databases.qcow2");
    fs::copy(databases, &image)?;
    let mut disks = vec![(image, String::new())];
    for (name, size) in ["files", "journal"].into_iter().zip(&SIZES[1..]) {
        let (mut place, mut keys) = (dir.to_owned(), String::new());
        if is_tiered && name == "files" {
            place = dir.join("repository");
            fs::create_dir(&place)?;
            keys = format!(",tier={},window={WINDOW_S}", dir.join("tier").display());
        }
        let image = place.join(name).with_extension("qcow2");
        empty(side.kind(), &image, *size)?;
        disks.push((image, keys));
    }
    Ok(disks)
}

/// The image of databases that each turn begins with.
fn databases(flushing: &Flushing, dir: &Path) -> Result<PathBuf> {
    let path = dir.join("databases.qcow2");
    empty(Kind::Vmstrata, &path, SIZES[0])?;
    let mut server =
        Server::start(Kind::Vmstrata, &Disk { path: path.clone(), writable: true, backing: None })?;
    server.wait_for_vhost_user()?;
    flushing.make_databases(&server.vhost_user())?;
    server.stop()?;
    Ok(path)
}
