//! A guest with little memory, which works through more data than that holds and swaps.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Attach, Guest, Hardware, Task, Vm, bare, packages, target};

const INIT: &str = include_str!("swap-init.sh");
/// Longest that it takes, from power-on to its end.
const RUN_MAX: Duration = Duration::from_secs(900);
const PAGE: f64 = 4096.0;

/// How much the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swapping {
    /// MiB of memory.
    pub memory_mib: u32,
    /// MiB of data.
    pub mib: u32,
    /// How often it reads all of the data, beside once before and once after.
    pub rounds: u32,
}

/// What it found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Swapped {
    /// From the first write to the last read, in seconds.
    pub time_s: f64,
    /// Bytes that were swapped in and out.
    pub bytes: f64,
}

impl Swapping {
    pub(super) fn command_line(self) -> String {
        format!("mib={} rounds={}", self.mib, self.rounds)
    }

    /// Starts QEMU by `command`, which gets the arguments for this guest and its disk, and waits for the guest's end.
    ///
    /// # Errors
    /// When it fails, or did not swap.
    pub fn run(self, mut command: Command, guest: &Guest, disk: &Attach) -> Result<Swapped> {
        let hardware = Hardware { mib: self.memory_mib, ..Hardware::default() };
        command.args(Vm::arguments(guest, disk, Task::Swap(self), &hardware));
        let mut vm = Vm::start(command)?;
        vm.wait_for_end(RUN_MAX)?;
        let found = vm.console().lines().find_map(parse).with_context(|| vm.console().to_owned())?;
        ensure!(found.bytes > 0.0, "the guest did not swap");
        Ok(found)
    }
}

/// The kernel and an initramfs in `dir` that is the whole system.
///
/// # Errors
/// When packages cannot be fetched.
pub fn guest(dir: &Path) -> Result<Guest> {
    let cache = target()?.join("guest");
    let lock = packages::lock(&cache)?;
    let kernel = packages::kernel(&cache)?;
    let init = bare::initramfs(&kernel, &packages::busybox(&cache)?, INIT)?.finish();
    drop(lock);
    let initramfs = dir.join("swap-initramfs");
    fs::write(&initramfs, init)?;
    Ok(Guest { kernel: kernel.image, initramfs, root: dir.to_owned() })
}

/// A line `guest: swapping took SECONDS s, IN pages in, OUT out`.
fn parse(line: &str) -> Option<Swapped> {
    let words: Vec<&str> = line.strip_prefix("guest: swapping took ")?.split([' ', ',']).collect();
    let number = |at: usize| words.get(at)?.parse::<f64>().ok();
    // "TIME", "s", "", "IN", "pages", "in", "", "OUT", "out"
    Some(Swapped { time_s: number(0)?, bytes: (number(3)? + number(7)?) * PAGE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_says_is_read() {
        let said = "guest: swapping took 1234e-2 s, 300 pages in, 500 out";
        assert_eq!(parse(said), Some(Swapped { time_s: 12.34, bytes: 800.0 * PAGE }));
        assert_eq!(parse("guest: up"), None);
    }
}
