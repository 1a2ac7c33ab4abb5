//! A guest that fills its memory with pages of every kind, says what each is, and then keeps still.
//!
//! ```text
//!   disks: ext4 with blocks of 4 KiB ─ ext4 of 1 KiB ─ xfs ─ report: /proc/kpageflags, and /proc/kpagecount behind it
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::{RngCore, SeedableRng};

use super::bare::{self, SYSTEMS};
use super::packages::Kernel;

const INIT: &str = include_str!("census-init.sh");
const MEMORY_BYTES: u64 = 512 << 20;
const PAGE_BYTES: usize = 4096;
/// Bytes of the disk that the report is written to.
const REPORT_BYTES: u64 = 64 << 20;
/// Where the report has the counts; the flags are at its start.
const COUNTS_AT: usize = 16 << 20;
/// Bytes of each of the files that the guest reads.
const FILE_BYTES: usize = 1_500_000;
const FILES: usize = 8;

/// The running guest; killed when dropped.
#[derive(Debug)]
pub struct Census {
    qemu: Child,
    dir: PathBuf,
}

/// What the guest's kernel says of one page.
#[derive(Clone, Copy, Debug)]
pub struct Reported {
    /// As `/proc/kpageflags` has it; of a page inside a folio, the flags of its head.
    pub flags: u64,
    /// How often it is mapped.
    pub mapped: u64,
}

impl Census {
    /// Boots a guest with everything it needs in `dir`, and waits until it keeps still, for `time` at most.
    ///
    /// # Errors
    /// When a tool is missing, or the guest does not come that far.
    pub fn boot(kernel: &Kernel, busybox: &Path, dir: &Path, time: Duration) -> Result<Self> {
        let initramfs = dir.join("initramfs");
        fs::write(&initramfs, bare::initramfs(kernel, busybox, INIT)?.finish())?;
        make_disks(dir)?;
        let memory = format!(
            "memory-backend-file,id=ram,size={}M,share=on,mem-path={}",
            MEMORY_BYTES >> 20,
            dir.join("memory").display()
        );
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-no-reboot", "-display", "none", "-machine", "q35,memory-backend=ram"]);
        command.args([
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-m",
            &format!("{}M", MEMORY_BYTES >> 20),
            "-object",
            &memory,
        ]);
        command.arg("-serial").arg(format!("file:{}", dir.join("console").display()));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", dir.join("qmp").display()));
        command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(&initramfs);
        command.args([
            "-append",
            "console=ttyS0 quiet panic=-1 tsc=unstable no_timer_check random.trust_cpu=on",
        ]);
        for (name, path) in disks(dir) {
            command.arg("-drive").arg(format!("file={},format=raw,if=none,id={name}", path.display()));
            command.args(["-device", &format!("virtio-blk-pci,drive={name}")]);
        }
        let qemu = command.stdin(Stdio::null()).spawn().context("qemu-system-x86_64")?;
        let mut census = Self { qemu, dir: dir.to_owned() };
        census.wait(time)?;
        Ok(census)
    }

    fn wait(&mut self, time: Duration) -> Result<()> {
        let deadline = Instant::now() + time;
        loop {
            let console = fs::read(self.dir.join("console")).unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            if console.contains("guest: still") {
                return Ok(());
            }
            let ended = self.qemu.try_wait()?.is_some();
            let failed = ended || console.contains("guest: failed") || console.contains("Kernel panic");
            ensure!(!failed, "the guest failed:\n{console}");
            if Instant::now() > deadline {
                bail!("the guest is not still within {time:?}:\n{console}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The socket of its monitor.
    pub fn qmp(&self) -> PathBuf {
        self.dir.join("qmp")
    }

    /// The disks whose files it has read and written.
    pub fn disks(&self) -> Vec<PathBuf> {
        disks(&self.dir).into_iter().filter(|(name, _)| *name != "report").map(|(_, path)| path).collect()
    }

    /// What its kernel says of each page, by frame.
    ///
    /// # Errors
    /// When the report cannot be read.
    pub fn reported(&self) -> Result<Vec<Reported>> {
        const COMPOUND_TAIL: u64 = 1 << 16;
        let report = fs::read(self.dir.join("report.raw"))?;
        let word = |at: usize| u64::from_le_bytes(report[at..][..8].try_into().expect("eight bytes"));
        let (mut head, mut pages) = (0, Vec::new());
        for frame in 0..MEMORY_BYTES as usize / PAGE_BYTES {
            let own = word(frame * 8);
            head = if own & COMPOUND_TAIL == 0 { own } else { head };
            pages.push(Reported { flags: own | head, mapped: word(COUNTS_AT + frame * 8) });
        }
        Ok(pages)
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        // Killing a guest that has ended and been reaped fails harmlessly.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn disks(dir: &Path) -> Vec<(&'static str, PathBuf)> {
    let names = SYSTEMS.iter().map(|system| system.name).chain(["report"]);
    names.map(|name| (name, dir.join(format!("{name}.raw")))).collect()
}

/// Files that no two blocks of are alike, on ext4; the guest copies them to xfs itself.
fn make_disks(dir: &Path) -> Result<()> {
    let tree = dir.join("tree");
    fs::create_dir_all(&tree)?;
    for file in 0..FILES {
        let mut random = rand::rngs::SmallRng::seed_from_u64(file as u64);
        let mut bytes = vec![0; FILE_BYTES + file * 333];
        random.fill_bytes(&mut bytes);
        fs::write(tree.join(format!("data-{file}")), bytes)?;
    }
    for (name, path) in disks(dir) {
        match SYSTEMS.iter().find(|system| system.name == name) {
            Some(system) => system.make(&tree, &path)?,
            None => File::create(&path)?.set_len(REPORT_BYTES)?,
        }
    }
    Ok(fs::remove_dir_all(&tree)?)
}
