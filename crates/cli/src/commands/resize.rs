//! `vmstrata resize`: gives a disk another size, by itself or through the server that serves it.

use std::process::ExitCode;
use std::slice;

use anyhow::{Context as _, Result};
use serde::Serialize;
use vmstrata_api::{DiskDetail, SizeChange, SizeSpec, encode_segment};
use vmstrata_disk::{Disk, OpenOptions, Shrink};
use vmstrata_types::path_to_text;

use super::snapshot::live::Live;
use super::snapshot::resources;
use crate::args::ResizeArgs;
use crate::audit::{self, What};
use crate::output::{answer, counted};
use crate::units::apart;

/// What was done, for scripts.
#[derive(Debug, Serialize)]
struct Report {
    disk: String,
    from_bytes: u64,
    size_bytes: u64,
    /// Only a guest could feel it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guests_told: Option<u64>,
    /// They have to connect again.
    #[serde(skip_serializing_if = "Option::is_none")]
    nbd_clients: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// What could not be done; the disk has the size that it had.
pub fn run(args: &ResizeArgs) -> Result<ExitCode> {
    let report = match Live::find(slice::from_ref(&args.disk), &args.access.server)? {
        Some(live) => of_server(args, &live)?,
        None => audit::change(audit::of("disk_resize", [&args.disk]), |what| of_file(args, what))?,
    };
    answer(args.access.common.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn of_server(args: &ResizeArgs, live: &Live) -> Result<Report> {
    let path = format!("/v1/disks/{}", encode_segment(live.name()));
    let now: DiskDetail = live.client().get(&path)?;
    let now = now.disk.size_bytes.context("the server is opening or closing the disk")?;
    let spec = SizeSpec { size_bytes: args.size.of(now)?, shrink: args.shrink };
    let done: SizeChange = live.client().put(&format!("{path}/size"), &spec)?;
    Ok(Report {
        disk: path_to_text(&args.disk),
        from_bytes: done.from_bytes,
        size_bytes: done.size_bytes,
        pause_us: Some(done.pause_us),
        guests_told: Some(done.guests_told),
        nbd_clients: Some(done.nbd_clients),
    })
}

fn of_file(args: &ResizeArgs, what: &mut What) -> Result<Report> {
    let options = OpenOptions { read_only: false, force: args.force, ..args.access.open() };
    let disk = Disk::open(&args.disk, &options, &resources(&args.access.journal)?)?;
    let shrink = if args.shrink { Shrink::Allow } else { Shrink::Refuse };
    let resized = args.size.of(disk.size()).and_then(|size| {
        what.bytes = Some(size);
        Ok(disk.resize(size, shrink)?)
    });
    // Whatever came of it, the image is left clean.
    let closed = disk.close();
    let resized = resized?;
    closed?;
    Ok(Report {
        disk: path_to_text(&args.disk),
        from_bytes: resized.from,
        size_bytes: resized.to,
        pause_us: None,
        guests_told: None,
        nbd_clients: None,
    })
}

impl Report {
    fn text(&self) -> String {
        let (disk, (from, to)) = (&self.disk, apart(self.from_bytes, self.size_bytes));
        let told =
            self.guests_told.map(|told| format!(" ({} told)", counted(told, "guest"))).unwrap_or_default();
        let reconnect = match self.nbd_clients {
            None | Some(0) => String::new(),
            Some(1) => "1 NBD client must reconnect to see the new size\n".to_owned(),
            Some(clients) => format!("{clients} NBD clients must reconnect to see the new size\n"),
        };
        if self.from_bytes == self.size_bytes {
            format!("{disk}: has {to} already{told}\n{reconnect}")
        } else {
            format!("{disk}: {to}, was {from}{told}\n{reconnect}")
        }
    }
}
