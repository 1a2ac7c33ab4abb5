//! What was measured, by name; the rows of the report.

use std::collections::BTreeMap;

use super::super::report::{Report, Row};
use super::super::results::median;
use super::rollback::{LAZY, REFILL};

/// The guest that a figure is of; rows are in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Of {
    /// One of those at work.
    #[default]
    Work,
    /// A large one with so many MiB, most of them free.
    Large(u32),
    /// A large one with so many MiB, full of file cache.
    LargeFull(u32),
}

impl Of {
    fn prefix(self) -> String {
        let gib = |mib: u32| f64::from(mib) / 1024.0;
        match self {
            Self::Work => String::new(),
            Self::Large(mib) => format!("{} GiB: ", gib(mib)),
            Self::LargeFull(mib) => format!("{} GiB full of cache: ", gib(mib)),
        }
    }
}

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
    /// Seconds until a restored guest has done its next piece of work, by how it was restored.
    Answer(&'static str),
    /// Pieces of work in the seconds after.
    Work(&'static str),
    /// Those, over those after a restore with all pages.
    WorkAfter(&'static str),
    /// Seconds for the classes of all pages.
    Classify,
}

/// All samples.
#[derive(Debug, Default)]
pub(super) struct Samples {
    all: BTreeMap<(Of, Sample), Vec<f64>>,
    /// The guest of those to come.
    pub(super) of: Of,
}

impl Samples {
    /// Adds one, and says it.
    pub(super) fn add(&mut self, sample: Sample, value: f64) {
        eprintln!("         {}{sample:?} {value:.3}", self.of.prefix());
        self.all.entry((self.of, sample)).or_default().push(value);
    }

    /// Adds what the last of one is over the last of another.
    pub(super) fn divided(&mut self, one: Sample, other: Sample, quotient: Sample) {
        let last = |sample| self.all.get(&(self.of, sample)).and_then(|values| values.last()).copied();
        if let (Some(one), Some(other)) = (last(one), last(other).filter(|other| *other > 0.0)) {
            self.add(quotient, one / other);
        }
    }

    /// The report's rows: those that were measured.
    pub(super) fn rows(&self, report: &mut Report) {
        for (&(of, sample), values) in &self.all {
            if let Some(row) = self.row(of, sample, values) {
                report.add(row);
            }
        }
    }

    fn row(&self, of: Of, sample: Sample, values: &[f64]) -> Option<Row> {
        let row = |name: &str, unit: &str| Row::median(&format!("{}{name}", of.prefix()), unit, values);
        Some(match sample {
            Sample::Saved => row("space saved of three full copies", "%").at_least(85.0),
            Sample::SavedBy(cause) => row(&format!("… of it, by: {cause}"), "%"),
            Sample::SavedOfCompressed => {
                row("space saved of three full copies, each compressed (zstd -1)", "%").at_least(50.0)
            }
            Sample::QemuBytes => row("bytes, all copies / QEMU's one file", ""),
            Sample::QemuCompressedBytes => row("bytes, all copies / QEMU's one compressed file", ""),
            Sample::Seconds(mode) => {
                let row = row(&format!("time of a snapshot, mode `{mode}`"), "s");
                match self.all.get(&(of, Sample::QemuSeconds)) {
                    Some(qemu) => row.beside(median(qemu)),
                    None => row,
                }
            }
            Sample::SecondsOfCopies(mode) => {
                let row = row(&format!("time of a snapshot, mode `{mode}` / of three full copies"), "");
                if mode == "live" { row } else { row.at_most(0.25) }
            }
            Sample::CopiesSeconds => row("time of three full copies", "s"),
            Sample::QemuCompressedSeconds => row("time of QEMU's compressed migration", "s"),
            Sample::QemuSeconds | Sample::Work(_) => return None,
            Sample::NextSeconds => row("time of the next snapshot, in the same vault", "s"),
            Sample::NextBytes => row("bytes of the next snapshot / of the first", ""),
            Sample::Pause(mode) => {
                let row = row(&format!("guest held, mode `{mode}`"), "ms");
                if mode == "live" { row.at_most(100.0) } else { row }
            }
            Sample::Restore(how) => {
                let row = row(&format!("restore until the guest runs, {how}"), "s");
                if how == LAZY { row.at_most(1.0) } else { row }
            }
            Sample::RestoreRatio => row("restore without cache / with all pages", "").at_most(0.35),
            Sample::Answer(how) => row(&format!("restore until the guest's next piece of work, {how}"), "s"),
            Sample::WorkAfter(how) => {
                let row = row(&format!("work in the 10 s after restore, {how} / all pages"), "");
                if how == REFILL { row.at_least(0.95) } else { row }
            }
            Sample::Classify => row("classes of all pages, one processor", "s").at_most(0.3),
        })
    }
}
