//! The demonstration: one guest disk with a long history, in stock QEMU alone and through vmstrata.
//!
//! Both sides get the same files, the same page cache, the same client and the same kernel; the data that
//! vmstrata serves is compared with the disk the history was made from.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::bench::results::Figure;
use crate::bench::server::{self, Disk, Kind, Server};
use crate::bench::session::{self, Timing, Values};
use crate::build;
use crate::chain::{Manifest, verify};
use crate::guest::{self, Guest, RootImage, spread};

/// What is shown.
#[derive(Clone, Debug)]
pub struct Options {
    /// Layers of the disk.
    pub layers: u32,
    /// Bytes of the disk.
    pub size: u64,
    /// Where it is kept.
    pub dir: PathBuf,
}

const TIMING: Timing = Timing {
    run: Duration::from_secs(2),
    warm_up: Duration::from_millis(300),
    check: Duration::from_secs(1),
    whole: false,
};
const FILE_SIZE: u64 = 16 << 20;

/// Makes the disk, runs both sides, and prints them.
///
/// # Errors
/// When a tool is missing, a server or the guest fails, or a byte is wrong.
pub fn run(options: &Options) -> Result<()> {
    server::raise_file_limit()?;
    build::vmstrata()?;
    println!(
        "Making a Debian guest disk of {} MiB with {} snapshots ...",
        options.size >> 20,
        options.layers
    );
    let guest = Guest::here()?;
    let files = (options.size / 4 * 3 / FILE_SIZE) as u32;
    let raw = RootImage { size: options.size, files, file_size: FILE_SIZE }.make(&guest, &options.dir)?;
    let dir = options.dir.join(format!("chain-{}", options.layers));
    let top = spread(&raw, &dir, options.layers)?;

    println!("Stock QEMU on the chain ...");
    let qemu = side(Kind::Qemu, &top)?;
    println!("vmstrata on the same chain ...");
    let vmstrata = side(Kind::Vmstrata, &top)?;
    println!("Comparing every byte that vmstrata serves with the original disk ...");
    let data = compare(&top, &dir)?;
    print(&qemu, &vmstrata, options.layers);
    println!("\nAll {data} clusters of data read right through vmstrata. The disk: {}", top.display());
    Ok(())
}

/// One side's figures.
fn side(kind: Kind, top: &Path) -> Result<Values> {
    let disk = Disk { path: top.to_owned(), writable: false, backing: None };
    let start = Instant::now();
    let mut server = Server::start(kind, &disk)?;
    let mut client = server.connect(0, true)?;
    client.read(0, 4096)?;
    let mut values = vec![(Figure::Open, start.elapsed().as_secs_f64())];
    values.extend(session::read_alone(&mut client, &[Figure::RandomRead32, Figure::Sequential], TIMING)?);
    drop(client);
    values.push((Figure::Memory, server.resident_bytes()? as f64 / f64::from(1 << 20)));
    server.stop()?;
    values.push((Figure::Boot, guest::boot_through(kind, top)?.as_secs_f64()));
    Ok(values)
}

/// Copies the disk out over NBD and compares it with the raw image; returns the clusters that held data.
fn compare(top: &Path, dir: &Path) -> Result<u64> {
    let manifest = Manifest::load(dir)?;
    let mut server =
        Server::start(Kind::Vmstrata, &Disk { path: top.to_owned(), writable: false, backing: None })?;
    server.wait_for_nbd()?;
    let verified = verify::nbd(&manifest, &server.nbd_uri()).context("through vmstrata's NBD export")?;
    server.stop()?;
    ensure!(verified.data > 0, "the disk holds no data");
    Ok(verified.data)
}

fn print(qemu: &Values, vmstrata: &Values, layers: u32) {
    println!("\n{:34} {:>14} {:>14}", format!("{layers} snapshots"), "stock QEMU", "vmstrata");
    let rows = [
        (Figure::RandomRead32, "4 KiB random reads a second"),
        (Figure::Sequential, "sequential read, MiB/s"),
        (Figure::Memory, "server memory, MiB"),
        (Figure::Open, "start to first read, s"),
        (Figure::Boot, "start to guest's init, s (emulated)"),
    ];
    for (figure, label) in rows {
        let of = |values: &Values| {
            values.iter().find(|(its, _)| *its == figure).map_or(f64::NAN, |(_, value)| *value)
        };
        println!(
            "{label:34} {:>14} {:>14}",
            crate::bench::table::number(of(qemu)),
            crate::bench::table::number(of(vmstrata))
        );
    }
}
