//! What the NBD tests share: disks made by stock tools, a server on them, and a small client of our own.
//!
//! The client speaks extended headers, which installed libnbd may not, and says what no decent client says.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

pub mod client;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use tempfile::TempDir;
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_export::nbd::{Address, Export, Exports, Limits, Listener, Server, TlsMode};

pub use client::{Client, Style};

/// Bytes of the disk of [`Fixture::chain`].
pub const SIZE: u64 = 8 << 20;

/// A server on a disk in a directory of its own.
pub struct Fixture {
    pub directory: TempDir,
    pub disk: Arc<Disk>,
    pub server: Option<Server>,
}

/// What is not as usual about a server.
#[derive(Default)]
pub struct Setup {
    pub read_only: bool,
    pub limits: Option<Limits>,
    pub tls: TlsMode,
}

impl Fixture {
    /// A chain of three layers with data, zeros and holes in it; see [`make_chain`].
    pub fn chain() -> Self {
        Self::chain_with(Setup::default())
    }

    pub fn chain_with(setup: Setup) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let top = make_chain(directory.path());
        Self::serve(directory, &top, setup)
    }

    /// An empty qcow2 image of one layer.
    pub fn empty(size: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("empty.qcow2");
        run("qemu-img", &["create", "-q", "-f", "qcow2", text(&path), &size.to_string()]);
        Self::serve(directory, &path, Setup::default())
    }

    pub fn serve(directory: TempDir, path: &Path, setup: Setup) -> Self {
        let resources = Resources::new(ResourceOptions::default());
        let options = OpenOptions { read_only: setup.read_only, ..OpenOptions::default() };
        let disk = Disk::open(path, &options, &resources).unwrap();
        let exports = Exports::new();
        exports.add(Export::new("disk", disk.clone()).with_description("a chain of layers")).unwrap();
        let limits = setup.limits.unwrap_or_default();
        let server = Server::new(exports, setup.tls, limits).unwrap();
        let address = Address::Unix(directory.path().join("nbd.sock"));
        server.listen(Listener::bind(&address).unwrap()).unwrap();
        Self { directory, disk, server: Some(server) }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd.sock")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What stock clients call the export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", text(&self.socket()))
    }

    /// A client in the transmission phase, with all contexts where the style has them.
    pub fn client(&self, style: Style) -> Client {
        Client::open(&self.socket(), "disk", style)
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    /// Stops the server, flushes and closes the disk.
    pub fn stop(mut self) -> TempDir {
        self.server.take().unwrap().shutdown().unwrap();
        self.disk.close().unwrap();
        self.directory
    }
}

/// Three layers of 64 KiB clusters on a disk of [`SIZE`]: returns the active one.
///
/// | cluster | content | layer |
/// |---|---|---|
/// | 0..16 | 0x11 | base (0) |
/// | 16..32 | 0x22 | middle (1) |
/// | 32..48 | 0x33 | active (2) |
/// | 40..44 | explicit zeros over it | active (2) |
/// | the rest | hole | none |
pub fn make_chain(directory: &Path) -> PathBuf {
    let [base, middle, active] = ["base", "middle", "active"].map(|name| directory.join(name));
    let mut backing: Option<&Path> = None;
    let size = SIZE.to_string();
    let layers: [(&Path, &[&str]); 3] = [
        (&base, &["write -q -P 0x11 0 1M"]),
        (&middle, &["write -q -P 0x22 1M 1M"]),
        (&active, &["write -q -P 0x33 2M 1M", "write -q -z 2560k 256k"]),
    ];
    for (path, writes) in layers {
        let mut arguments = vec!["create", "-q", "-f", "qcow2"];
        if let Some(backing) = backing {
            arguments.extend(["-b", text(backing), "-F", "qcow2"]);
        }
        arguments.extend([text(path), &size]);
        run("qemu-img", &arguments);
        let mut arguments: Vec<_> = writes.iter().flat_map(|write| ["-c", write]).collect();
        arguments.extend(["-f", "qcow2", text(path)]);
        run("qemu-io", &arguments);
        backing = Some(path);
    }
    active
}

/// What [`make_chain`] reads as.
pub fn chain_content() -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    for (fill, start) in [(0x11, 0), (0x22, 1), (0x33, 2)] {
        content[start << 20..(start + 1) << 20].fill(fill);
    }
    content[2560 << 10..2816 << 10].fill(0);
    content
}

/// Runs a program, which must succeed within a minute.
pub fn run(program: &str, arguments: &[&str]) -> Output {
    let output = try_run(program, arguments);
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    output
}

/// Runs a program for a minute at most.
pub fn try_run(program: &str, arguments: &[&str]) -> Output {
    // Distributions put the tools' own Python modules beside the system's interpreter.
    let path = format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60", program]).args(arguments).env("PATH", path);
    command.output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
