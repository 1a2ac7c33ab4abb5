//! What a snapshot costs a writing guest in throughput.
//!
//! ```text
//!   ─┤ second before │ second after ├──┤ second before ┤ snapshot ├ second after │        │ later second ├─
//!            control, on layer n                       │              on layer n+1
//! ```
//!
//! A machine that is busy with something else does more in one second and less in the next, whoever serves the disk. So the
//! seconds that are compared begin when the guest has written as much in a second as in the one before, nearly; and before
//! each snapshot there is a control: two such seconds between which nothing happens. What they show is the machine's part.
//!
//! Where the machine is seen to change between the two, as it stood still or its processors came to lie nearer together or
//! farther apart, they tell nothing of a snapshot. And there are changes that cannot be seen, and that make more of a difference
//! to a single pair than a snapshot does. So each snapshot is judged by itself alone, too: by what part the second after kept of what
//! its own typical two hundredth would have made of it, as a snapshot's work is done within a few of them. That the typical ones
//! are as good as before is what the median of all pairs tells.
//!
//! After a snapshot the guest's working set lies in other memory than before, which may be faster or slower by itself and
//! stays so for as long as the layer is written to: a virtual machine's host backs some of its memory worse. That changes
//! with each snapshot, one way or the other, and has nothing to do with who serves the disk. So the second after is also set
//! beside a later second on the same layer, of many snapshots together.

use std::time::Duration;

use super::super::report::{Report, Row};
use super::super::results::{median, range};
use super::machine::Machine;
use super::trace::Trace;

/// Parts of a second, of which the typical one is taken.
const PARTS: u32 = 200;
/// What is to be kept of the writes.
const BOUND: Option<f64> = Some(0.9);

/// Requests of a second over those of another; one value a snapshot.
pub(super) struct Throughput {
    /// The second after over the second before.
    after: Vec<f64>,
    /// Of those in whose two seconds the machine was the same, as far as can be told.
    undisturbed: Vec<f64>,
    /// The same, all seconds together.
    together: [f64; 1],
    /// The second after over a later one on the same layer, where the machine did not stand still in either; of all snapshots
    /// if there is no such.
    later: Vec<f64>,
    /// The second after over what its typical part would make of it, where the machine did not stand still.
    kept: Vec<f64>,
    /// Where no snapshot was taken.
    controls: Controls,
}

/// The same between two seconds that only follow each other.
struct Controls {
    after: Vec<f64>,
    kept: Vec<f64>,
}

impl Throughput {
    /// Of snapshots whose commands began at these moments (what they disturb counts as after) and controls. One second before
    /// and one after, nothing else was done.
    pub(super) fn new(
        trace: &Trace,
        snapshots: &[Duration],
        controls: &[Duration],
        second: Duration,
        machine: &Machine,
    ) -> Self {
        let requests = |from: Duration| trace.completed(from, from + second) as f64;
        let (after, before) = (|at: Duration| requests(at), |at: Duration| requests(at - second));
        let sum = |value: &dyn Fn(Duration) -> f64| snapshots.iter().map(|at| value(*at)).sum::<f64>();
        let ran_after = |at: Duration| machine.ran(at, at + second);
        let on_one_layer = snapshots.windows(2).map(|pair| {
            let [at, next] = [pair[0], pair[1]];
            (ran_after(at) && machine.ran(next - second, next), after(at) / before(next))
        });
        let (quiet, others): (Vec<_>, Vec<_>) = on_one_layer.partition(|(ran, _)| *ran);
        let later = if quiet.is_empty() { others } else { quiet };
        let change = |at: &Duration| after(*at) / before(*at);
        let is_same =
            |at: &&Duration| machine.ran(**at - second, **at + second) && machine.stayed(**at, second);
        let kept = |moments: &[Duration]| {
            let ran = moments.iter().filter(|at| ran_after(**at));
            ran.map(|at| trace.evenness(*at, *at + second, PARTS)).collect()
        };
        Self {
            undisturbed: snapshots.iter().filter(is_same).map(change).collect(),
            after: snapshots.iter().map(change).collect(),
            together: [sum(&after) / sum(&before)],
            later: later.into_iter().map(|(_, ratio)| ratio).collect(),
            kept: kept(snapshots),
            controls: Controls { after: controls.iter().map(change).collect(), kept: kept(controls) },
        }
    }
}

/// How the values of the snapshots become one.
#[derive(Clone, Copy)]
enum Of {
    Median,
    Worst,
}

/// A row: its name, of what, and the bound.
type Figure = (&'static str, Of, fn(&Throughput) -> &[f64], Option<f64>);

const FIGURES: [Figure; 9] = [
    ("writes in the second after / before a snapshot, median", Of::Median, |of| &of.after, BOUND),
    ("the same, all seconds together", Of::Median, |of| &of.together, BOUND),
    (
        "writes in the second after a snapshot / in a later one on the same layer, median",
        Of::Median,
        |of| &of.later,
        BOUND,
    ),
    (
        "writes in the second after a snapshot / 200 times those of its median 5 ms, worst in which the machine did not stand still",
        Of::Worst,
        |of| &of.kept,
        BOUND,
    ),
    ("the same without a snapshot, worst", Of::Worst, |of| &of.controls.kept, None),
    // What stands below these two shows how much of them is the machine's.
    ("writes in the second after / before a snapshot, worst snapshot", Of::Worst, |of| &of.after, BOUND),
    (
        "the same, worst of those in whose two seconds the machine neither stood still nor moved its processors",
        Of::Worst,
        |of| &of.undisturbed,
        BOUND,
    ),
    (
        "the same of two seconds between which no snapshot was taken, median",
        Of::Median,
        |of| &of.controls.after,
        None,
    ),
    ("the same, worst", Of::Worst, |of| &of.controls.after, None),
];

/// Rows of both. `alone` are the writes of a second without any server: as many loops as processors, each second into other files.
pub(super) fn rows(ours: &Throughput, qemu: &Throughput, alone: &[f64], report: &mut Report) {
    for (name, of, values, bound) in FIGURES {
        let (ours, qemu) = (values(ours), values(qemu));
        // Where the machine cannot be watched, or was never the same, some have no value.
        if ours.is_empty() || qemu.is_empty() {
            continue;
        }
        let row = match of {
            Of::Median => Row::median(name, "", ours).beside(median(qemu)),
            Of::Worst => Row::smallest(name, "", ours).beside(range(qemu).0),
        };
        report.add(if let Some(bound) = bound { row.at_least(bound) } else { row });
    }
    let changes: Vec<f64> = alone.windows(2).map(|pair| pair[1] / pair[0]).collect();
    let moved =
        "the same of loops of `pwrite`, without a server, one a processor, each second in other files, worst";
    report.add(Row::smallest(moved, "", &changes));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_second_is_set_beside_the_right_one() {
        // Writes a second: two layers, the second one faster throughout; each is slower in its first second.
        let trace = Trace::of_rates(&[10, 10, 10, 18, 20, 20, 20, 9, 10]);
        let (snapshots, controls) = ([3 * SECOND, 7 * SECOND], [2 * SECOND, 4 * SECOND]);
        let throughput = Throughput::new(&trace, &snapshots, &controls, SECOND, &Machine::unseen());
        assert_eq!(throughput.after, [1.8, 0.45]);
        assert_eq!(throughput.later, [0.9]);
        assert_eq!(throughput.controls.after, [1.0, 20.0 / 18.0]);
        assert!((throughput.together[0] - 27.0 / 30.0).abs() < 1e-9);
    }

    #[test]
    fn seconds_in_which_the_machine_stood_still_tell_nothing_of_a_layer() {
        let trace = Trace::of_rates(&[10, 10, 10, 10, 10, 9, 10, 10, 10, 10]);
        let snapshots = [2 * SECOND, 5 * SECOND, 9 * SECOND];
        let throughput =
            |stall: Duration| Throughput::new(&trace, &snapshots, &[], SECOND, &Machine::stalled(stall));
        let later = |stall| throughput(stall).later;
        assert_eq!(later(20 * SECOND), [1.0, 0.9]);
        assert_eq!(later(4 * SECOND), [0.9], "the second before the next one");
        assert_eq!(later(5 * SECOND), [1.0], "the second after the other one");
        assert_eq!(later(3 * SECOND), [1.0, 0.9], "in neither");
        assert_eq!(
            throughput(5 * SECOND).undisturbed,
            [1.0, 1.0],
            "all but the one whose second after it was"
        );
        assert_eq!(throughput(5 * SECOND).kept.len(), 2, "the same");
    }

    #[test]
    fn seconds_between_which_the_processors_moved_tell_nothing_of_a_snapshot() {
        let trace = Trace::of_rates(&[10, 10, 5, 5, 4, 5]);
        let machine = Machine::of_distances(&[90, 90, 360, 360, 360, 90]);
        let throughput = Throughput::new(&trace, &[2 * SECOND, 4 * SECOND], &[], SECOND, &machine);
        assert_eq!(throughput.after, [0.5, 0.8]);
        assert_eq!(throughput.undisturbed, [0.8]);
    }
}
