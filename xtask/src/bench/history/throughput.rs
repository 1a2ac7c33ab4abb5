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
//! After a snapshot the guest's working set lies in other memory than before, which may be faster or slower by itself and
//! stays so for as long as the layer is written to: a virtual machine's host backs some of its memory worse. That changes
//! with each snapshot, one way or the other, and has nothing to do with who serves the disk. So the second after is also set
//! beside a later second on the same layer, of many snapshots together.

use std::time::Duration;

use super::super::report::{Report, Row};
use super::super::results::{median, range};
use super::guest::Trace;

/// Requests of a second over those of another; one value a snapshot.
pub(super) struct Throughput {
    /// The second after over the second before.
    after: Vec<f64>,
    /// Of those in whose two seconds the machine did not stand still.
    undisturbed: Vec<f64>,
    /// The same, all seconds together.
    together: f64,
    /// The second after over a later one on the same layer, where the machine did not stand still in either; of all snapshots
    /// if there is no such.
    later: Vec<f64>,
    /// Where no snapshot was taken: the second after over the second before.
    controls: Vec<f64>,
}

impl Throughput {
    /// Of snapshots whose commands began at these moments (what they disturb counts as after) and controls. One second before
    /// and one after, nothing else was done. `ran` tells whether the machine did not stand still between two moments.
    pub(super) fn new(
        trace: &Trace,
        snapshots: &[Duration],
        controls: &[Duration],
        second: Duration,
        ran: impl Fn(Duration, Duration) -> bool,
    ) -> Self {
        let requests = |from: Duration| trace.completed(from, from + second) as f64;
        let (after, before) = (|at: Duration| requests(at), |at: Duration| requests(at - second));
        let sum = |value: &dyn Fn(Duration) -> f64| snapshots.iter().map(|at| value(*at)).sum::<f64>();
        let on_one_layer = snapshots.windows(2).map(|pair| {
            let [at, next] = [pair[0], pair[1]];
            (ran(at, at + second) && ran(next - second, next), after(at) / before(next))
        });
        let (quiet, others): (Vec<_>, Vec<_>) = on_one_layer.partition(|(ran, _)| *ran);
        let later = if quiet.is_empty() { others } else { quiet };
        let change = |at: &Duration| after(*at) / before(*at);
        let ran_both = |at: &&Duration| ran(**at - second, **at + second);
        Self {
            undisturbed: snapshots.iter().filter(ran_both).map(change).collect(),
            after: snapshots.iter().map(change).collect(),
            together: sum(&after) / sum(&before),
            later: later.into_iter().map(|(_, ratio)| ratio).collect(),
            controls: controls.iter().map(change).collect(),
        }
    }
}

/// Rows of both. `alone` are the writes of a second without any server: as many loops as processors, each second into other files.
pub(super) fn rows(ours: &Throughput, qemu: &Throughput, alone: &[f64], report: &mut Report) {
    let smallest = |values: &[f64]| range(values).0;
    let after = "writes in the second after / before a snapshot, median";
    let after = Row::median(after, "", &ours.after).at_least(0.9);
    report.add(after.beside(median(&qemu.after)));
    let together = Row::median("the same, all seconds together", "", &[ours.together]).at_least(0.9);
    report.add(together.beside(qemu.together));
    if !ours.later.is_empty() && !qemu.later.is_empty() {
        let later = "writes in the second after a snapshot / in a later one on the same layer, median";
        let later = Row::median(later, "", &ours.later).at_least(0.9);
        report.add(later.beside(median(&qemu.later)));
    }
    let worst = "writes in the second after / before a snapshot, worst snapshot";
    let worst = Row::smallest(worst, "", &ours.after).at_least(0.9);
    report.add(worst.beside(smallest(&qemu.after)));
    if !ours.undisturbed.is_empty() && !qemu.undisturbed.is_empty() {
        let quiet = "the same, worst of those in whose two seconds the machine did not stand still";
        let quiet = Row::smallest(quiet, "", &ours.undisturbed).at_least(0.9);
        report.add(quiet.beside(smallest(&qemu.undisturbed)));
    }
    let controls = "the same of two seconds between which no snapshot was taken, median";
    report.add(Row::median(controls, "", &ours.controls).beside(median(&qemu.controls)));
    let controls = "the same, worst";
    report.add(Row::smallest(controls, "", &ours.controls).beside(smallest(&qemu.controls)));
    let changes: Vec<f64> = alone.windows(2).map(|pair| pair[1] / pair[0]).collect();
    let moved =
        "the same of loops of `pwrite`, without a server, one a processor, each second in other files, worst";
    report.add(Row::smallest(moved, "", &changes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_is_set_beside_the_right_one() {
        let second = Duration::from_secs(1);
        // Writes a second: two layers, the second one faster throughout; each is slower in its first second.
        let trace = Trace::of_rates(&[10, 10, 10, 18, 20, 20, 20, 9, 10]);
        let (snapshots, controls) = ([3 * second, 7 * second], [2 * second, 4 * second]);
        let throughput = Throughput::new(&trace, &snapshots, &controls, second, |_, _| true);
        assert_eq!(throughput.after, [1.8, 0.45]);
        assert_eq!(throughput.later, [0.9]);
        assert_eq!(throughput.controls, [1.0, 20.0 / 18.0]);
        assert!((throughput.together - 27.0 / 30.0).abs() < 1e-9);
    }

    #[test]
    fn seconds_in_which_the_machine_stood_still_tell_nothing_of_a_layer() {
        let second = Duration::from_secs(1);
        let trace = Trace::of_rates(&[10, 10, 10, 10, 10, 9, 10, 10, 10, 10]);
        let snapshots = [2 * second, 5 * second, 9 * second];
        let later = |stall: Duration| {
            let ran = |from, to| !(from..to).contains(&stall);
            Throughput::new(&trace, &snapshots, &[], second, ran).later
        };
        assert_eq!(later(20 * second), [1.0, 0.9]);
        assert_eq!(later(4 * second), [0.9], "the second before the next one");
        assert_eq!(later(5 * second), [1.0], "the second after the other one");
        assert_eq!(later(3 * second), [1.0, 0.9], "in neither");
        let ran = |from, to| !(from..to).contains(&(5 * second));
        let undisturbed = Throughput::new(&trace, &snapshots, &[], second, ran).undisturbed;
        assert_eq!(undisturbed, [1.0, 1.0], "all but the one whose second after it was");
    }
}
