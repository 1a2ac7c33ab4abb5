//! Several disks behind one server, each with a client of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::thread;

use anyhow::{Context, Result};

use super::client::{Client, Target};
use super::history::take::timed;
use super::load::Load;
use super::server::{Disk, Kind, Server, vmstrata};

const SEED: u64 = 20_261_129;

/// How disks are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    WithLog,
    WithoutLog,
    Qemu,
}

impl Served {
    pub(super) fn kind(self) -> Kind {
        if self == Self::Qemu { Kind::Qemu } else { Kind::Vmstrata }
    }

    /// Of its directory.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::WithLog => "with-log",
            Self::WithoutLog => "without-log",
            Self::Qemu => "qemu",
        }
    }
}

/// A server and its disks.
pub(super) struct Fleet {
    pub(super) server: Server,
    pub(super) sockets: Vec<PathBuf>,
    pub(super) images: Vec<PathBuf>,
    /// Turns so far: each writes elsewhere.
    turn: u16,
}

/// A disk to serve: its image, and more of its keys.
pub(super) type Keyed = (PathBuf, String);

impl Fleet {
    /// So many empty disks of `size` bytes each.
    pub(super) fn start(
        side: Served,
        (disks, size): (usize, u64),
        dir: &Path,
        more: &[String],
    ) -> Result<Self> {
        let dir = dir.join(side.name());
        fs::create_dir_all(&dir)?;
        let image = |number: usize| -> Result<Keyed> {
            let path = dir.join(format!("{number}.qcow2"));
            empty(side.kind(), &path, size)?;
            Ok((path, String::new()))
        };
        let disks = (0..disks).map(image).collect::<Result<Vec<_>>>()?;
        Self::over(side, &disks, &dir, more)
    }

    /// The disks, with sockets in `dir`; `more` are flags of the server.
    pub(super) fn over(side: Served, disks: &[Keyed], dir: &Path, more: &[String]) -> Result<Self> {
        let mut flags = more.to_vec();
        if side == Served::WithLog {
            flags.extend(["--flush-log".to_owned(), dir.join("flush.log").display().to_string()]);
        }
        let mut sockets = Vec::new();
        for (number, disk) in disks.iter().enumerate().skip(1) {
            let socket = dir.join(format!("{number}.sock"));
            flags.extend(another(side.kind(), number, disk, &socket));
            sockets.push(socket);
        }
        let (path, keys) = disks[0].clone();
        let first = Disk { path, writable: true, backing: None };
        let server = Server::start_as(side.kind(), &first, keys, flags)?;
        sockets.insert(0, server.vhost_user());
        let images = disks.iter().map(|(image, _)| image.clone()).collect();
        let mut fleet = Self { server, sockets, images, turn: 0 };
        fleet.wait()?;
        Ok(fleet)
    }

    /// Waits until all disks are served.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.sockets.iter().try_for_each(|socket| self.server.wait_for(socket))
    }

    /// All disks have their work at the same time: requests a second of each, and the time in ms that 99 of 100 do not exceed.
    pub(super) fn work(&mut self, load: impl Fn(u16, usize) -> Load) -> Result<Vec<(f64, f64)>> {
        self.work_on(self.sockets.len(), load)
    }

    /// As [`Fleet::work`], of the first `disks`.
    pub(super) fn work_on(
        &mut self,
        disks: usize,
        load: impl Fn(u16, usize) -> Load,
    ) -> Result<Vec<(f64, f64)>> {
        self.turn += 1;
        let ready = Barrier::new(disks);
        let one = |socket: &Path, load: Load| -> Result<(f64, f64)> {
            let client = Client::connect(&Target::VhostUser(socket.to_owned()), SEED, false);
            ready.wait();
            client?.run_timed(&load)
        };
        let one = &one;
        thread::scope(|scope| {
            let sockets = self.sockets[..disks].iter().enumerate();
            let begin = |(disk, socket): (usize, &PathBuf)| {
                let (socket, load) = (socket.clone(), load(self.turn, disk));
                scope.spawn(move || one(&socket, load))
            };
            let running: Vec<_> = sockets.map(begin).collect();
            running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    pub(super) fn stop(self) -> Result<()> {
        self.server.stop()
    }
}

/// The flags of one more disk.
fn another(kind: Kind, number: usize, (image, keys): &Keyed, socket: &Path) -> Vec<String> {
    let (image, socket) = (image.display(), socket.display());
    let words = match kind {
        Kind::Qemu => [
            "--blockdev".to_owned(),
            format!("driver=qcow2,node-name=d{number},discard=unmap,file.driver=file,file.filename={image}"),
            "--export".to_owned(),
            format!(
                "vhost-user-blk,id=b{number},node-name=d{number},addr.type=unix,addr.path={socket},writable=on"
            ),
        ],
        _ => [
            "--disk".to_owned(),
            format!("path={image},name=d{number},cache=host{keys}"),
            "--vhost-user".to_owned(),
            format!("d{number}={socket},any-memory,share"),
        ],
    };
    words.to_vec()
}

/// An image as its side makes them.
pub(super) fn empty(kind: Kind, path: &Path, size: u64) -> Result<()> {
    let (program, args): (PathBuf, &[&str]) = match kind {
        Kind::Qemu => ("qemu-img".into(), &["create", "-q", "-f", "qcow2"]),
        _ => (vmstrata(), &["create"]),
    };
    let mut create = Command::new(program);
    create.args(args);
    timed(create.arg(path).arg(size.to_string())).context("an empty image")?;
    Ok(())
}
