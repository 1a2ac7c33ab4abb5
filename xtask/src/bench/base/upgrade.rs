//! An upgrade that all guests of a host apply, and that the next version of their base has.
//!
//! ```text
//!   publisher ─► base v2: v1 and the upgrade ───────────────────────────┐
//!   guests ────► their disks, clones of v1: the upgrade, and their own ─┴─► rebase onto v2 ─► what is left
//! ```
//!
//! The disks are tiered, and what their guests write stays on the host for the time of the upgrade; or they lie on the NAS themselves. Stock QEMU
//! has its overlays on the NAS.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::super::client::Client;
use super::super::history::take::timed;
use super::super::report::{Report, Row};
use super::super::results::{median, ratios};
use super::super::server::{Disk, Kind, Server, vmstrata};
use super::Options;
use super::stage::{Overlays, SEED, Served, Stage, at_once};
use crate::chain::pattern::{Writer, mix};

/// The host of the guests, and that of who publishes the base.
const HOST: u8 = 1;
const PUBLISHER: u8 = 2;
/// A file of the upgrade lies in a slot of its own, and has from one block to half of it.
const SLOT: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SIZES: u64 = 8;
/// Every so many files: one is written twice, and all are flushed.
const REWRITTEN: usize = 5;
const FLUSHED: usize = 8;
/// Of the disk: the part that the upgrade writes.
const UPGRADED: u64 = 16;
/// Blocks of each guest's own, one of which is written with each file: its package database, its journal.
const OWN_BLOCKS: u64 = 64;

/// Where guests' disks lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placement {
    Tiered,
    OnNas,
}

/// What a guest writes.
struct Upgrade {
    size: u64,
    /// Place and length of each file, in the order in which they are written.
    files: Vec<(u64, u64)>,
}

/// Who applies it, and where.
#[derive(Clone, Copy)]
struct Applied {
    /// Tells the own blocks of guests apart.
    who: u16,
    /// Files lie so many bytes after those of the base.
    shift: u64,
}

impl Upgrade {
    fn of(size: u64) -> Self {
        let (mut files, mut bytes, slots) = (Vec::new(), 0, size / SLOT);
        // Slots in the order of an odd step: each once. The first has the guests' own blocks.
        let mut slot = 0;
        while bytes < size / UPGRADED {
            slot = (slot + 73) % slots;
            let len = BLOCK << (mix(slot ^ SEED) % SIZES);
            if slot != 0 {
                files.push((slot * SLOT, len));
                bytes += len;
            }
        }
        Self { size, files }
    }

    fn apply(&self, client: &mut Client, Applied { who, shift }: Applied) -> Result<()> {
        let (draft, last, own) = (Writer::client(1), Writer::client(2), Writer::client(3 + who));
        for (number, &(at, len)) in self.files.iter().enumerate() {
            let at = (at + shift) % self.size;
            if number % REWRITTEN == 0 {
                client.write(at, len as usize, draft)?;
            }
            client.write(at, len as usize, last)?;
            client.write(number as u64 % OWN_BLOCKS * BLOCK, BLOCK as usize, own)?;
            if number % FLUSHED == 0 {
                client.flush()?;
            }
        }
        client.flush()
    }

    /// Reads it back.
    fn check(&self, client: &mut Client, Applied { who, shift }: Applied) -> Result<()> {
        for &(at, len) in &self.files {
            client.check((at + shift) % self.size, len as usize, &|_| Some(Writer::client(2)))?;
        }
        client.check(0, BLOCK as usize, &|_| Some(Writer::client(3 + who)))
    }
}

pub(super) fn run(options: &Options, stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let upgrade = Upgrade::of(options.image.size);
    let sent = |host: u8| stage.nas.network().sent_bytes(host);
    stage.publish(PUBLISHER)?;
    let next = next_base(stage, &upgrade)?;
    let before = sent(PUBLISHER)?;
    stage.publish_from(PUBLISHER, "v2", &next)?;
    let published = (sent(PUBLISHER)? - before) as f64;
    let guests = options.guests;
    let mut plain = Vec::new();
    // By placement, and by shift.
    let mut shipped: [[Vec<f64>; 2]; 2] = Default::default();
    // Within the slots, and past the guests' own blocks.
    let shifts = [0, options.image.size / 2 + OWN_BLOCKS * BLOCK];
    for _ in 0..options.rounds {
        let before = sent(HOST)?;
        let (served, sockets): (Vec<_>, Vec<_>) =
            stage.serve_plain(HOST, guests, Overlays::OnNas)?.into_iter().unzip();
        at_once(&sockets, |who, client| upgrade.apply(client, Applied { who: who as u16 + 1, shift: 0 }))?;
        served.into_iter().try_for_each(Served::stop)?;
        plain.push((sent(HOST)? - before) as f64);
        for (shipped, shift) in shipped.iter_mut().zip(shifts) {
            for (shipped, placement) in shipped.iter_mut().zip([Placement::Tiered, Placement::OnNas]) {
                let before = sent(HOST)?;
                upgrade_desks(stage, &upgrade, guests, (placement, shift))?;
                shipped.push((sent(HOST)? - before) as f64);
            }
        }
    }
    let mib = |bytes: &[f64]| bytes.iter().map(|bytes| bytes / f64::from(1 << 20)).collect::<Vec<_>>();
    for (shipped, (places, bound)) in shipped.iter().zip([("the same places", 0.25), ("other places", 1.05)])
    {
        let name = format!("upgrade of {guests} guests at {places} as in the next base");
        let bytes = Row::median(&format!("{name}: to the NAS"), "MiB", &mib(&shipped[0]));
        report.add(bytes.beside(median(&mib(&plain))));
        let row = Row::median(&format!("{name}: to the NAS / stock QEMU"), "", &ratios(&shipped[0], &plain));
        report.add(row.at_most(bound));
        let name = format!("{name}, their disks on the NAS: to the NAS / stock QEMU");
        report.add(Row::median(&name, "", &ratios(&shipped[1], &plain)));
    }
    let shares: Vec<f64> = plain.iter().map(|plain| published / plain).collect();
    let name = format!("the next base, once for all hosts: to the NAS / stock QEMU's {guests} guests");
    report.add(Row::median(&name, "", &shares));
    Ok(())
}

/// The base with the upgrade, as its builder has it.
fn next_base(stage: &Stage<'_>, upgrade: &Upgrade) -> Result<PathBuf> {
    let path = stage.dir.join("next.qcow2");
    fs::copy(stage.local, &path)?;
    let mut server =
        Server::start(Kind::Vmstrata, &Disk { path: path.clone(), writable: true, backing: None })?;
    let mut client = server.connect(SEED, false)?;
    upgrade.apply(&mut client, Applied { who: 0, shift: 0 })?;
    drop(client);
    server.stop()?;
    Ok(path)
}

/// New clones of the first version, on the NAS, get the upgrade, and stand on the second one then.
fn upgrade_desks(
    stage: &Stage<'_>,
    upgrade: &Upgrade,
    guests: usize,
    (placement, shift): (Placement, u64),
) -> Result<()> {
    let (dir, tier) = (stage.mount(HOST).join("desks"), stage.host_dir(HOST).join("tier"));
    let desks = stage.clones(HOST, &dir, guests)?;
    let serve = || match placement {
        Placement::Tiered => stage.serve_tiered(HOST, &desks, &tier),
        Placement::OnNas => stage.serve(HOST, &desks),
    };
    let (served, sockets) = serve()?;
    let applied = |who: usize| Applied { who: who as u16 + 1, shift };
    at_once(&sockets, |who, client| upgrade.apply(client, applied(who)))?;
    served.stop()?;
    for desk in &desks {
        let mut rebase = Command::new(vmstrata());
        rebase.arg("rebase").arg(desk).arg("--onto").arg(format!("{}@v2", stage.base(HOST).display()));
        if placement == Placement::Tiered {
            rebase.arg("--tier").arg(&tier);
        }
        timed(rebase.arg("--allow-backing").arg(stage.mount(HOST)).arg("--quiet"))?;
    }
    let (served, sockets) = serve()?;
    at_once(&sockets, |who, client| upgrade.check(client, applied(who)))?;
    served.stop()?;
    fs::remove_dir_all(dir)?;
    if tier.exists() { Ok(fs::remove_dir_all(tier)?) } else { Ok(()) }
}
