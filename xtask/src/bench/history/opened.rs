//! Opening the disk with all its layers, and what that leaves in memory.

use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use super::super::report::{Report, Row};
use super::super::server::{Disk, Kind, Server, vmstrata};
use super::disk::History;
use super::take::timed;
use super::{BLOCK, SEED};
use crate::chain::pattern::Writer;

/// One opening: milliseconds to the first read answered, and MiB after it.
type Opened = (f64, f64);

/// Opens the disk as it is, in stock QEMU, and without its indices, which are gone afterwards.
///
/// # Errors
/// When a server fails or a block is wrong.
pub(super) fn measure(history: &History, rounds: u32, report: &mut Report) -> Result<()> {
    let (mut times, mut memory) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (ms, mib) = open(Kind::Vmstrata, history, 200)?;
        times.push(ms);
        memory.push(mib);
    }
    let (qemu_ms, qemu_mib) = open(Kind::Qemu, history, 10)?;
    let mut without = Vec::new();
    for _ in 0..rounds.div_ceil(2) {
        timed(Command::new(vmstrata()).args(["index", "drop", "--quiet"]).arg(&history.disk))?;
        without.push(open(Kind::Vmstrata, history, 10)?.0);
    }
    let layers = history.layers.len() + 1;
    let name = format!("open {layers} layers: start of the server to its first read answered");
    report.add(Row::median(&name, "ms", &times).at_most(20.0).beside(qemu_ms));
    report.add(Row::median("the same without index", "ms", &without).beside(qemu_ms));
    report.add(Row::largest("memory after that", "MiB", &memory).at_most(16.0).beside(qemu_mib));
    Ok(())
}

/// Opens the disk as a guest's; then reads `blocks` back, outside of what is measured.
fn open(kind: Kind, history: &History, blocks: usize) -> Result<Opened> {
    let (at, round) = history.written.iter().next().expect("something was written");
    let disk = Disk { path: history.disk.clone(), writable: kind == Kind::Vmstrata, backing: None };
    let start = Instant::now();
    let mut server = Server::start(kind, &disk)?;
    let mut client = server.connect(SEED, !disk.writable)?;
    client.read(*at, BLOCK)?;
    let ms = start.elapsed().as_secs_f64() * 1000.0;
    let mib = server.resident_bytes()? as f64 / f64::from(1 << 20);
    client.check(*at, BLOCK, &|_| Some(Writer::client(*round)))?;
    history.verify(&mut client, blocks)?;
    drop(client);
    server.stop()?;
    Ok((ms, mib))
}
