//! What takes part: a base on a NAS, hosts with clones of it, and the same base on a local disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Barrier;
use std::thread;

use anyhow::{Context, Result};

use super::super::client::{Client, Target};
use super::super::fleet::{self, Fleet};
use super::super::history::take::timed;
use super::super::server::{serve_node, vmstrata};
use super::boot::Boot;
use crate::nas::{Mount, Nas, WIRE_BYTES_PER_S};

pub(super) const SEED: u64 = 20_261_130;
/// What of a wire's bytes is payload: the rest are headers.
pub(super) const PAYLOAD: f64 = WIRE_BYTES_PER_S / 125e6;
const BASE: &str = "golden.qcow2";

/// A NAS with a base, and what each host sees of it.
pub(super) struct Stage<'a> {
    pub(super) dir: &'a Path,
    /// Of each host; the first is host 1. Unmounted before the NAS goes.
    mounts: Vec<Mount>,
    pub(super) nas: Nas,
    /// The same base on this machine's disk.
    pub(super) local: &'a Path,
}

/// What guests found that booted together.
#[derive(Clone, Debug)]
pub(super) struct Storm {
    /// Until the last of them was up, in seconds.
    pub(super) time_s: f64,
    /// Bytes that came from the NAS, without headers, by host.
    pub(super) bytes: Vec<f64>,
}

/// Where stock QEMU has the overlays that guests write to; their base is on the NAS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlays {
    OnHost,
    OnNas,
}

/// Who serves: ends with this.
pub(super) enum Served {
    Vmstrata(Fleet),
    Qemu(Child),
}

impl Served {
    pub(super) fn stop(self) -> Result<()> {
        match self {
            Self::Vmstrata(fleet) => fleet.stop(),
            Self::Qemu(mut child) => {
                child.kill()?;
                Ok(child.wait().map(drop)?)
            }
        }
    }
}

impl<'a> Stage<'a> {
    /// A NAS with nothing on it, and so many hosts; files are made in `dir`.
    pub(super) fn new(hosts: u8, dir: &'a Path, local: &'a Path) -> Result<Self> {
        let nas = Nas::start(hosts)?;
        let mount = |host: u8| -> Result<Mount> {
            let at = dir.join(format!("mount{host}"));
            fs::create_dir(&at)?;
            Mount::new(&nas, host, &at)
        };
        let mounts = (1..=hosts).map(mount).collect::<Result<_>>()?;
        Ok(Self { dir, mounts, nas, local })
    }

    /// Publishes the base on the NAS, as `v1`, from a host.
    pub(super) fn publish(&self, host: u8) -> Result<()> {
        fs::copy(self.local, self.nas.export().join(BASE))?;
        timed(&mut self.publish_version(host, "v1")).map(drop)
    }

    /// Publishes what an image holds as a version of the base, from the host that has published it.
    pub(super) fn publish_from(&self, host: u8, version: &str, image: &Path) -> Result<()> {
        timed(self.publish_version(host, version).arg("--from").arg(image)).map(drop)
    }

    fn publish_version(&self, host: u8, version: &str) -> Command {
        let mut publish = Command::new(vmstrata());
        publish.args(["base", "publish"]).arg(self.base(host)).args(["--version", version, "--tier"]);
        publish.arg(self.dir.join("publisher"));
        publish
    }

    /// Where a host has mounted the NAS.
    pub(super) fn mount(&self, host: u8) -> &Path {
        self.mounts[usize::from(host) - 1].dir()
    }

    /// The base, as a host sees it.
    pub(super) fn base(&self, host: u8) -> PathBuf {
        self.mount(host).join(BASE)
    }

    /// Where a host keeps its files.
    pub(super) fn host_dir(&self, host: u8) -> PathBuf {
        self.dir.join(format!("host{host}"))
    }

    /// Clones of the published base that a host makes, in files in `dir`.
    pub(super) fn clones(&self, host: u8, dir: &Path, count: usize) -> Result<Vec<PathBuf>> {
        fs::create_dir_all(dir)?;
        let clone = |number: usize| -> Result<PathBuf> {
            let path = dir.join(format!("desk{number}.qcow2"));
            let mut clone = Command::new(vmstrata());
            clone.args(["snapshot", "clone"]).arg(format!("{}@v1", self.base(host).display()));
            timed(clone.arg("--output").arg(&path))?;
            Ok(path)
        };
        (0..count).map(clone).collect()
    }

    /// Has the host forget what it has of the base.
    pub(super) fn forget(&self, host: u8) -> Result<()> {
        let cache = self.host_dir(host).join("cache");
        if cache.exists() { Ok(fs::remove_dir_all(cache)?) } else { Ok(()) }
    }

    /// Serves clones through the host's replica: all by one server, as a host does.
    pub(super) fn serve(&self, host: u8, clones: &[PathBuf]) -> Result<(Served, Vec<PathBuf>)> {
        let dir = self.host_dir(host);
        serve_keyed(clones, &dir, &format!(",replica={}", dir.display()), self.mount(host))
    }

    /// Serves clones as tiered disks, with the host's copies in `tier`: what guests write is on the NAS after ten minutes.
    pub(super) fn serve_tiered(
        &self,
        host: u8,
        clones: &[PathBuf],
        tier: &Path,
    ) -> Result<(Served, Vec<PathBuf>)> {
        let dir = self.host_dir(host);
        fs::create_dir_all(&dir)?;
        serve_keyed(clones, &dir, &format!(",tier={},window=600", tier.display()), self.mount(host))
    }

    /// Serves an overlay on the local base.
    pub(super) fn serve_local(&self) -> Result<(Served, Vec<PathBuf>)> {
        let dir = self.dir.join("local");
        fs::create_dir_all(&dir)?;
        let overlay = dir.join("desk.qcow2");
        overlay_on(self.local, &overlay)?;
        serve_keyed(&[overlay], &dir, "", self.local.parent().context("a directory")?)
    }

    /// Has stock QEMU of a host serve new overlays on the base as it lies on the NAS, each by a process of its own.
    pub(super) fn serve_plain(
        &self,
        host: u8,
        count: usize,
        overlays: Overlays,
    ) -> Result<Vec<(Served, PathBuf)>> {
        let dir = self.host_dir(host).join("plain");
        fs::create_dir_all(&dir)?;
        let (server, path) = self.nas.address(host, "plain.qcow2");
        if !Path::new(&path).exists() {
            fs::copy(self.local, &path)?;
        }
        let serve = |number: usize| -> Result<(Served, PathBuf)> {
            let (name, socket) = (format!("plain{host}-{number}.qcow2"), dir.join(format!("{number}.sock")));
            let mut command = self.nas.network().on_host(host, Path::new("qemu-storage-daemon"));
            let direct = "cache.direct=on,cache.no-flush=off";
            let nfs = |node: &str, path: &str| {
                format!(
                    "driver=nfs,node-name={node},server.type=inet,server.host={server},path={path},{direct}"
                )
            };
            let overlay = match overlays {
                Overlays::OnHost => dir.join(name),
                Overlays::OnNas => self.nas.export().join(name),
            };
            overlay_on(self.local, &overlay)?;
            let overlay = overlay.display().to_string();
            for blockdev in [
                format!("{},read-only=on", nfs("nas", &path)),
                format!("driver=qcow2,node-name=base,file=nas,read-only=on,{direct}"),
                match overlays {
                    Overlays::OnHost => format!("driver=file,node-name=own,filename={overlay}"),
                    Overlays::OnNas => nfs("own", &overlay),
                },
                "driver=qcow2,node-name=disk,file=own,backing=base".to_owned(),
            ] {
                command.arg("--blockdev").arg(blockdev);
            }
            // The guest that boots is another client.
            let (child, _) = serve_node(command, &socket, SEED)?;
            Ok((Served::Qemu(child), socket))
        };
        (0..count).map(serve).collect()
    }

    /// All guests boot at once; those who serve end then.
    pub(super) fn storm(
        &self,
        (served, sockets): (Vec<Served>, Vec<PathBuf>),
        boot: &Boot,
        speed: u32,
    ) -> Result<Storm> {
        let hosts = 1..=self.mounts.len() as u8;
        let seen =
            || hosts.clone().map(|host| self.nas.network().received_bytes(host)).collect::<Result<Vec<_>>>();
        let before = seen()?;
        let times = at_once(&sockets, |_, client| boot.again(client, speed))?;
        let came = seen()?.into_iter().zip(before);
        let bytes = came.map(|(now, before)| (now - before) as f64 * PAYLOAD);
        let storm =
            Storm { time_s: times.iter().max().context("a guest")?.as_secs_f64(), bytes: bytes.collect() };
        served.into_iter().try_for_each(Served::stop)?;
        Ok(storm)
    }
}

/// A client of each socket does its work, which gets the client's number; all begin at once.
pub(super) fn at_once<T: Send>(
    sockets: &[PathBuf],
    work: impl Fn(usize, &mut Client) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let ready = Barrier::new(sockets.len());
    let one = |number: usize, socket: &PathBuf| -> Result<T> {
        let client = Client::connect(&Target::VhostUser(socket.clone()), SEED, false);
        ready.wait();
        work(number, &mut client?)
    };
    let one = &one;
    thread::scope(|scope| {
        let sockets = sockets.iter().enumerate();
        let running: Vec<_> =
            sockets.map(|(number, socket)| scope.spawn(move || one(number, socket))).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Serves disks whose backing files are in the directory `backing`.
fn serve_keyed(disks: &[PathBuf], dir: &Path, keys: &str, backing: &Path) -> Result<(Served, Vec<PathBuf>)> {
    let disks: Vec<_> = disks.iter().map(|path| (path.clone(), keys.to_owned())).collect();
    let more = ["--allow-backing".to_owned(), backing.display().to_string()];
    let fleet = Fleet::over(fleet::Served::WithoutLog, &disks, dir, &more)?;
    let sockets = fleet.sockets.clone();
    Ok((Served::Vmstrata(fleet), sockets))
}

fn overlay_on(base: &Path, overlay: &Path) -> Result<()> {
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]);
    timed(create.arg(base).arg(overlay)).map(drop)
}
