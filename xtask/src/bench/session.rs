//! Servers that are measured side by side, from start to end, and what their disks hold.
//!
//! Each opens; then all run through vhost-user, in turns; then the data is checked, never inside a timed run; then NBD
//! (`nbdcopy` reads everything), then memory. The first round checks the whole disk; later ones, and QEMU on a long chain, draw
//! positions at random until the time box ends.
//!
//! A virtual machine's processors change their speed by half within a second, as what else their host runs comes and goes. What
//! would be one long run of each server is cut into short ones that alternate, and the median of these is the rate.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::client::{Client, Target};
use super::load::{Access, Load};
use super::results::{Figure, median};
use super::server::{Disk, Kind, Server};
use crate::chain::Manifest;
use crate::chain::pattern::Writer;

/// What one session yields.
pub type Values = Vec<(Figure, f64)>;

/// Into how many turns a timed run is cut.
const TURNS: u32 = 20;
/// The same of programs that take a moment to start.
const PROGRAM_TURNS: u32 = 4;

/// How long the parts of a session take.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Each timed run, all its turns together.
    pub run: Duration,
    /// Before each timed run, unmeasured.
    pub warm_up: Duration,
    /// Checking data where the whole disk would take too long.
    pub check: Duration,
    /// Whether to check the whole disk, where that does not take too long.
    pub whole: bool,
}

/// A chain and what its clusters hold.
#[derive(Clone, Copy)]
pub struct Chain<'a> {
    /// Directory of the layers.
    pub dir: &'a Path,
    /// How it was made.
    pub manifest: &'a Manifest,
    /// The owner of each cluster.
    pub owners: &'a [Option<u16>],
}

impl Chain<'_> {
    fn seed(&self) -> u64 {
        self.manifest.plan.seed
    }

    /// Whose data lies at a guest offset of the unchanged disk.
    pub(super) fn writer(&self, at: u64) -> Option<Writer> {
        self.owners[(at / self.manifest.plan.cluster_size) as usize].map(Writer::layer)
    }

    /// The disk as a read-only session opens it.
    pub fn read_only(&self) -> Disk {
        Disk { path: self.manifest.top(self.dir), writable: false, backing: None }
    }
}

/// A server, or the floor's raw file, with a client.
pub struct Session<'a> {
    kind: Kind,
    chain: Chain<'a>,
    file: PathBuf,
    /// The floor has none.
    server: Option<Server>,
    client: Client,
    /// From its start to its first read answered, s.
    open: f64,
}

impl<'a> Session<'a> {
    /// Opens `disk`, which reads as `chain`, and reads a block of it.
    ///
    /// # Errors
    /// When the server fails, or serves a wrong byte.
    pub fn start(kind: Kind, disk: &Disk, chain: Chain<'a>) -> Result<Self> {
        let start = Instant::now();
        let (file, read_only) = (disk.path.clone(), !disk.writable);
        let mut server = if kind == Kind::Floor { None } else { Some(Server::start(kind, disk)?) };
        let mut client = match &mut server {
            Some(server) => server.connect(chain.seed(), read_only)?,
            None => Client::connect(&Target::RawFile(file.clone()), chain.seed(), read_only)?,
        };
        client.check(0, 4096, &|at| chain.writer(at))?;
        Ok(Self { kind, chain, file, server, client, open: start.elapsed().as_secs_f64() })
    }

    /// Whether a pass over the whole disk would take minutes.
    fn is_slow(&self) -> bool {
        self.kind == Kind::Qemu && self.chain.manifest.plan.layers > 100
    }

    fn checks_whole(&self, timing: Timing) -> bool {
        timing.whole && !self.is_slow()
    }
}

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
    let outcome = client.run(&Load { access, fua: false, block, depth, time, seed })?;
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

/// Someone who writes to a disk of its own.
struct Writing<'a> {
    session: Session<'a>,
    /// Blocks of 4 KiB that were written.
    written: Vec<bool>,
}

/// Writes in turns, then checks every byte through the same servers, and the files with `qemu-img check` after the servers
/// have ended. Each disk belongs to its session alone.
///
/// # Errors
/// When a server fails, a byte is wrong, or a file is left unclean.
pub fn write(sessions: Vec<Session<'_>>, access: Access, timing: Timing) -> Result<Vec<f64>> {
    let (round, turns) = match access {
        Access::RandomWrite { round } => (round, TURNS),
        // Each turn would begin where the first did.
        Access::FirstWrite { round } | Access::Share { round, .. } => (round, 1),
        Access::RandomRead | Access::SequentialRead | Access::ReadWrite { .. } => {
            panic!("reads are measured by read()")
        }
    };
    let mut writing: Vec<_> =
        sessions.into_iter().map(|session| Writing { session, written: Vec::new() }).collect();
    let load = Load { access, fua: false, block: 4 << 10, depth: 32, time: timing.run / turns, seed: 0 };
    let rates =
        medians(&mut writing, turns, |one, turn| one.write(&Load { seed: u64::from(3 + turn), ..load }))?;
    writing.into_iter().try_for_each(|one| one.finish(round, timing))?;
    Ok(rates)
}

impl Writing<'_> {
    fn write(&mut self, load: &Load) -> Result<f64> {
        let outcome = self.session.client.run(load)?;
        self.written.resize(outcome.written.len(), false);
        self.written.iter_mut().zip(&outcome.written).for_each(|(all, new)| *all |= new);
        Ok(outcome.iops())
    }

    fn finish(self, round: u16, timing: Timing) -> Result<()> {
        let whole = self.session.checks_whole(timing);
        let (written, Session { kind, chain, file, server, mut client, .. }) = (self.written, self.session);
        let expected = |at: u64| {
            let is_new = written.get((at / 4096) as usize).copied().unwrap_or(false);
            if is_new { Some(Writer::client(round)) } else { chain.writer(at) }
        };
        client.flush()?;
        client.verify(timing.check, whole, &expected).context("data read back after the writes")?;
        drop(client);
        let Some(server) = server else { return Ok(()) };
        server.stop()?;
        let check = Command::new("qemu-img").args(["check", "-q"]).arg(&file).output()?;
        let said = String::from_utf8_lossy(&check.stdout);
        ensure!(check.status.success(), "qemu-img check after {}: {said}", kind.label());
        Ok(())
    }
}

/// Gives each of `who` a turn, then each again from the last to the first, and so on: `turns` of them. The median of what each
/// yields.
fn medians<T>(
    who: &mut [T],
    turns: u32,
    mut one: impl FnMut(&mut T, u32) -> Result<f64>,
) -> Result<Vec<f64>> {
    let mut yields = vec![Vec::new(); who.len()];
    let mut order: Vec<usize> = (0..who.len()).collect();
    for turn in 0..turns {
        for &index in &order {
            yields[index].push(one(&mut who[index], turn)?);
        }
        order.reverse();
    }
    Ok(yields.iter().map(|values| median(values)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_forwards_then_backwards() {
        let mut taken = Vec::new();
        let medians = medians(&mut ["a", "b"], 3, |who, turn| {
            taken.push(*who);
            Ok(f64::from(turn) + if *who == "b" { 10.0 } else { 0.0 })
        });
        assert_eq!(medians.unwrap(), [1.0, 11.0]);
        assert_eq!(taken, ["a", "b", "b", "a", "a", "b"]);
    }

    #[test]
    fn a_turn_that_fails_ends_them() {
        assert!(
            medians(&mut [0], 3, |_, turn| if turn == 1 { anyhow::bail!("no") } else { Ok(1.0) }).is_err()
        );
    }
}
