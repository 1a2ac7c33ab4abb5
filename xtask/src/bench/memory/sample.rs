//! What was measured, by name; the rows of the report.

use std::collections::BTreeMap;

use super::super::report::{Report, Row};
use super::super::results::median;
use super::rollback::LAZY;

/// A figure that is measured many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sample {
    /// Bytes saved of three full copies, in percent.
    Saved,
    /// Of those, by cause.
    SavedBy(&'static str),
    /// Bytes saved of three full copies that are compressed, in percent.
    SavedOfCompressed,
    /// Bytes of QEMU's file over ours, all copies.
    QemuBytes,
    /// The same of its compressed file.
    QemuCompressedBytes,
    /// Seconds from the command to its end, by mode.
    Seconds(&'static str),
    /// Those over the seconds of three full copies.
    SecondsOfCopies(&'static str),
    /// Seconds of three full copies.
    CopiesSeconds,
    /// Seconds of QEMU's migration.
    QemuSeconds,
    /// The same, compressed.
    QemuCompressedSeconds,
    /// Seconds of a second snapshot of the same guest.
    NextSeconds,
    /// Bytes that it adds, over those of the first.
    NextBytes,
    /// Milliseconds for which the guest was held, by mode.
    Pause(&'static str),
    /// Seconds until a guest runs again, by how it was restored.
    Restore(&'static str),
    /// Those without cache over those with it.
    RestoreRatio,
    /// The same of a large guest whose memory is full of file cache.
    RestoreLarge(&'static str),
    /// Those without cache over those with it.
    RestoreRatioLarge,
    /// Pieces of work in the seconds after.
    Work(&'static str),
    /// Those, over those after a restore with all pages.
    WorkAfter(&'static str),
    /// Seconds for the classes of all pages of a large guest.
    Classify,
    /// The same of one that is full of file cache.
    ClassifyFull,
}

/// All samples.
#[derive(Debug, Default)]
pub(super) struct Samples(BTreeMap<Sample, Vec<f64>>);

impl Samples {
    /// Adds one, and says it.
    pub(super) fn add(&mut self, sample: Sample, value: f64) {
        eprintln!("         {sample:?} {value:.3}");
        self.0.entry(sample).or_default().push(value);
    }

    /// Adds what the last of one is over the last of another.
    pub(super) fn divided(&mut self, one: Sample, other: Sample, quotient: Sample) {
        let last = |sample| self.of(sample).and_then(|values| values.last()).copied();
        if let (Some(one), Some(other)) = (last(one), last(other).filter(|other| *other > 0.0)) {
            self.add(quotient, one / other);
        }
    }

    fn of(&self, sample: Sample) -> Option<&[f64]> {
        self.0.get(&sample).map(Vec::as_slice)
    }

    /// The report's rows: those that were measured.
    pub(super) fn rows(&self, report: &mut Report) {
        for (&sample, values) in &self.0 {
            if let Some(row) = self.row(sample, values) {
                report.add(row);
            }
        }
    }

    fn row(&self, sample: Sample, values: &[f64]) -> Option<Row> {
        let row = |name: &str, unit: &str| Row::median(name, unit, values);
        let beside = |row: Row, other: Sample| match self.of(other) {
            Some(values) => row.beside(median(values)),
            None => row,
        };
        Some(match sample {
            Sample::Saved => row("space saved of three full copies", "%").at_least(85.0),
            Sample::SavedBy(cause) => row(&format!("… of it, by: {cause}"), "%"),
            Sample::SavedOfCompressed => {
                row("space saved of three full copies, each compressed (zstd -1)", "%").at_least(50.0)
            }
            Sample::QemuBytes => row("bytes, all copies / QEMU's one file", ""),
            Sample::QemuCompressedBytes => row("bytes, all copies / QEMU's one compressed file", ""),
            Sample::Seconds(mode) => {
                beside(row(&format!("time of a snapshot, mode `{mode}`"), "s"), Sample::QemuSeconds)
            }
            Sample::SecondsOfCopies(mode) => {
                row(&format!("time of a snapshot, mode `{mode}` / of three full copies"), "").at_most(0.25)
            }
            Sample::CopiesSeconds => row("time of three full copies", "s"),
            Sample::QemuCompressedSeconds => row("time of QEMU's compressed migration", "s"),
            Sample::QemuSeconds | Sample::Work(_) => return None,
            Sample::Restore(_)
            | Sample::RestoreRatio
            | Sample::RestoreLarge(_)
            | Sample::RestoreRatioLarge
            | Sample::WorkAfter(_) => after_restore(sample, values),
            Sample::NextSeconds => row("time of the next snapshot, in the same vault", "s"),
            Sample::NextBytes => row("bytes of the next snapshot / of the first", ""),
            Sample::Pause("live") => row("guest held, mode `live`", "ms").at_most(100.0),
            Sample::Pause(mode) => row(&format!("guest held, mode `{mode}`"), "ms"),
            Sample::Classify => row("classes of all pages of 4 GiB, one processor", "s").at_most(0.3),
            Sample::ClassifyFull => {
                row("4 GiB full of cache: classes of all pages, one processor", "s").at_most(0.3)
            }
        })
    }
}

fn after_restore(sample: Sample, values: &[f64]) -> Row {
    let row = |name: &str, unit: &str| Row::median(name, unit, values);
    match sample {
        Sample::Restore(how @ LAZY) => row(&format!("restore until the guest runs, {how}"), "s").at_most(1.0),
        Sample::Restore(how) => row(&format!("restore until the guest runs, {how}"), "s"),
        Sample::RestoreLarge(how) => {
            let row = row(&format!("4 GiB full of cache: restore until the guest runs, {how}"), "s");
            if how == LAZY { row.at_most(1.0) } else { row }
        }
        Sample::RestoreRatioLarge => {
            row("4 GiB full of cache: restore without cache / with all pages", "").at_most(0.35)
        }
        Sample::RestoreRatio => row("restore without cache / with all pages", "").at_most(0.35),
        Sample::WorkAfter(how @ "cache from the disk") => {
            row(&format!("work in the 10 s after restore, {how} / all pages"), "").at_least(0.95)
        }
        Sample::WorkAfter(how) => row(&format!("work in the 10 s after restore, {how} / all pages"), ""),
        other => unreachable!("{other:?} is none of a restore"),
    }
}
