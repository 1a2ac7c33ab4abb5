//! The configuration file of `vmstrata serve`: TOML with the vocabulary of the flags.
//!
//! ```text
//!   file ──► file::File: keys and types, unknown keys refused ──► Settings ◄── flags (they win)
//!                                                                    └──► Options
//! ```
//!
//! A key has the name of its flag without the dashes; `[[disk]]` and `[[vhost-user]]` are tables with the keys of the
//! flags' lists. Relative paths are seen from the file's directory, so that a service finds them wherever it starts.
//! What belongs to one start and not to a server (`--replace`, `--json`, `--ready-fd`) is a flag only.
//!
//! ```toml
//! nbd = ["unix:/run/vmstrata/nbd.sock", { address = "unix:/run/vmstrata/restore.sock", rw = true }]
//! metadata-cache = "256M"
//! allow-backing = ["/srv/golden"]
//!
//! [[disk]]
//! path = "/srv/vms/web.qcow2"
//!
//! [[vhost-user]]
//! disk = "web"
//! socket = "/run/vmstrata-guests/web.sock"
//! group = "vmstrata-guests"
//! queues = 4
//! ```

mod file;

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmstrata_export::SocketAccess;

use crate::options::{ControlPlace, Limits, LogFormat, Options, TlsFiles};
use crate::size::SizeError;
use crate::spec::{
    DiskSpec, FuseSpec, HostRateError, MetricsError, NbdError, NbdSpec, SpecError, TierCacheError,
    VhostUserSpec,
};

/// A configuration file that cannot be used, and where in it the reason is.
#[derive(Debug, thiserror::Error)]
#[error("{}:{line}: {fault}", path.display())]
pub struct ConfigError {
    /// The file.
    pub path: PathBuf,
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong there.
    pub fault: ConfigFault,
}

/// What is wrong with a configuration file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigFault {
    /// It cannot be read.
    #[error("cannot read the file: {0}")]
    Read(std::io::Error),
    /// It is no TOML, has an unknown key, or a value of the wrong type.
    #[error("{}", .0.message().replace('\n', " "))]
    Toml(Box<toml::de::Error>),
    /// A disk or socket that makes no sense.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An NBD export that makes no sense.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// A size that is none.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// A size that no cache of layers can have.
    #[error(transparent)]
    TierCache(#[from] TierCacheError),
    /// A rate that no host can have.
    #[error("{key}: {error}")]
    HostRate {
        /// The key.
        key: &'static str,
        /// What is wrong with it.
        error: HostRateError,
    },
    /// A place for metrics that is none.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// A number outside its range.
    #[error("{key} is {allowed}, not {value}")]
    Range {
        /// The key.
        key: &'static str,
        /// What it may be.
        allowed: &'static str,
        /// What it is.
        value: u32,
    },
    /// A certificate without its key, or the other way round.
    #[error("nbd-tls-cert and nbd-tls-key go together, and nbd-tls-client-ca only with them")]
    HalfTls,
    /// A place to be controlled at, and none.
    #[error("either control or no-control")]
    ControlTwice,
}

/// What flags or a configuration file say; what is absent is left to the other, or to the defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The disks.
    pub disks: Vec<DiskSpec>,
    /// Serve what can be opened, and try the rest again until it can.
    pub keep_going: bool,
    /// Sockets for guests.
    pub vhost_user: Vec<VhostUserSpec>,
    /// Addresses for NBD clients of all disks.
    pub nbd: Vec<NbdSpec>,
    /// Directories on which all disks are mounted as files.
    pub fuse: Vec<FuseSpec>,
    /// Who may connect to the unix sockets among them.
    pub nbd_access: SocketAccess,
    /// Require TLS of NBD clients.
    pub nbd_tls: Option<TlsFiles>,
    /// Directories in which backing files are opened.
    pub allow_backing: Vec<PathBuf>,
    /// Bytes of metadata pages in memory.
    pub metadata_cache_bytes: Option<u64>,
    /// Files of layers kept open at once.
    pub max_open_files: Option<usize>,
    /// Threads for what may block.
    pub workers: Option<usize>,
    /// Bytes of repositories' layers in each directory of tiered disks.
    pub tier_cache_bytes: Option<u64>,
    /// Bytes a second that tiered disks ship together.
    pub tier_rate: Option<NonZeroU64>,
    /// Bytes a second that all moves write together.
    pub move_rate: Option<NonZeroU64>,
    /// The file that makes the flushes of all disks durable.
    pub flush_log: Option<PathBuf>,
    /// Bytes of that file when it is made.
    pub flush_log_bytes: Option<u64>,
    /// Where volatile journals go.
    pub runtime_dir: Option<PathBuf>,
    /// Where the server is controlled.
    pub control: Option<ControlPlace>,
    /// Where Prometheus may fetch metrics over TCP.
    pub metrics: Option<SocketAddr>,
    /// Where changes are written down.
    pub audit: Option<PathBuf>,
    /// What log lines look like.
    pub log_format: Option<LogFormat>,
}

impl Settings {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// [`ConfigError`], naming file and line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let fault = |line, fault| ConfigError { path: path.to_owned(), line, fault };
        let text = std::fs::read_to_string(path).map_err(|error| fault(1, ConfigFault::Read(error)))?;
        let directory = path.parent().unwrap_or(Path::new(""));
        file::parse(&text, directory)
            .map_err(|(offset, what)| fault(text[..offset].matches('\n').count() + 1, what))
    }

    /// These settings, and `others` where these say nothing. A list that says something replaces the whole other list.
    #[must_use]
    pub fn over(self, others: Self) -> Self {
        fn first<T>(list: Vec<T>, other: Vec<T>) -> Vec<T> {
            if list.is_empty() { other } else { list }
        }
        Self {
            disks: first(self.disks, others.disks),
            keep_going: self.keep_going || others.keep_going,
            vhost_user: first(self.vhost_user, others.vhost_user),
            nbd: first(self.nbd, others.nbd),
            fuse: first(self.fuse, others.fuse),
            nbd_access: SocketAccess {
                owner: self.nbd_access.owner.or(others.nbd_access.owner),
                group: self.nbd_access.group.or(others.nbd_access.group),
                mode: self.nbd_access.mode.or(others.nbd_access.mode),
            },
            nbd_tls: self.nbd_tls.or(others.nbd_tls),
            allow_backing: first(self.allow_backing, others.allow_backing),
            metadata_cache_bytes: self.metadata_cache_bytes.or(others.metadata_cache_bytes),
            max_open_files: self.max_open_files.or(others.max_open_files),
            workers: self.workers.or(others.workers),
            tier_cache_bytes: self.tier_cache_bytes.or(others.tier_cache_bytes),
            tier_rate: self.tier_rate.or(others.tier_rate),
            move_rate: self.move_rate.or(others.move_rate),
            flush_log: self.flush_log.or(others.flush_log),
            flush_log_bytes: self.flush_log_bytes.or(others.flush_log_bytes),
            runtime_dir: self.runtime_dir.or(others.runtime_dir),
            control: self.control.or(others.control),
            metrics: self.metrics.or(others.metrics),
            audit: self.audit.or(others.audit),
            log_format: self.log_format.or(others.log_format),
        }
    }

    /// What a server is started with: these settings, and the defaults where they say nothing.
    pub fn into_options(self) -> Options {
        let limits = Limits::default();
        Options {
            disks: self.disks,
            keep_going: self.keep_going,
            vhost_user: self.vhost_user,
            nbd: self.nbd,
            fuse: self.fuse,
            nbd_access: self.nbd_access,
            nbd_tls: self.nbd_tls,
            allow_backing: self.allow_backing,
            limits: Limits {
                metadata_cache_bytes: self.metadata_cache_bytes.unwrap_or(limits.metadata_cache_bytes),
                max_open_files: self.max_open_files,
                workers: self.workers,
                tier_cache_bytes: self.tier_cache_bytes,
                tier_rate: self.tier_rate,
                move_rate: self.move_rate,
                flush_log_bytes: self.flush_log_bytes.unwrap_or(limits.flush_log_bytes),
            },
            flush_log: self.flush_log,
            runtime_dir: self.runtime_dir,
            forget_added: false,
            discard_unflushed: false,
            ready_fd: None,
            control: self.control.unwrap_or_default(),
            control_patience: Duration::ZERO,
            metrics: self.metrics,
            audit: self.audit,
            guard: None,
        }
    }
}

#[cfg(test)]
mod tests;
