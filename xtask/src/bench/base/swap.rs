//! A guest that swaps: to a file of its host through vmstrata, to the same through stock QEMU, and to a disk on the NAS.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::super::fleet::empty;
use super::super::machine::{by_turns, settle};
use super::super::report::{Report, Row};
use super::super::results::{median, ratios};
use super::super::server::{Disk, Kind, Server};
use super::Options;
use super::stage::Stage;
use crate::guest::{Attach, Guest, swap};

const HOST: u8 = 1;
const PAGE: u64 = 4096;
/// Of the data: the disk for swap.
const ROOM: u64 = 2;

/// Who has the disk for swap.
#[derive(Clone, Copy, Debug)]
enum Side {
    Vmstrata,
    Local,
    Nas,
}

const SIDES: [Side; 3] = [Side::Vmstrata, Side::Local, Side::Nas];

#[derive(Debug, Default)]
struct Found {
    times: Vec<f64>,
    /// To the NAS.
    sent: Vec<f64>,
    swapped: Vec<f64>,
}

pub(super) fn run(options: &Options, stage: &Stage<'_>, report: &mut Report) -> Result<()> {
    let guest = swap::guest(stage.dir)?;
    let mut found = SIDES.map(|side| (side, Found::default()));
    for round in 0..options.rounds {
        let mut turns: Vec<_> = found.iter_mut().collect();
        by_turns(&mut turns, round);
        for (side, found) in turns {
            settle();
            let dir = tempfile::tempdir_in(stage.dir)?;
            let before = stage.nas.network().sent_bytes(HOST)?;
            let swapped = side.run(options, stage, &guest, dir.path())?;
            // A link carries less than a page by itself: who has which address.
            let pages = (stage.nas.network().sent_bytes(HOST)? - before) / PAGE;
            found.sent.push((pages * PAGE) as f64 / f64::from(1 << 20));
            found.times.push(swapped.time_s);
            found.swapped.push(swapped.bytes / f64::from(1 << 20));
        }
    }
    let [(_, ours), (_, local), (_, nas)] = &found;
    report.add(Row::median("swap: bytes in and out", "MiB", &ours.swapped).beside(median(&local.swapped)));
    report.add(Row::median("swap to a local file of stock QEMU: time", "s", &local.times));
    let time =
        Row::median("swap: time / to a local file of stock QEMU", "", &ratios(&ours.times, &local.times));
    report.add(time.at_most(1.05).beside(median(&ratios(&nas.times, &local.times))));
    let sent = Row::median("swap: to the NAS", "MiB", &ours.sent);
    report.add(sent.at_most(0.0).beside(median(&nas.sent)));
    Ok(())
}

impl Side {
    /// Has the guest swap to a new disk, with files in `dir`.
    fn run(self, options: &Options, stage: &Stage<'_>, guest: &Guest, dir: &Path) -> Result<swap::Swapped> {
        let size = ROOM * (u64::from(options.swapping.mib) << 20);
        let path = dir.join("swap");
        // On the host in each case, so that all bytes to the NAS are counted.
        let qemu = stage.nas.network().on_host(HOST, Path::new("qemu-system-x86_64"));
        let run = |qemu: Command, disk: &Attach| options.swapping.run(qemu, guest, disk);
        match self {
            Self::Vmstrata => {
                let disk = Disk { path, writable: true, backing: None };
                let mut server = Server::start_keyed(&disk, &format!(",role=swap,size={size}"))?;
                server.wait_for_vhost_user()?;
                let swapped = run(qemu, &Attach::VhostUser(server.vhost_user()))?;
                server.stop()?;
                Ok(swapped)
            }
            Self::Local => {
                File::create(&path)?.set_len(size)?;
                let option = format!("driver=raw,file.driver=file,file.filename={}", path.display());
                run(qemu, &Attach::Blockdev(option))
            }
            Self::Nas => {
                let name = "swap.qcow2";
                empty(Kind::Qemu, &stage.nas.export().join(name), size)?;
                let (server, path) = stage.nas.address(HOST, name);
                let option = format!(
                    "driver=qcow2,cache.direct=on,file.driver=nfs,file.server.type=inet,file.server.host={server},file.path={path}"
                );
                run(qemu, &Attach::Blockdev(option))
            }
        }
    }
}
