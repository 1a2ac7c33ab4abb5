//! What a guest reads while it boots: taken once from a real one, and done again by many clients.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::super::client::Client;
use crate::guest::{Attach, Guest, Task, Vm};

/// For a guest that boots and reads its files.
const BOOT_MAX: Duration = Duration::from_secs(600);
/// QEMU's event for each read of a guest.
const EVENT: &str = "blk_co_preadv";

/// One read.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// The guest began it so long after the one before.
    after: Duration,
    at: u64,
    len: usize,
}

/// The reads of a guest, from power-on until it has read its files.
#[derive(Clone, Debug)]
pub(super) struct Boot {
    steps: Vec<Step>,
}

impl Boot {
    /// Has stock QEMU boot a guest on a local disk, and notes what it reads.
    pub(super) fn record(guest: &Guest, disk: &Path, dir: &Path) -> Result<Self> {
        let log = dir.join("reads.log");
        let path = log.to_str().context("a path that is text")?;
        let trace = ["-trace", EVENT, "-D", path, "-msg", "timestamp=on"].map(str::to_owned);
        Vm::boot_with(guest, &Attach::Qcow2(disk.to_owned()), Task::Verify, &trace)?
            .wait_for_end(BOOT_MAX)?;
        Self::parse(&fs::read_to_string(log)?)
    }

    fn parse(log: &str) -> Result<Self> {
        let reads: Vec<(f64, u64, usize)> = log.lines().filter_map(read).collect();
        ensure!(!reads.is_empty(), "QEMU noted no read of its guest");
        let mut before = reads[0].0;
        let steps = reads.into_iter().map(|(time, at, len)| {
            let after = Duration::from_secs_f64((time - before).max(0.0));
            before = time;
            Step { after, at, len }
        });
        Ok(Self { steps: steps.collect() })
    }

    /// Bytes that are read.
    pub(super) fn bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.len as u64).sum()
    }

    /// Does the same again, each read as long after the one before as the guest took to think, divided by `speed`; returns how long it took.
    pub(super) fn again(&self, client: &mut Client, speed: u32) -> Result<Duration> {
        let start = Instant::now();
        for step in &self.steps {
            // The guest's own work: nothing is waited for.
            thread::sleep(step.after / speed);
            client.read(step.at, step.len)?;
        }
        Ok(start.elapsed())
    }
}

/// A line of QEMU's log, `PID@SECONDS:EVENT ... offset N bytes N ...`: when, where, and how much.
fn read(line: &str) -> Option<(f64, u64, usize)> {
    let (head, event) = line.split_once(&format!(":{EVENT} "))?;
    let time = head.split_once('@')?.1.parse().ok()?;
    let words: Vec<&str> = event.split_whitespace().collect();
    let after = |name: &str| words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1));
    Some((time, after("offset")?.parse().ok()?, after("bytes")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_taken_from_the_log_of_qemu() {
        let log = "7@10.250000:blk_co_preadv blk 0x1 bs 0x2 offset 0 bytes 512 flags 0x0\nother\n\
                   7@10.500000:blk_co_preadv blk 0x1 bs 0x2 offset 4096 bytes 8192 flags 0x0\n";
        let boot = Boot::parse(log).unwrap();
        let step = |ms, at, len| Step { after: Duration::from_millis(ms), at, len };
        assert_eq!(boot.steps, [step(0, 0, 512), step(250, 4096, 8192)]);
        assert_eq!(boot.bytes(), 8704);
        assert!(Boot::parse("other\n").is_err());
    }
}
