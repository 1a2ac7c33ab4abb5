//! Reads through vhost-user and NBD, by several in turns.
//!
//! Each opens; then all run through vhost-user; then the data is checked, never inside a timed run; then NBD (`nbdcopy` reads
//! everything), then memory. The first round checks the whole disk; later ones, and QEMU on a long chain, draw positions at
//! random until the time box ends.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::super::client::Client;
use super::super::load::{Access, Load};
use super::super::results::Figure;
use super::super::server::{Disk, Kind};
use super::super::turns::medians;
use super::{Chain, Session, TURNS, Timing, Values};

/// The same of programs that take a moment to start.
const PROGRAM_TURNS: u32 = 4;

/// A way to read: its requests' kind, size and number in flight.
type Reads = (Figure, Access, usize, usize);

const READS: [Reads; 3] = [
    (Figure::RandomRead32, Access::RandomRead, 4 << 10, 32),
    (Figure::RandomRead1, Access::RandomRead, 4 << 10, 1),
    (Figure::Sequential, Access::SequentialRead, 1 << 20, 4),
];

/// Someone who reads, and what is measured of it.
pub struct Reader<'a> {
    session: Session<'a>,
    wanted: &'a [Figure],
    values: Values,
}

impl<'a> Reader<'a> {
    /// As [`Session::start`].
    ///
    /// # Errors
    /// As [`Session::start`].
    pub fn start(kind: Kind, disk: &Disk, chain: Chain<'a>, wanted: &'a [Figure]) -> Result<Self> {
        let session = Session::start(kind, disk, chain)?;
        let mut reader = Self { values: Vec::new(), wanted, session };
        reader.take(Figure::Open, reader.session.open);
        Ok(reader)
    }

    fn wants(&self, figure: Figure) -> bool {
        // Passes of minutes are left out.
        self.wanted.contains(&figure) && !(figure == Figure::NbdCopy && self.session.is_slow())
    }

    fn take(&mut self, figure: Figure, value: f64) {
        if self.wants(figure) {
            self.values.push((figure, value));
        }
    }

    /// The NBD address of its server, which only the floor has none of.
    fn nbd_uri(&mut self) -> Result<String> {
        let server = self.session.server.as_mut().context("the floor speaks no NBD")?;
        server.wait_for_nbd()?;
        Ok(server.nbd_uri())
    }

    /// Checks the data, weighs the server, and ends it.
    fn finish(mut self) -> Result<Values> {
        let Session { server, client, .. } = self.session;
        drop(client);
        if let Some(server) = server {
            if self.wanted.contains(&Figure::Memory) {
                self.values.push((Figure::Memory, server.resident_bytes()? as f64 / f64::from(1 << 20)));
            }
            server.stop()?;
        }
        Ok(self.values)
    }
}

/// Reads in turns: what each of `readers` yields of the figures it is wanted for.
///
/// # Errors
/// When a server fails, or serves a wrong byte.
pub fn read(mut readers: Vec<Reader<'_>>, timing: Timing) -> Result<Vec<Values>> {
    for reads in READS {
        for reader in readers.iter_mut().filter(|reader| reader.wants(reads.0)) {
            read_once(&mut reader.session.client, reads, timing.warm_up, 1)?;
        }
        measure(&mut readers, reads.0, TURNS, |reader, turn| {
            read_once(&mut reader.session.client, reads, timing.run / TURNS, u64::from(2 + turn))
        })?;
    }
    for reader in readers.iter_mut().filter(|reader| reader.wants(Figure::Memory)) {
        let (whole, Session { chain, client, .. }) =
            (reader.session.checks_whole(timing), &mut reader.session);
        client.verify(timing.check, whole, &|at| chain.writer(at)).context("data read through vhost-user")?;
    }
    measure(&mut readers, Figure::NbdRandomRead16, PROGRAM_TURNS, |reader, turn| {
        fio(&reader.nbd_uri()?, reader.session.client.capacity(), timing.run / PROGRAM_TURNS, turn)
    })?;
    measure(&mut readers, Figure::NbdCopy, PROGRAM_TURNS, |reader, _| nbdcopy(&reader.nbd_uri()?))?;
    readers.into_iter().map(Reader::finish).collect()
}

/// One figure, of those who are wanted for it.
fn measure(
    readers: &mut [Reader<'_>],
    figure: Figure,
    turns: u32,
    mut one: impl FnMut(&mut Reader<'_>, u32) -> Result<f64>,
) -> Result<()> {
    let mut who: Vec<_> = readers.iter_mut().filter(|reader| reader.wants(figure)).collect();
    let values = medians(&mut who, turns, |reader, turn| one(reader, turn))?;
    who.iter_mut().zip(values).for_each(|(reader, value)| reader.take(figure, value));
    Ok(())
}

/// The figures of `wanted` that one vhost-user client yields by reading, with nobody beside it.
///
/// # Errors
/// When a request fails.
pub fn read_alone(client: &mut Client, wanted: &[Figure], timing: Timing) -> Result<Values> {
    let mut values = Vec::new();
    for reads in READS.into_iter().filter(|(figure, ..)| wanted.contains(figure)) {
        read_once(client, reads, timing.warm_up, 1)?;
        values.push((reads.0, read_once(client, reads, timing.run, 2)?));
    }
    Ok(values)
}

/// One run, in the unit of its figure.
fn read_once(client: &mut Client, reads: Reads, time: Duration, seed: u64) -> Result<f64> {
    let (figure, access, block, depth) = reads;
    let outcome = client.run(&Load { access, block, depth, time, seed })?;
    let per_request = if figure == Figure::Sequential { block as f64 / f64::from(1 << 20) } else { 1.0 };
    Ok(outcome.iops() * per_request)
}

/// 4 KiB random reads at queue depth 16 over one NBD connection, by fio's libnbd engine; requests per second.
fn fio(uri: &str, size: u64, time: Duration, seed: u32) -> Result<f64> {
    let out = tempfile::NamedTempFile::new()?;
    let run = Command::new("fio")
        .args(["--name=nbd", "--ioengine=nbd", "--rw=randread", "--bs=4k", "--iodepth=16", "--time_based"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--size={size}"))
        .arg(format!("--runtime={}ms", time.as_millis()))
        .arg(format!("--randseed={}", 1 + seed))
        .arg("--output-format=json")
        .arg(format!("--output={}", out.path().display()))
        .output()
        .context("fio does not start")?;
    ensure!(run.status.success(), "fio: {}", String::from_utf8_lossy(&run.stderr));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(out.path())?)?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio met error {}", job["error"]);
    job["read"]["iops"].as_f64().context("fio reports no IOPS")
}

/// Seconds that `nbdcopy` takes from the server to nowhere.
fn nbdcopy(uri: &str) -> Result<f64> {
    let start = Instant::now();
    let copy = Command::new("nbdcopy").args([uri, "null:"]).output().context("nbdcopy does not start")?;
    ensure!(copy.status.success(), "nbdcopy: {}", String::from_utf8_lossy(&copy.stderr));
    Ok(start.elapsed().as_secs_f64())
}
