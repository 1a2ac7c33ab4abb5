//! What a server is started with.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use vmstrata_disk::{Opener, ResourceOptions, Resources};
use vmstrata_export::SocketAccess;
use vmstrata_export::nbd::{TlsConfig, TlsMode};

use crate::error::Error;
use crate::limits;
use crate::runtime_dir;
use crate::spec::{DiskSpec, ExportSpec, FuseSpec, NbdSpec, SpecError, VhostUserSpec, check_together};

/// Fewer workers than this and one slow flush would hold up everything that may block.
const WORKERS_MIN: usize = 2;

/// What a server is started with: the flags of `vmstrata serve`, or its configuration file, or both merged.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The disks.
    pub disks: Vec<DiskSpec>,
    /// Serve what can be opened, and try the rest again until it can.
    pub keep_going: bool,
    /// Do not take over what was added to the server before.
    pub forget_added: bool,
    /// Open the disks, those that were added too, without unflushed writes of a killed server that cannot be taken up.
    pub discard_unflushed: bool,
    /// Sockets for guests.
    pub vhost_user: Vec<VhostUserSpec>,
    /// Addresses for NBD clients of all disks.
    pub nbd: Vec<NbdSpec>,
    /// Directories on which all disks are mounted as files.
    pub fuse: Vec<FuseSpec>,
    /// Who may connect to unix sockets for NBD clients.
    pub nbd_access: SocketAccess,
    /// Require TLS of NBD clients.
    pub nbd_tls: Option<TlsFiles>,
    /// Directories in which backing files are opened, beside that of the disk itself.
    pub allow_backing: Vec<PathBuf>,
    /// Limits of what all disks share.
    pub limits: Limits,
    /// The file that makes the flushes of all disks durable.
    pub flush_log: Option<PathBuf>,
    /// Where volatile journals go; `None` for the user's default.
    pub runtime_dir: Option<PathBuf>,
    /// A descriptor to write `READY=1` to.
    pub ready_fd: Option<u32>,
    /// Where the server is controlled.
    pub control: ControlPlace,
    /// How long to wait for a control socket that another server has: one that was asked to end.
    pub control_patience: Duration,
    /// Where Prometheus may fetch metrics over TCP.
    pub metrics: Option<SocketAddr>,
    /// Where changes are written down.
    pub audit: Option<PathBuf>,
    /// The program whose command `thaw-guard` is [`crate::thaw_guard`], run while a guest is frozen, and whose command
    /// `mount-guard` is [`vmstrata_export::fuse::guard`], run beside a mount.
    pub guard: Option<PathBuf>,
}

/// Files for NBD over TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate chain (PEM).
    pub certificate: PathBuf,
    /// Its private key (PEM).
    pub key: PathBuf,
    /// Let in only clients with a certificate signed by these (PEM).
    pub client_ca: Option<PathBuf>,
}

/// What log lines look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Limits of what all disks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of metadata pages in memory.
    pub metadata_cache_bytes: u64,
    /// Files of layers kept open at once; `None` derives it from the process's limit.
    pub max_open_files: Option<usize>,
    /// Threads for what may block; `None` for the number of processors.
    pub workers: Option<usize>,
    /// Bytes of repositories' layers in each directory of tiered disks; `None` derives it from the file system's room.
    pub tier_cache_bytes: Option<u64>,
    /// Bytes a second that tiered disks ship together.
    pub tier_rate: Option<NonZeroU64>,
    /// Bytes a second that all moves write together.
    pub move_rate: Option<NonZeroU64>,
    /// Bytes of a flush log that is made.
    pub flush_log_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            metadata_cache_bytes: 64 << 20,
            max_open_files: None,
            workers: None,
            tier_cache_bytes: None,
            tier_rate: None,
            move_rate: None,
            flush_log_bytes: 256 << 20,
        }
    }
}

/// Where a server listens for those who control it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ControlPlace {
    /// At [`vmstrata_api::CONTROL_SOCKET`] in the runtime directory.
    #[default]
    InRuntimeDir,
    /// Here.
    At(PathBuf),
    /// Nowhere.
    Off,
}

impl Options {
    /// Whether the parts fit together; touches no file.
    ///
    /// # Errors
    /// Names the disk or socket that does not fit.
    pub fn check(&self) -> Result<(), SpecError> {
        check_together(&self.disks, &self.vhost_user, &self.nbd, &self.fuse)?;
        self.nbd.iter().try_for_each(|export| export.check_clients(self.knows_nbd_clients()))
    }

    /// The exports, NBD first, then files.
    pub(crate) fn exports(&self) -> impl Iterator<Item = ExportSpec> {
        let nbd = self.nbd.iter().cloned().map(ExportSpec::Nbd);
        let all = nbd.chain(self.fuse.iter().cloned().map(ExportSpec::Fuse));
        all.chain(self.vhost_user.iter().cloned().map(ExportSpec::VhostUser))
    }

    /// Whether NBD clients have to show certificates.
    pub(crate) fn knows_nbd_clients(&self) -> bool {
        self.nbd_tls.as_ref().is_some_and(|tls| tls.client_ca.is_some())
    }

    /// Makes what the disks will share, whose files `opener` opens. Returns it with the limits that it keeps to.
    ///
    /// # Errors
    /// A host that cannot start its threads.
    pub(crate) fn resources(
        &self,
        runtime_dir: PathBuf,
        opener: Arc<dyn Opener>,
    ) -> Result<(Arc<Resources>, ResourceOptions), Error> {
        let open_files = limits::raise_open_files();
        let processors = std::thread::available_parallelism().map_or(WORKERS_MIN, usize::from);
        let options = ResourceOptions {
            metadata_cache_bytes: self.limits.metadata_cache_bytes,
            max_open_files: self.limits.max_open_files.unwrap_or_else(|| limits::layer_files(open_files)),
            workers: self.limits.workers.unwrap_or_else(|| processors.max(WORKERS_MIN)),
            journal_dir: Some(runtime_dir),
        };
        Ok((Resources::start_with(options.clone(), opener)?, options))
    }

    pub(crate) fn runtime_dir(&self) -> Result<PathBuf, Error> {
        runtime_dir::prepare(self.runtime_dir.as_deref())
    }

    /// A certificate means that TLS is wanted, so nothing is served without it.
    pub(crate) fn tls_mode(&self) -> Result<TlsMode, Error> {
        match &self.nbd_tls {
            Some(TlsFiles { certificate, key, client_ca }) => {
                Ok(TlsMode::Require(TlsConfig::load(certificate, key, client_ca.as_deref())?))
            }
            None => Ok(TlsMode::Off),
        }
    }
}
