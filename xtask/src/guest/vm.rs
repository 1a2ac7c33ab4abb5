//! One run of stock QEMU with the guest, and what it says on its console.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Guest;

/// Of a vhost-user-blk device: QEMU's server says that it writes through, and does not. A guest that cannot ask sends flushes.
pub(super) const FLUSHED: &str = "config-wce=off";

/// How the guest's disk reaches it.
#[derive(Clone, Debug)]
pub enum Attach {
    /// A vhost-user-blk socket that may go away and come back.
    VhostUser(PathBuf),
    /// An NBD socket with an export `disk`, through virtio-blk.
    Nbd(PathBuf),
    /// QEMU's own qcow2 driver and virtio-blk, read-only.
    Qcow2(PathBuf),
    /// What this option of QEMU says, without a name, and virtio-blk.
    Blockdev(String),
}

/// What init is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Report, and power off. The disk is mounted read-only.
    Boot,
    /// Check every file the disk was made with. The disk is mounted read-only.
    Verify,
    /// So many rounds of writing, syncing, and checking files, then [`Task::Verify`].
    Workload {
        /// Number of rounds.
        rounds: u32,
    },
    /// As [`Task::Workload`], until it is told to stop ([`Vm::say`]).
    Soak,
    /// Wait for the disk to grow, write to its new end, then [`Task::Verify`].
    Resize,
    /// Count for ever; each step checks a file in memory, one on disk, and that the disk holds every step before it.
    Count,
    /// As [`Task::Count`], among readers, writers, programs mapped from disk, and too little memory.
    Busy,
    /// Read every file the disk was made with, and check them again each time it is told to (`check`, by [`Vm::say`]).
    Cache,
    /// Be a system of services, of which one tries vmstrata's units: see [`super::system`].
    System,
    /// Work of a kind, for ever; with a root of [`Guest::for_work`].
    Work(&'static str),
    /// Benchmark a database: see [`super::rocksdb`].
    Rocksdb(super::rocksdb::Operations),
    /// Make databases for [`Task::Flushes`].
    Databases,
    /// Make transactions until it is told to stop: see [`super::flushes`].
    Transactions,
    /// Have programs flush often: see [`super::flushes`].
    Flushes(super::flushes::Operations),
    /// Swap, in a guest of [`super::swap::guest`].
    Swap(super::swap::Swapping),
}

impl Task {
    fn command_line(self) -> String {
        match self {
            Self::Boot => "task=boot rootflags=ro".into(),
            Self::Verify => "task=verify rootflags=ro".into(),
            Self::Resize => "task=resize".into(),
            Self::Workload { rounds } => format!("task=workload rounds={rounds}"),
            Self::Soak => "task=soak".into(),
            Self::Count => "task=count".into(),
            Self::Busy => "task=busy".into(),
            Self::Cache => "task=cache".into(),
            Self::System => "systemd.unit=units-test.target systemd.show_status=0".into(),
            Self::Work(kind) => format!("task={kind}"),
            Self::Rocksdb(operations) => operations.command_line(),
            Self::Databases => "task=prepare rootflags=ro".into(),
            Self::Transactions => "task=transactions rootflags=ro".into(),
            Self::Flushes(operations) => operations.command_line(),
            Self::Swap(swapping) => swapping.command_line(),
        }
    }
}

/// Words of a kernel that lost data; none may ever be on a console.
const KERNEL_COMPLAINTS: [&str; 6] =
    ["I/O error", "EXT4-fs error", "EXT4-fs warning", "Kernel panic", "blocked for more than", "JBD2: "];

/// What a machine has besides its disk.
#[derive(Clone, Debug, Default)]
pub struct Hardware {
    /// The file that is its memory; anonymous memory if there is none.
    pub memory: Option<PathBuf>,
    /// MiB of memory; 256 if 0.
    pub mib: u32,
    /// Further NUMA nodes, each with the file that is its memory, and its MiB; the memory above is the first node's.
    pub nodes: Vec<(PathBuf, u32)>,
    /// Further arguments of QEMU.
    pub arguments: Vec<String>,
}

impl Hardware {
    fn memory_arguments(&self) -> Vec<String> {
        let mib = if self.mib == 0 { 256 } else { self.mib };
        let all = mib + self.nodes.iter().map(|(_, mib)| mib).sum::<u32>();
        let object = |file: Option<&Path>, id: &str, mib: u32| {
            let kind = match file {
                Some(file) => format!("memory-backend-file,mem-path={},", file.display()),
                None => "memory-backend-memfd,".to_owned(),
            };
            ["-object".to_owned(), format!("{kind}id={id},size={mib}M,share=on")]
        };
        let mut words = vec!["-m".to_owned(), all.to_string()];
        words.extend(object(self.memory.as_deref(), "ram", mib));
        if self.nodes.is_empty() {
            words.extend(["-machine", "q35,memory-backend=ram"].map(str::to_owned));
            return words;
        }
        words.extend(["-machine", "q35", "-numa", "node,memdev=ram"].map(str::to_owned));
        for (index, (file, mib)) in self.nodes.iter().enumerate() {
            words.extend(object(Some(file), &format!("node{index}"), *mib));
            words.extend(["-numa".to_owned(), format!("node,memdev=node{index}")]);
        }
        words
    }
}

/// A running guest; killed when dropped.
#[derive(Debug)]
pub struct Vm {
    qemu: Child,
    lines: Receiver<String>,
    console: String,
    start: Instant,
}

impl Vm {
    /// Powers a guest on.
    ///
    /// # Errors
    /// When QEMU does not start.
    pub fn boot(guest: &Guest, attach: &Attach, task: Task) -> Result<Self> {
        Self::boot_with(guest, attach, task, &[])
    }

    /// As [`Vm::boot`], with more arguments for QEMU.
    ///
    /// # Errors
    /// As [`Vm::boot`].
    pub fn boot_with(guest: &Guest, attach: &Attach, task: Task, more: &[String]) -> Result<Self> {
        let mut command = Command::new("qemu-system-x86_64");
        let hardware = Hardware { arguments: more.to_vec(), ..Hardware::default() };
        command.args(Self::arguments(guest, attach, task, &hardware));
        Self::start(command)
    }

    /// QEMU's arguments for a guest.
    pub fn arguments(guest: &Guest, attach: &Attach, task: Task, hardware: &Hardware) -> Vec<OsString> {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        command.args(["-accel", "tcg", "-cpu", "max", "-smp", "1"]).args(hardware.memory_arguments());
        command.args(&hardware.arguments);
        command.arg("-kernel").arg(&guest.kernel).arg("-initrd").arg(&guest.initramfs);
        let words = "console=ttyS0 quiet panic=-1 tsc=unstable no_timer_check random.trust_cpu=on";
        command.arg("-append").arg(format!("{words} {}", task.command_line()));
        match attach {
            Attach::VhostUser(socket) => {
                let path = socket.display();
                command.arg("-chardev").arg(format!("socket,id=disk,path={path},reconnect=1"));
                command.arg("-device").arg(format!("vhost-user-blk-pci,chardev=disk,num-queues=1,{FLUSHED}"));
            }
            Attach::Nbd(socket) => {
                let path = socket.display();
                command.arg("-blockdev").arg(format!(
                    "driver=nbd,node-name=disk,discard=unmap,export=disk,server.type=unix,server.path={path}"
                ));
                command.args(["-device", "virtio-blk-pci,drive=disk"]);
            }
            Attach::Qcow2(file) => {
                let file = file.display();
                command.arg("-blockdev").arg(format!(
                    "driver=qcow2,node-name=disk,read-only=on,file.driver=file,file.filename={file}"
                ));
                command.args(["-device", "virtio-blk-pci,drive=disk"]);
            }
            Attach::Blockdev(option) => {
                command.arg("-blockdev").arg(format!("node-name=disk,{option}"));
                command.args(["-device", "virtio-blk-pci,drive=disk"]);
            }
        }
        command.get_args().map(OsStr::to_owned).collect()
    }

    /// Starts a command that becomes QEMU, with the guest's console on its standard output.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(mut command: Command) -> Result<Self> {
        let start = Instant::now();
        let mut qemu = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("qemu-system-x86_64 (package qemu-system-x86)")?;
        let (sender, lines) = channel();
        send_lines(qemu.stdout.take().expect("piped"), "", sender.clone());
        send_lines(qemu.stderr.take().expect("piped"), "qemu: ", sender);
        Ok(Self { qemu, lines, console: String::new(), start })
    }

    /// Waits for a console line that holds `text`; returns the time since power-on.
    ///
    /// # Errors
    /// When the guest fails, ends, complains of its disk, or the time is up first.
    pub fn wait_for(&mut self, text: &str, time: Duration) -> Result<Duration> {
        ensure!(self.saw(text, time)?, "no {text:?} within {time:?}; console:\n{}", self.console);
        Ok(self.start.elapsed())
    }

    /// Whether a console line that holds `text` comes within `time`.
    ///
    /// # Errors
    /// When the guest fails, ends, or complains of its disk first.
    pub fn saw(&mut self, text: &str, time: Duration) -> Result<bool> {
        let deadline = Instant::now() + time;
        loop {
            let line = match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => return Ok(false),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("ended before {text:?}; console:\n{}", self.console)
                }
            };
            self.take(&line)?;
            if line.contains(text) {
                return Ok(true);
            }
        }
    }

    /// Waits until the guest has said that it is done and powered itself off.
    ///
    /// # Errors
    /// As [`Vm::wait_for`], and when QEMU reports failure.
    pub fn wait_for_end(&mut self, time: Duration) -> Result<()> {
        if !self.console.contains("guest: done") {
            self.wait_for("guest: done", time)?;
        }
        let deadline = Instant::now() + time;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.take(&line)?,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("the guest does not power off:\n{}", self.console),
            }
        }
        let status = self.qemu.wait()?;
        ensure!(status.success(), "QEMU ended with {status}; console:\n{}", self.console);
        Ok(())
    }

    /// Types a line on the guest's console.
    ///
    /// # Errors
    /// When QEMU has ended.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let input = self.qemu.stdin.as_mut().context("a console to type on")?;
        Ok(writeln!(input, "{line}")?)
    }

    /// Process id of QEMU.
    pub fn pid(&self) -> u32 {
        self.qemu.id()
    }

    /// Everything the guest has printed so far.
    pub fn console(&self) -> &str {
        &self.console
    }

    fn take(&mut self, line: &str) -> Result<()> {
        self.console.push_str(line);
        self.console.push('\n');
        let complains =
            line.contains("guest: failed") || KERNEL_COMPLAINTS.iter().any(|words| line.contains(words));
        ensure!(!complains, "the guest says {line:?}; console:\n{}", self.console);
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Killing a guest that has ended and been reaped fails harmlessly.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Sends each line of `out`, with `prefix` before it, until it ends or no one listens.
fn send_lines(out: impl Read + Send + 'static, prefix: &'static str, sender: Sender<String>) {
    std::thread::spawn(move || {
        let mut lines = BufReader::new(out).split(b'\n');
        while let Some(Ok(line)) = lines.next() {
            let line = format!("{prefix}{}", String::from_utf8_lossy(&line).trim_end());
            if sender.send(line).is_err() {
                return;
            }
        }
    });
}
