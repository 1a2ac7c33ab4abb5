//! A host of a tiered disk whose repository is on the NAS: a process that serves the disk to one client.
//!
//! ```text
//!   stdin: sync, status ──► answers, a line each        a guest ──► vhost-user socket ──► disk ──► NFS
//! ```
//!
//! Without a repository it serves the same disk, not tiered. It ends with its standard input.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use vmstrata_disk::{Disk, OpenOptions, Opener, ResourceOptions, Resources};
use vmstrata_export::vhost_user::{Options as ExportOptions, Server};
use vmstrata_repo::Repository;
use vmstrata_tier::{
    Cache, CachedFiles, Elsewhere, OnMissing, Place, Remote, TierOptions, TierState, Tiered, is_object_name,
    take_over,
};

use super::nfs::NfsRepository;

/// Of chunks of the repository's layers; as a server has it where 16 GiB are free.
const CACHE_BYTES: u64 = 4 << 30;
/// For a repository that does not answer.
const PATIENCE: Duration = Duration::from_secs(600);

/// What a host serves.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The image, which becomes the first layer if nothing is published yet.
    #[arg(long)]
    pub disk: PathBuf,
    /// The host's own directory.
    #[arg(long)]
    pub dir: PathBuf,
    /// The NAS; without it the disk is not tiered.
    #[arg(long, requires = "path")]
    pub server: Option<IpAddr>,
    /// The repository's directory there.
    #[arg(long)]
    pub path: Option<String>,
    /// Takes the disk over first.
    #[arg(long)]
    pub take_over: bool,
    /// Seconds until what was written is cut off.
    #[arg(long, default_value_t = 30.0)]
    pub window: f64,
}

/// What a host says of its disk.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// The newest epoch that is published.
    pub epoch: u64,
    /// Layers of that epoch.
    pub layers: usize,
    /// Bytes that are not published.
    pub unpublished_bytes: u64,
    /// Why nothing is published now, if so.
    pub stalled: Option<String>,
    /// Bytes of objects sent to the NAS since the host began.
    pub written_bytes: u64,
}

impl Options {
    /// Where the client connects.
    fn socket(&self) -> PathBuf {
        self.dir.join("vhost.sock")
    }
}

/// A tiered disk that is served, with what it stands on.
struct Served {
    repository: Arc<NfsRepository>,
    tiered: Tiered,
}

/// Serves until standard input ends, and answers what it asks.
///
/// # Errors
/// What disk, repository or socket report.
pub fn run(options: &Options) -> Result<()> {
    tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(false).init();
    fs::create_dir_all(&options.dir)?;
    let journal = options.dir.join("journal");
    fs::create_dir_all(&journal)?;
    let resources = |opener: Option<Arc<dyn Opener>>| -> Result<Arc<Resources>> {
        let options = ResourceOptions { journal_dir: Some(journal.clone()), ..ResourceOptions::default() };
        Ok(match opener {
            Some(opener) => Resources::start_with(options, opener)?,
            None => Resources::start(options)?,
        })
    };
    let (disk, served) = match options.server {
        None => (Disk::open(&options.disk, &OpenOptions::default(), &resources(None)?)?, None),
        Some(server) => {
            let path = options.path.as_deref().context("a directory of the NAS")?;
            let repository = Arc::new(NfsRepository::open(server, path, is_object_name)?);
            let cache = Cache::open(&options.dir.join("cache"), CACHE_BYTES)?;
            let of_kind = Arc::clone(&repository) as Arc<dyn Repository>;
            let (remote, files) =
                (Remote::new(&cache, of_kind, OnMissing::Wait), Arc::new(CachedFiles::default()));
            let resources = resources(Some(Arc::clone(&files) as _))?;
            let place = Place::elsewhere(None, &[&options.disk], &options.dir, Elsewhere { remote, files })?;
            if options.take_over {
                take_over(&place, &OpenOptions::default(), &resources)?;
            }
            let tier =
                TierOptions { window: Duration::from_secs_f64(options.window), ..TierOptions::default() };
            let (mut disks, tiered) = Tiered::open(&place, tier, &[OpenOptions::default()], &resources)?;
            (disks.remove(0), Some(Served { repository, tiered }))
        }
    };
    let export = ExportOptions { any_memory: true, share: true, ..ExportOptions::default() };
    let server = Server::bind(&options.socket(), Arc::clone(&disk), export)?;
    answer(&serde_json::to_string(&Status::default())?)?;
    for line in io::stdin().lines() {
        answer(&match (line?.as_str(), &served) {
            ("sync", Some(served)) => match served.tiered.sync(Instant::now() + PATIENCE) {
                Ok(_) => serde_json::to_string(&served.status())?,
                Err(error) => format!("{error}"),
            },
            ("status", Some(served)) => serde_json::to_string(&served.status())?,
            (other, _) => format!("{other}: not known"),
        })?;
    }
    server.shutdown();
    if let Some(served) = served {
        served.tiered.stop(Instant::now() + PATIENCE);
    }
    Ok(disk.close()?)
}

fn answer(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

impl Served {
    fn status(&self) -> Status {
        let status = self.tiered.status();
        Status {
            epoch: status.epoch.get(),
            layers: status.layers,
            unpublished_bytes: status.window.unpublished_bytes,
            stalled: match status.state {
                TierState::Attaching | TierState::Standby | TierState::Publishing | TierState::HandedOver => {
                    None
                }
                TierState::Stalled { why, .. } | TierState::Fenced { why } => Some(why),
            },
            written_bytes: self.repository.written_bytes(),
        }
    }
}

/// A host that runs, killed when this is dropped.
#[derive(Debug)]
pub struct Host {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    socket: PathBuf,
}

/// This program, or what cargo built beside a test of it.
pub fn program() -> PathBuf {
    crate::bench::server::vmstrata().with_file_name("xtask")
}

impl Host {
    /// Starts a host by a `command` that runs [`program`], and waits until it serves.
    ///
    /// # Errors
    /// When it ends, with what it said.
    pub fn start(mut command: Command, options: &Options) -> Result<Self> {
        command.arg("host").arg("--disk").arg(&options.disk).arg("--dir").arg(&options.dir);
        if let (Some(server), Some(path)) = (options.server, &options.path) {
            command.arg("--server").arg(server.to_string()).arg("--path").arg(path);
        }
        command.arg("--window").arg(options.window.to_string());
        if options.take_over {
            command.arg("--take-over");
        }
        fs::create_dir_all(&options.dir)?;
        let log = options.dir.join("log");
        let out = fs::File::options().create(true).append(true).open(&log)?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(out).spawn()?;
        let (ask, answers) = (child.stdin.take(), child.stdout.take().context("a pipe")?);
        let mut host = Self { child, ask, answers: BufReader::new(answers), socket: options.socket() };
        if let Err(error) = host.answer() {
            let said = fs::read_to_string(&log).unwrap_or_default();
            return Err(error.context(format!("the host does not serve: {said}")));
        }
        Ok(host)
    }

    /// Where its disk is served.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Cuts the disk, and waits until that is published.
    ///
    /// # Errors
    /// What kept it from being published.
    pub fn sync(&mut self) -> Result<Status> {
        self.ask("sync")
    }

    /// What there is to say of the disk.
    ///
    /// # Errors
    /// A host that is gone.
    pub fn status(&mut self) -> Result<Status> {
        self.ask("status")
    }

    fn ask(&mut self, what: &str) -> Result<Status> {
        writeln!(self.ask.as_mut().context("it was asked to end")?, "{what}")?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Status> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("it has ended");
        }
        serde_json::from_str(&line).with_context(|| line)
    }

    /// Has it close the disk and end.
    ///
    /// # Errors
    /// When it reports failure.
    pub fn stop(mut self) -> Result<()> {
        self.ask = None;
        let status = self.child.wait()?;
        if !status.success() {
            bail!("the host ended with {status}");
        }
        Ok(())
    }

    /// Kills it, as a power failure would but for the page cache.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn crash(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // One that has ended is killed again without harm.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
