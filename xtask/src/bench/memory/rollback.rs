//! Guests that are killed and started again from their last snapshot.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::sample::{Sample, Samples};
use super::stage::Stage;
use super::taken;

/// For how long work is counted afterwards.
const AFTER: Duration = Duration::from_secs(10);
/// The peer of the others: every page was stored.
const ALL: &str = "all pages";
const REFILL: &str = "cache from the disk";
const NO_CACHE: &str = "no cache";
pub(super) const LAZY: &str = "lazily";
/// How a guest can be restored, with which flags.
const WAYS: [(&str, &[&str]); 4] =
    [(ALL, &[]), (REFILL, &[]), (NO_CACHE, &["--no-cache"]), (LAZY, &["--lazy"])];

/// Restores the guest in every way.
pub(super) fn measure(stage: &mut Stage, rounds: usize, samples: &mut Samples) -> Result<()> {
    taken::take_both(stage)?;
    for _ in 0..rounds {
        for (way, flags) in WAYS {
            samples.add(Sample::Restore(way), restore(stage, way, flags)?);
            samples.add(Sample::Work(way), work(stage)?);
        }
        samples.divided(Sample::Restore(NO_CACHE), Sample::Restore(ALL), Sample::RestoreRatio);
        for way in [REFILL, NO_CACHE, LAZY] {
            samples.divided(Sample::Work(way), Sample::Work(ALL), Sample::WorkAfter(way));
        }
    }
    Ok(())
}

/// The same of a large guest, of which only the time is looked at.
pub(super) fn measure_large(stage: &mut Stage, rounds: usize, samples: &mut Samples) -> Result<()> {
    taken::take_both(stage)?;
    for _ in 0..rounds {
        for (way, flags) in WAYS {
            samples.add(Sample::RestoreLarge(way), restore(stage, way, flags)?);
        }
        let ratio = Sample::RestoreRatioLarge;
        samples.divided(Sample::RestoreLarge(NO_CACHE), Sample::RestoreLarge(ALL), ratio);
    }
    Ok(())
}

/// Seconds until the guest runs again.
fn restore(stage: &mut Stage, way: &str, flags: &[&str]) -> Result<f64> {
    let name = if way == ALL { taken::WHOLE } else { taken::REFILLED };
    Ok(stage.restore(name, taken::REFILLED, name, flags)?.as_secs_f64())
}

/// Pieces of work that the guest does from now on, in a time.
fn work(stage: &mut Stage) -> Result<f64> {
    let end = Instant::now() + AFTER;
    let mut pieces = 0;
    while stage.guest.vm.saw("guest: did ", end.saturating_duration_since(Instant::now()))? {
        pieces += 1;
    }
    Ok(f64::from(pieces))
}
