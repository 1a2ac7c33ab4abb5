//! What a measurement was taken on and with, and the machine made ready for it.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::results::Machine;

/// How long the machine is looked at to tell whether it is idle, and how often it must have been, one look after the other.
const LOOK: Duration = Duration::from_millis(250);
const IDLE_LOOKS: u32 = 4;

/// The page cache takes a write of so many bytes in one piece, as it does a new cluster.
const PIECE: usize = 64 << 10;

/// Describes this machine from `/proc`.
pub fn machine() -> Machine {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    Machine {
        cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_mib: field(&read("/proc/meminfo"), "MemTotal")
            .and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok())
            .map_or(0, |kib| kib / 1024),
        // The version alone: what follows the first hyphen is the name of a build.
        kernel: read("/proc/sys/kernel/osrelease").trim().split('-').next().unwrap_or_default().to_owned(),
    }
}

fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Waits until the machine has been idle for a second: until the kernel is done with what was written, and with memory that
/// was given back, of which a virtual machine tells its host piece by piece. Not for ever: a quarter of a minute at most.
pub fn settle() {
    let until = Instant::now() + Duration::from_secs(15);
    let mut idle = 0;
    while idle < IDLE_LOOKS && Instant::now() < until {
        let before = Ticks::now();
        thread::sleep(LOOK);
        idle = if Ticks::now().busy_share_since(&before) < 0.05 { idle + 1 } else { 0 };
    }
}

/// Turns around, in every other round, who takes part in it: who comes first meets the machine as something else left it.
pub fn by_turns<T>(who: &mut [T], round: u32) {
    if round % 2 == 1 {
        who.reverse();
    }
}

/// Processor time since the machine started, of all processors, in the kernel's ticks.
struct Ticks {
    busy: u64,
    all: u64,
}

impl Ticks {
    fn now() -> Self {
        Self::of(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// From the text of `/proc/stat`: user, nice, system, idle, waiting for the disk, and more of being busy.
    fn of(stat: &str) -> Self {
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> =
            line.split_whitespace().skip(1).take(8).filter_map(|n| n.parse().ok()).collect();
        let (all, idle): (u64, u64) = (ticks.iter().sum(), ticks.iter().skip(3).take(2).sum());
        Self { busy: all - idle, all }
    }

    fn busy_share_since(&self, before: &Self) -> f64 {
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64;
        since(self.busy, before.busy) / since(self.all, before.all).max(1.0)
    }
}

/// Touches up to `bytes` of free memory, so that what is measured next meets memory that the machine really has.
///
/// A virtual machine's host gives it memory at the first touch, and takes free memory back behind its back; each page then
/// costs its first user a fault on the host. On the machine of the published figures that is 12 µs a page instead of 2,
/// which halves the rate of whatever fills new pages of the page cache, for whoever comes first.
pub fn touch_free_memory(bytes: usize) {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = field(&meminfo, "MemFree")
        .and_then(|text| text.trim_end_matches(" kB").parse::<usize>().ok())
        .map_or(0, |kib| kib * 1024);
    // Some is left, so that nothing else is pushed out of memory for it.
    let pages = vec![1u8; bytes.min(free / 8 * 7)];
    std::hint::black_box(&pages);
}

/// Memory that the machine really has, set free in pieces that stay there until somebody needs them.
///
/// As with [`touch_free_memory`], but by way of the page cache: what then fills pages of files meets the same memory, and
/// nothing of it moves this process's address space, which would hold up other threads that touch new memory. Of the memory
/// touched, every other piece is kept. What is free between them cannot grow together again, and only what is free in large
/// pieces is given to the host, two seconds later (free page reporting): that would take the memory away before it is used,
/// and hold the whole machine up meanwhile.
#[derive(Debug)]
pub struct FreeMemory {
    _kept: fs::File,
}

impl FreeMemory {
    /// Sets `bytes` free, and keeps as much until this is dropped.
    ///
    /// # Errors
    /// When no file can be made in `dir`, or written.
    pub fn touched(dir: &Path, bytes: usize) -> io::Result<Self> {
        // The files have no names, and are gone before anything of them has been written to disk.
        let [mut free, mut kept] = [tempfile::tempfile_in(dir)?, tempfile::tempfile_in(dir)?];
        let piece = vec![0; PIECE];
        for _ in 0..bytes / PIECE {
            free.write_all(&piece)?;
            kept.write_all(&piece)?;
        }
        Ok(Self { _kept: kept })
    }
}

/// First line of `program --version`, or that it is missing.
pub fn version(program: &str) -> String {
    let output = Command::new(program).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("not installed").to_owned()
}

/// Today as `YYYY-MM-DD` in UTC.
pub fn today() -> String {
    let seconds =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds / 86_400)
}

/// The civil date of a day number since 1970-01-01 (Howard Hinnant's `civil_from_days`).
fn date(days: u64) -> String {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_memory_is_kept_as_set_free_and_no_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let memory = FreeMemory::touched(dir.path(), 1 << 20).unwrap();
        assert_eq!(memory._kept.metadata().unwrap().len(), 1 << 20);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(19_782), "2024-02-29");
        assert_eq!(date(20_454), "2026-01-01");
    }

    #[test]
    fn idle_time_and_waiting_for_the_disk_are_not_busy() {
        let before = Ticks::of("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1 2 3\n");
        let after = Ticks::of("cpu  40 0 10 130 20 0 0 0 0 0\n");
        assert_eq!((before.busy, before.all), (20, 100));
        assert_eq!(after.busy_share_since(&before), 0.3);
        assert_eq!(before.busy_share_since(&before), 0.0);
    }

    #[test]
    fn fields_of_proc_files() {
        assert_eq!(field("a : 1\nmodel name\t: Some CPU\n", "model name").unwrap(), "Some CPU");
        assert_eq!(field("a : 1\n", "b"), None);
    }
}
