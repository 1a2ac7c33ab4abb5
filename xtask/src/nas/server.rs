//! The NAS: nfs-ganesha, which exports a directory of this machine's memory over NFSv3.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, bail};
use tempfile::TempDir;

use super::link::{self, MOUNT_PORT, NFS_PORT};
use super::network::{NAS, Network, left_over};
use super::proxy::Proxy;
use crate::answer::wait_for_answer;

/// Where files lie in memory.
const MEMORY: &str = "/dev/shm";
/// How names there begin; then comes the number of the process that made them.
const PREFIX: &str = "vmstrata-nas-";
const UP_MAX: Duration = Duration::from_secs(60);

/// A NAS with its network, until it is dropped.
#[derive(Debug)]
pub struct Nas {
    // Ended before the directory goes.
    network: Network,
    proxy: Proxy,
    dir: TempDir,
}

impl Nas {
    /// A NAS, and so many hosts that reach it over 1 Gbit/s each without further delay. Needs the superuser, and Debian's nfs-ganesha,
    /// nfs-ganesha-vfs and rpcbind.
    ///
    /// # Errors
    /// What is missing, or does not start.
    pub fn start(hosts: u8) -> Result<Self> {
        let network = Network::new(hosts)?;
        let proxy = Proxy::start(&network)?;
        for name in left_over(Path::new(MEMORY), PREFIX)? {
            fs::remove_dir_all(Path::new(MEMORY).join(name))?;
        }
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let dir = tempfile::Builder::new().prefix(&prefix).tempdir_in(MEMORY)?;
        fs::create_dir(dir.path().join("export"))?;
        let nas = Self { network, proxy, dir };
        nas.boot()?;
        Ok(nas)
    }

    /// Starts the server; after [`Nas::crash`], again.
    ///
    /// # Errors
    /// A server that does not answer, with what it said.
    pub fn boot(&self) -> Result<()> {
        let (conf, log) = (self.dir.path().join("ganesha.conf"), self.dir.path().join("ganesha.log"));
        fs::write(&conf, configuration(&self.export()))?;
        // Both keep sockets and locks in /run, which other servers have as well.
        let script = "mount -t tmpfs none /run && mkdir -p /run/ganesha && rpcbind && exec ganesha.nfsd -F -f \"$0\" -L \"$1\" -p /run/ganesha.pid";
        let mut command = self.network.command("nas", Path::new("unshare"));
        command.args(["--mount", "--propagation", "private", "sh", "-c", script]).args([&conf, &log]);
        let out = File::options().create(true).append(true).open(self.dir.path().join("out"))?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let mut child = command.spawn()?;
        let outs = [log, self.dir.path().join("out")];
        let said = || outs.each_ref().map(|path| fs::read_to_string(path).unwrap_or_default()).concat();
        wait_for_answer(&mut child, "nfs-ganesha", UP_MAX, said, || self.answers())?;
        // Its namespace ends it.
        std::thread::spawn(move || child.wait());
        Ok(())
    }

    fn answers(&self) -> Result<()> {
        let ask = || -> Result<()> {
            self.network.enter("nas")?;
            TcpStream::connect((NAS, NFS_PORT))?;
            link::mount(IpAddr::V4(NAS), &self.export().to_string_lossy())?;
            Ok(())
        };
        std::thread::scope(|scope| scope.spawn(ask).join().expect("does not panic"))
    }

    /// Kills the server: what it was not asked to commit may be lost, connections are reset, and new ones refused.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn crash(&self) -> Result<()> {
        self.network.clear("nas")
    }

    /// Has a request and its answer take so long on their way, beside what the wire takes.
    pub fn set_round_trip(&self, time: Duration) {
        self.proxy.set_round_trip(time);
    }

    /// The network with the hosts.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The exported directory, by its path on this machine as on the NAS.
    pub fn export(&self) -> PathBuf {
        self.dir.path().join("export")
    }

    /// Where a host finds a file or directory of the export, for NFS clients of this machine and for QEMU.
    pub fn address(&self, host: u8, name: &str) -> (Ipv4Addr, String) {
        (self.network.server_of(host), self.export().join(name).display().to_string())
    }
}

fn configuration(export: &Path) -> String {
    let export = export.display();
    format!(
        "NFS_CORE_PARAM {{ Protocols = 3; NFS_Port = {NFS_PORT}; MNT_Port = {MOUNT_PORT}; Enable_NLM = false; \
         Enable_RQUOTA = false; }}\n\
         EXPORT {{ Export_Id = 1; Path = {export}; Pseudo = /export; Protocols = 3; Access_Type = RW; \
         Squash = No_Root_Squash; SecType = sys; Transports = TCP; MaxRead = 1048576; MaxWrite = 1048576; \
         PrefRead = 1048576; PrefWrite = 1048576; Filesystem_id = 7.7; FSAL {{ Name = VFS; }} }}\n\
         LOG {{ Default_Log_Level = EVENT; }}\n"
    )
}

/// Whether what a NAS is made of is installed, and this is the superuser, who may make network namespaces.
///
/// # Errors
/// What is missing.
pub fn check() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("network namespaces need the superuser");
    }
    for program in ["ganesha.nfsd", "rpcbind", "ip", "tc", "setpriv", "unshare"] {
        let found = Command::new(program).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if let Err(error) = found.map_err(|error: io::Error| error.kind())
            && error == io::ErrorKind::NotFound
        {
            bail!(
                "no {program}: install Debian's nfs-ganesha, nfs-ganesha-vfs, qemu-block-extra and iproute2"
            );
        }
    }
    let apart = Command::new("unshare").args(["--net", "true"]).stderr(Stdio::null()).status()?;
    if !apart.success() {
        bail!("this host lets nobody make network namespaces");
    }
    Ok(())
}
