//! Servers that are measured side by side, from start to end, and what their disks hold.

mod read;
mod write;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

pub use self::read::{Reader, read, read_alone};
pub use self::write::write;
use super::client::{Client, Target};
use super::results::Figure;
use super::server::{Disk, Kind, Server};
use crate::chain::Manifest;
use crate::chain::pattern::Writer;

/// What one session yields.
pub type Values = Vec<(Figure, f64)>;

/// Into how many turns a timed run is cut.
const TURNS: u32 = 20;
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
