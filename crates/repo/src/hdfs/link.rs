//! The connection to HDFS: an asynchronous client with its own threads, and a limit to how long anything is waited for.

use std::future::Future;
use std::io;
use std::time::Duration;

use hdfs_native::{Client, ClientBuilder, HdfsError};
use tokio::runtime::{Builder, Runtime};

/// Threads of the client: they move packets and renew leases while nobody waits.
const THREADS: usize = 2;
/// How long the NameNode may take, failing over to another one included.
const NAMENODE_MAX: Duration = Duration::from_secs(60);
/// How long moving [`PIECE`] bytes may take, with DataNodes that do not answer given up on the way.
const DATA_MAX: Duration = Duration::from_secs(180);
/// How long to try what others do later as well.
const TIDY_MAX: Duration = Duration::from_secs(5);
/// The most bytes that are moved at once.
pub(super) const PIECE: usize = 8 << 20;

/// What holds unless the host has a configuration of Hadoop's clients: a NameNode that is not there is given up after
/// some ten seconds instead of minutes, a DataNode that says nothing after twenty instead of sixty.
const DEFAULTS: [(&str, &str); 2] =
    [("dfs.client.failover.max.attempts", "3"), ("dfs.client.socket-timeout", "20000")];

/// A client of HDFS.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) client: Client,
    runtime: Runtime,
}

impl Link {
    /// A client of the NameNode or name service `authority`; nothing is asked of it yet.
    pub(super) fn new(authority: &str) -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(THREADS).thread_name("hdfs").enable_all().build()?;
        let mut builder = ClientBuilder::new()
            .with_url(format!("hdfs://{authority}"))
            .with_io_runtime(runtime.handle().clone());
        let is_configured =
            ["HADOOP_CONF_DIR", "HADOOP_HOME"].iter().any(|name| std::env::var_os(name).is_some());
        if !is_configured {
            builder = builder.with_config(DEFAULTS);
        }
        let client = builder.build().map_err(to_io)?;
        Ok(Self { client, runtime })
    }

    /// Waits for the NameNode's answer.
    pub(super) fn ask<T>(&self, asked: impl Future<Output = hdfs_native::Result<T>>) -> io::Result<T> {
        self.wait(NAMENODE_MAX, asked)
    }

    /// Waits until up to [`PIECE`] bytes are moved.
    pub(super) fn move_data<T>(&self, moving: impl Future<Output = hdfs_native::Result<T>>) -> io::Result<T> {
        self.wait(DATA_MAX, moving)
    }

    /// Waits, not for long, for what others do later if it is not done now.
    pub(super) fn tidy<T>(&self, tidying: impl Future<Output = hdfs_native::Result<T>>) -> io::Result<T> {
        self.wait(TIDY_MAX, tidying)
    }

    fn wait<T>(&self, most: Duration, work: impl Future<Output = hdfs_native::Result<T>>) -> io::Result<T> {
        match self.runtime.block_on(async { tokio::time::timeout(most, work).await }) {
            Ok(done) => done.map_err(to_io),
            Err(_) => {
                let told = format!("HDFS did not answer within {} s", most.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, told))
            }
        }
    }
}

/// What went wrong, in one line.
fn to_io(error: HdfsError) -> io::Error {
    use io::ErrorKind::{AlreadyExists, NotFound, Other, PermissionDenied, QuotaExceeded, ResourceBusy};
    match error {
        HdfsError::IOError(error) => error,
        HdfsError::FileNotFound(path) => io::Error::new(NotFound, format!("{path}: not found")),
        HdfsError::AlreadyExists(told) => io::Error::new(AlreadyExists, first_line(&told)),
        HdfsError::RPCError(class, told) | HdfsError::FatalRPCError(class, told) => {
            let kind = match class.rsplit('.').next().unwrap_or_default() {
                "FileNotFoundException" => NotFound,
                "AccessControlException" => PermissionDenied,
                "RecoveryInProgressException" => ResourceBusy,
                "DSQuotaExceededException" | "NSQuotaExceededException" => QuotaExceeded,
                _ => Other,
            };
            io::Error::new(kind, first_line(&told))
        }
        other => io::Error::other(other),
    }
}

/// Java tells the whole stack.
fn first_line(told: &str) -> String {
    told.lines().next().unwrap_or_default().to_owned()
}
