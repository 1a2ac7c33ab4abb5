//! `vmstrata vm snapshot --every`: one snapshot after the other, and those that no rule keeps deleted.
//!
//! A round that fails is told, and the next is tried: a guest may be down, a directory of the vault away for a while. Rounds
//! are due at whole periods since the start; those that come due while one is under way are left out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{snapshot, store};
use crate::args::{DiskSnapshotArgs, VmSnapshotArgs};
use crate::output::counted;

/// The label of all snapshots that are taken in this way: others are never deleted by it.
const LABEL: (&str, &str) = ("kind", "periodic");
/// How often an interruption is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Takes snapshots until `cancel` is set.
///
/// # Errors
/// When stdout does not take what is told of one.
pub(super) fn run(args: &VmSnapshotArgs, period: Duration, cancel: &AtomicBool) -> Result<()> {
    let start = Instant::now();
    let mut round = 0;
    while wait(start + period * round, cancel) {
        if let Err(error) = take(args, cancel)
            && !cancel.load(Ordering::Relaxed)
        {
            eprintln!("vmstrata: {}: {error:#}", args.guest);
        }
        let next = next_round(start.elapsed(), period, round);
        let missed = next - round - 1;
        if missed > 0 {
            eprintln!(
                "vmstrata: {}: {} left out: the last took too long",
                args.guest,
                counted(missed.into(), "snapshot")
            );
        }
        round = next;
    }
    Ok(())
}

/// One round: a snapshot, and an end to those that no rule keeps.
fn take(args: &VmSnapshotArgs, cancel: &AtomicBool) -> Result<()> {
    let own = (LABEL.0.to_owned(), LABEL.1.to_owned());
    let mut labels: Vec<_> = args.label.iter().filter(|(key, _)| *key != own.0).cloned().collect();
    labels.push(own);
    snapshot::take(args, &labels, cancel).context("no snapshot")?;
    let Some(keep) = &args.keep else { return Ok(()) };
    let disks = DiskSnapshotArgs { disks: true, server: args.server.clone() };
    let vault = store::open(&args.vault)?;
    let pruned = store::prune(&vault, &args.guest, &labels, keep, &disks);
    match pruned.context("snapshots that no rule keeps are still there")? {
        Some(gone) => gone.tell_line(args.json),
        None => Ok(()),
    }
}

/// The first round after `round` that is not due yet.
fn next_round(elapsed: Duration, period: Duration, round: u32) -> u32 {
    let begun = elapsed.as_nanos() / period.as_nanos().max(1);
    u32::try_from(begun).unwrap_or(u32::MAX - 1).max(round) + 1
}

/// Waits until `due`; `false` when interrupted before.
fn wait(due: Instant, cancel: &AtomicBool) -> bool {
    while !cancel.load(Ordering::Relaxed) {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(LOOK_EVERY));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_due_during_a_round_is_left_out() {
        let seconds = Duration::from_secs;
        assert_eq!(next_round(seconds(3), seconds(10), 0), 1);
        assert_eq!(next_round(seconds(10), seconds(10), 0), 2, "1 is due at this moment, and begins late");
        assert_eq!(next_round(seconds(35), seconds(10), 0), 4);
        assert_eq!(next_round(seconds(9), seconds(10), 1), 2, "clocks of threads may differ");
    }
}
