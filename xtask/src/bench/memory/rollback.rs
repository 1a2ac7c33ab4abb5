//! Guests that are killed and started again from their last snapshot.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::Options;
use super::sample::{Of, Sample, Samples};
use super::stage::Stage;
use super::taken;

/// Longest that a guest takes for a piece of work.
const ANSWER_MAX: Duration = Duration::from_secs(300);
/// What a guest says after each piece of work.
const DID: &str = "guest: did ";
/// The peer of the others: every page was stored.
const ALL: &str = "all pages";
pub(super) const REFILL: &str = "cache from the disk";
const NO_CACHE: &str = "no cache";
pub(super) const LAZY: &str = "lazily";
/// How a guest can be restored, with which flags.
const WAYS: [(&str, &[&str]); 4] =
    [(ALL, &[]), (REFILL, &[]), (NO_CACHE, &["--no-cache"]), (LAZY, &["--lazy"])];

/// Restores the guest in every way; counts the work that those at work do afterwards.
pub(super) fn measure(stage: &mut Stage, options: &Options, samples: &mut Samples) -> Result<()> {
    taken::take_both(stage)?;
    for _ in 0..options.rounds {
        for (way, flags) in WAYS {
            let name = if way == ALL { taken::WHOLE } else { taken::REFILLED };
            let runs = stage.restore(name, taken::REFILLED, name, flags)?;
            samples.add(Sample::Restore(way), runs.as_secs_f64());
            let answers = stage.guest.vm.wait_for(DID, ANSWER_MAX)?;
            samples.add(Sample::Answer(way), answers.as_secs_f64());
            if samples.of == Of::Work {
                let pieces = 1 + pieces(stage, options.after.saturating_sub(answers - runs))?;
                samples.add(Sample::Work(way), f64::from(pieces));
            }
        }
        samples.divided(Sample::Restore(NO_CACHE), Sample::Restore(ALL), Sample::RestoreRatio);
        for way in [REFILL, NO_CACHE, LAZY] {
            samples.divided(Sample::Work(way), Sample::Work(ALL), Sample::WorkAfter(way));
        }
    }
    Ok(())
}

/// Pieces of work that the guest does from now on, in a time.
fn pieces(stage: &mut Stage, time: Duration) -> Result<u32> {
    let end = Instant::now() + time;
    let mut pieces = 0;
    while stage.guest.vm.saw(DID, end.saturating_duration_since(Instant::now()))? {
        pieces += 1;
    }
    Ok(pieces)
}
