//! The servers under test as child processes: start, wait until they answer, weigh, stop.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::client::{Client, Target};
use crate::answer::wait_for_answer;

/// Stock QEMU needs 14 s for 1,000 layers on a fast machine; this is for a slow one.
const OPEN_MAX: Duration = Duration::from_secs(120);
const STOP_MAX: Duration = Duration::from_secs(30);

fn log(dir: &TempDir) -> String {
    fs::read_to_string(dir.path().join("log")).unwrap_or_default()
}

/// Who serves the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The distribution's `qemu-storage-daemon`.
    Qemu,
    /// This repository's `vmstrata serve`.
    Vmstrata,
    /// No server: the client reads a raw file of the same bytes through io_uring.
    Floor,
}

impl Kind {
    /// The name people read.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::Vmstrata => "vmstrata",
            Self::Floor => "floor",
        }
    }
}

/// A disk to serve.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The active layer.
    pub path: PathBuf,
    /// Whether clients may write.
    pub writable: bool,
    /// Directory of backing files outside the active layer's own.
    pub backing: Option<PathBuf>,
}

/// A server that runs until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    kind: Kind,
    disk: Disk,
    /// More of the disk's keys, such as `,window=5`.
    keys: String,
    /// Added to the command.
    flags: Vec<String>,
    dir: TempDir,
}

impl Server {
    /// Starts `kind` on `disk`, with a vhost-user-blk and an NBD socket in a directory of its own.
    ///
    /// # Errors
    /// When the program does not start.
    ///
    /// # Panics
    /// For [`Kind::Floor`], which is no server.
    pub fn start(kind: Kind, disk: &Disk) -> Result<Self> {
        Self::start_with(kind, disk, Vec::new())
    }

    /// The same with `flags` added to the command.
    ///
    /// # Errors
    /// As [`Server::start`].
    ///
    /// # Panics
    /// As [`Server::start`].
    pub fn start_with(kind: Kind, disk: &Disk, flags: Vec<String>) -> Result<Self> {
        Self::start_as(kind, disk, String::new(), flags)
    }

    /// Starts vmstrata on `disk` with more of its keys, such as `,window=5`.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_keyed(disk: &Disk, keys: &str) -> Result<Self> {
        Self::start_as(Kind::Vmstrata, disk, keys.to_owned(), Vec::new())
    }

    /// The same, with more keys of the disk, which only vmstrata knows.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_as(kind: Kind, disk: &Disk, keys: String, flags: Vec<String>) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("vmstrata-bench-").tempdir()?;
        let mut first = keyed(kind, disk, &keys, dir.path());
        let child = start(first.args(&flags), dir.path())?;
        Ok(Self { child, kind, disk: disk.clone(), keys, flags, dir })
    }

    /// Kills the server as kill -9 does: it has no moment to save anything.
    ///
    /// # Errors
    /// When it has ended before by itself.
    pub fn crash(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended by itself with {status}: {}", self.kind.label(), self.log());
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts the server again with the same disk and the same sockets.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn restart(&mut self) -> Result<()> {
        // Who waits for a socket waits for the new server's, not for what a killed one left.
        for socket in ["vhost.sock", "nbd.sock"] {
            let _ = fs::remove_file(self.dir.path().join(socket));
        }
        let mut again = keyed(self.kind, &self.disk, &self.keys, self.dir.path());
        self.child = start(again.args(&self.flags), self.dir.path())?;
        Ok(())
    }

    /// Has a new vmstrata take over the disk and the sockets, as an upgrade does; the old one ends clean.
    ///
    /// # Errors
    /// When either of them fails.
    pub fn replace(&mut self) -> Result<()> {
        let mut successor = keyed(self.kind, &self.disk, &self.keys, self.dir.path());
        successor.args(&self.flags).arg("--replace");
        let mut old = std::mem::replace(&mut self.child, start(&mut successor, self.dir.path())?);
        let status = old.wait()?;
        ensure!(status.success(), "the replaced server ended with {status}: {}", self.log());
        self.wait_for_vhost_user()
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The vhost-user-blk socket.
    pub fn vhost_user(&self) -> PathBuf {
        self.dir.path().join("vhost.sock")
    }

    /// The NBD socket.
    pub fn nbd(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    /// The NBD address.
    pub fn nbd_uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.nbd().display())
    }

    /// Where the server takes commands: vmstrata's API, QEMU's QMP.
    pub fn control(&self) -> PathBuf {
        control(self.dir.path())
    }

    /// A vhost-user client, as soon as the server takes one.
    ///
    /// # Errors
    /// When the server ends or stays silent, with what it said.
    pub fn connect(&mut self, data_seed: u64, read_only: bool) -> Result<Client> {
        let socket = self.vhost_user();
        let target = Target::VhostUser(socket.clone());
        self.until(|| {
            ensure!(socket.exists(), "no socket yet");
            Client::connect(&target, data_seed, read_only)
        })
    }

    /// Waits until someone listens at the vhost-user-blk socket.
    ///
    /// # Errors
    /// As [`Server::connect`].
    pub fn wait_for_vhost_user(&mut self) -> Result<()> {
        self.wait_for(&self.vhost_user())
    }

    /// Waits until someone listens at a socket.
    ///
    /// # Errors
    /// As [`Server::connect`].
    pub fn wait_for(&mut self, socket: &Path) -> Result<()> {
        self.until(|| {
            ensure!(listens(socket)?, "{}: no socket yet", socket.display());
            Ok(())
        })
    }

    /// Waits until someone listens at the NBD socket.
    ///
    /// # Errors
    /// As [`Server::connect`].
    pub fn wait_for_nbd(&mut self) -> Result<()> {
        self.wait_for(&self.nbd())
    }

    fn until<T>(&mut self, ready: impl FnMut() -> Result<T>) -> Result<T> {
        let said = || log(&self.dir);
        wait_for_answer(&mut self.child, self.kind.label(), OPEN_MAX, said, ready)
    }

    /// What the server printed so far.
    pub fn log(&self) -> String {
        log(&self.dir)
    }

    /// Resident memory in bytes without what it shares with clients.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn resident_bytes(&self) -> Result<u64> {
        resident_bytes(self.child.id())
    }

    /// Asks the server to end and waits for it.
    ///
    /// # Errors
    /// When it does not end, or reports failure.
    pub fn stop(mut self) -> Result<()> {
        terminate(&self.child)?;
        let start = Instant::now();
        while start.elapsed() < STOP_MAX {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{} ended with {status}: {}", self.kind.label(), self.log());
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        bail!("{} does not end: {}", self.kind.label(), self.log())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A stopped child has been reaped; killing it again fails harmlessly.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Has stock QEMU's storage daemon serve its node `disk` at a socket, for the first client that comes; `command` makes the node.
///
/// # Errors
/// When it ends or stays silent, with what it said.
pub fn serve_node(mut command: Command, socket: &Path, data_seed: u64) -> Result<(Child, Client)> {
    command.arg("--export").arg(format!(
        "vhost-user-blk,id=blk,node-name=disk,addr.type=unix,addr.path={},writable=on",
        socket.display()
    ));
    serve_at(command, "QEMU", socket, data_seed)
}

/// Has a command serve a disk at a socket, for the first client that comes; `who` names it.
///
/// # Errors
/// When it ends or stays silent, with what it said.
pub fn serve_at(mut command: Command, who: &str, socket: &Path, data_seed: u64) -> Result<(Child, Client)> {
    let log = socket.with_extension("log");
    let out = File::create(&log)?;
    let mut child = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn()?;
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let connect = || Client::connect(&Target::VhostUser(socket.to_owned()), data_seed, false);
    match wait_for_answer(&mut child, who, OPEN_MAX, said, connect) {
        Ok(client) => Ok((child, client)),
        Err(error) => {
            let _ = child.kill();
            Err(error)
        }
    }
}

/// Starts the program with its output appended to `dir/log`.
fn start(command: &mut Command, dir: &Path) -> Result<Child> {
    let log = File::options().create(true).append(true).open(dir.join("log"))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))
}

/// Where the vmstrata binary is: beside this one, which cargo built in the same directory.
pub fn vmstrata() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let in_deps = own.parent().is_some_and(|dir| dir.ends_with("deps"));
    let dir = own.ancestors().nth(if in_deps { 2 } else { 1 }).unwrap_or(Path::new("."));
    dir.join("vmstrata")
}

fn control(dir: &Path) -> PathBuf {
    dir.join("control.sock")
}

/// The command line of a server whose sockets lie in `dir`.
///
/// # Panics
/// For [`Kind::Floor`].
pub fn command(kind: Kind, disk: &Disk, dir: &Path) -> Command {
    keyed(kind, disk, "", dir)
}

fn keyed(kind: Kind, disk: &Disk, keys: &str, dir: &Path) -> Command {
    let (file, vhost, nbd) = (disk.path.display(), dir.join("vhost.sock"), dir.join("nbd.sock"));
    let (vhost, nbd, control) = (vhost.display(), nbd.display(), control(dir));
    let control = control.display();
    match kind {
        Kind::Qemu => {
            let (read_only, writable) = if disk.writable { ("off", "on") } else { ("on", "off") };
            let mut command = Command::new("qemu-storage-daemon");
            command.arg("--blockdev").arg(format!(
                "driver=qcow2,node-name=disk,read-only={read_only},discard=unmap,file.driver=file,file.filename={file}"
            ));
            command.arg("--chardev").arg(format!("socket,id=qmp,path={control},server=on,wait=off"));
            command.args(["--monitor", "chardev=qmp"]);
            command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={nbd}"));
            command.arg("--export").arg(format!("nbd,id=nbd,node-name=disk,name=disk,writable={writable}"));
            command.arg("--export").arg(format!(
                "vhost-user-blk,id=blk,node-name=disk,addr.type=unix,addr.path={vhost},writable={writable}"
            ));
            command
        }
        Kind::Vmstrata => {
            let (read_only, rw) = if disk.writable { ("", ",rw,share") } else { (",read-only", "") };
            let mut command = Command::new(vmstrata());
            command
                .arg("serve")
                .arg("--disk")
                .arg(format!("path={file},name=disk,cache=host{read_only}{keys}"));
            command
                .arg("--vhost-user")
                .arg(format!("disk={vhost},any-memory,share"))
                .arg("--nbd")
                .arg(format!("unix:{nbd}{rw}"));
            command.arg(format!("--control={control}"));
            if let Some(backing) = &disk.backing {
                command.arg("--allow-backing").arg(backing);
            }
            command
        }
        Kind::Floor => panic!("the floor has no server"),
    }
}

/// Sends SIGTERM to a child.
///
/// # Errors
/// When it is gone already.
pub fn terminate(child: &Child) -> Result<()> {
    let pid = rustix::process::Pid::from_child(child);
    Ok(rustix::process::kill_process(pid, rustix::process::Signal::TERM)?)
}

/// What a process takes of the host's memory, in bytes: its resident memory and the page tables for it. Left out are shared
/// memory (a client's buffers, a guest's RAM) and the pages of files that it has mapped only to read them, as vmstrata has
/// layers: those are the host's page cache, whoever reads the files and however.
///
/// # Errors
/// When the process is gone.
pub fn resident_bytes(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mappings = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let all = parse_resident(&status).context("no resident memory in /proc status")?;
    Ok(all.saturating_sub(parse_cached(&mappings)))
}

fn parse_resident(status: &str) -> Option<u64> {
    ["RssAnon:", "RssFile:", "VmPTE:"]
        .iter()
        .map(|name| status.lines().find_map(|line| kib(line, name)))
        .sum()
}

/// Bytes of a line of /proc that gives KiB by this name.
fn kib(line: &str, name: &str) -> Option<u64> {
    let value: u64 = line.strip_prefix(name)?.split_whitespace().next()?.parse().ok()?;
    Some(value * 1024)
}

/// Resident bytes of shared mappings that can only be read.
fn parse_cached(smaps: &str) -> u64 {
    let mut is_cache = false;
    let mut bytes = 0;
    for line in smaps.lines() {
        // A mapping begins with its addresses, its access and more; then come its figures, each by a name.
        match line.split_whitespace().nth(1).map(str::as_bytes) {
            Some(b"r--s") => is_cache = true,
            Some([_, _, _, b's' | b'p']) => is_cache = false,
            _ => {}
        }
        bytes += kib(line, "Rss:").filter(|_| is_cache).unwrap_or(0);
    }
    bytes
}

/// Lets this program's children hold as many files as the system allows: QEMU opens every layer at once.
///
/// # Errors
/// When the limit cannot be set.
pub fn raise_file_limit() -> Result<()> {
    let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = rustix::process::Rlimit { current: hard, maximum: hard };
    Ok(rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?)
}

/// Whether a process listens at a unix socket. The file alone says little: it is there a moment before, and is left by who
/// was killed. Connecting says more, but a server of one client would take that for the client.
fn listens(socket: &Path) -> Result<bool> {
    /// The kernel's `__SO_ACCEPTCON`.
    const ACCEPTS: &str = "00010000";
    let name = socket.to_str().context("a path that is text")?;
    let sockets = fs::read_to_string("/proc/net/unix")?;
    // Num RefCount Protocol Flags Type St Inode Path
    let accepts = |line: &str| line.split_whitespace().nth(3) == Some(ACCEPTS);
    Ok(sockets.lines().any(|line| line.ends_with(&format!(" {name}")) && accepts(line)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cached::Cached;

    #[test]
    fn a_server_that_is_started_again_answers_once_its_socket_is_there() {
        crate::build::vmstrata().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        let created =
            Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("8M").status();
        assert!(created.unwrap().success());
        let disk = Disk { path, writable: true, backing: None };
        let mut server = Server::start(Kind::Vmstrata, &disk).unwrap();
        server.wait_for_vhost_user().unwrap();
        for _ in 0..3 {
            server.crash().unwrap();
            server.restart().unwrap();
            server.wait_for_vhost_user().unwrap();
            std::os::unix::net::UnixStream::connect(server.vhost_user()).unwrap();
        }
        server.stop().unwrap();
    }

    #[test]
    fn stock_qemu_serves_both_exports_and_stops() {
        let dir = tempfile::tempdir().unwrap();
        let plan = crate::chain::Plan {
            layers: 2,
            size: 8 << 20,
            cluster_size: 65_536,
            fill: 0.8,
            overlap: 0.5,
            compress: 0.0,
            seed: 4,
        };
        let spec = crate::chain::Spec {
            plan,
            base: crate::chain::Base::Qcow2,
            backing_format: true,
            from_raw: None,
        };
        let manifest = crate::chain::generate(dir.path(), &spec).unwrap();
        let disk = Disk { path: manifest.top(dir.path()), writable: false, backing: None };
        let mut server = Server::start(Kind::Qemu, &disk).unwrap();
        let mut client = server.connect(4, true).unwrap();
        let owners: Vec<_> = manifest.owners().collect();
        let expected = |at: u64| owners[(at / 65_536) as usize].map(crate::chain::pattern::Writer::layer);
        client.verify(Duration::ZERO, true, &expected).unwrap();
        drop(client);
        server.wait_for_nbd().unwrap();
        crate::chain::verify::nbd(&manifest, &server.nbd_uri()).unwrap();
        assert!(server.resident_bytes().unwrap() > 1 << 20);
        server.stop().unwrap();
    }

    #[test]
    fn resident_memory_leaves_shared_memory_out() {
        let status = "VmRSS:\t   900 kB\nVmPTE:\t 7 kB\nRssAnon:\t     100 kB\nRssFile:\t  50 kB\nRssShmem:\t 750 kB\n";
        assert_eq!(parse_resident(status), Some(157 * 1024));
        assert_eq!(parse_resident("Name: x\nRssAnon:\t 1 kB\n"), None);
    }

    #[test]
    fn resident_memory_leaves_files_out_that_are_only_read() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("file");
        fs::write(&path, vec![1; 64 << 20]).unwrap();
        let pid = std::process::id();
        let all = || parse_resident(&fs::read_to_string("/proc/self/status").unwrap()).unwrap();
        let before = (all(), resident_bytes(pid).unwrap());
        let mapped = Cached::new(&[vec![path]]).unwrap();
        let after = (all(), resident_bytes(pid).unwrap());
        drop(mapped);
        assert!(after.0 > before.0 + (60 << 20), "{before:?} {after:?}");
        assert!(after.1 < before.1 + (16 << 20), "{before:?} {after:?}");
    }

    #[test]
    fn only_a_bound_socket_that_accepts_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(!listens(&path).unwrap());
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(listens(&path).unwrap());
        drop(listener);
        assert!(path.exists() && !listens(&path).unwrap());
    }
}
