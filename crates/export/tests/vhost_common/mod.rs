//! What the tests of the vhost-user export share.

#![allow(dead_code, unreachable_pub, reason = "each test uses its own part")]

pub mod driver;
pub mod frontend;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use vmstrata_disk::{Disk, Format, OpenOptions, ResourceOptions, Resources};
use vmstrata_export::vhost_user::{Options, Server};

/// A directory with a disk, and the server in front of it.
pub struct Served {
    pub dir: tempfile::TempDir,
    pub disk: Arc<Disk>,
    server: Option<Server>,
    options: Options,
}

impl Served {
    /// A new qcow2 disk of `size` bytes, served with `options`.
    pub fn qcow2(size: u64, options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        let status = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", path.to_str().unwrap(), &size.to_string()])
            .status()
            .unwrap();
        assert!(status.success());
        Self::over(dir, &path, Format::Qcow2, options)
    }

    /// A raw disk with these bytes.
    pub fn raw(bytes: &[u8], options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        std::fs::write(&path, bytes).unwrap();
        Self::over(dir, &path, Format::Raw, options)
    }

    fn over(dir: tempfile::TempDir, path: &Path, format: Format, options: Options) -> Self {
        let resources = Resources::new(ResourceOptions::default());
        let open =
            OpenOptions { read_only: options.read_only, format: Some(format), ..OpenOptions::default() };
        let disk = Disk::open(path, &open, &resources).unwrap();
        let mut served = Self { dir, disk, server: None, options };
        served.start();
        served
    }

    /// Starts a server, after [`Served::stop`].
    pub fn start(&mut self) {
        let server = Server::bind(&self.socket(), Arc::clone(&self.disk), self.options.clone()).unwrap();
        self.server = Some(server);
    }

    pub fn stop(&mut self) {
        self.server.take().unwrap().shutdown();
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("disk.sock")
    }
}

/// Options for tests: few queues, several threads.
pub fn options(queues: u16, io_threads: usize) -> Options {
    Options { queues, io_threads, serial: "test-serial".into(), ..Options::default() }
}
