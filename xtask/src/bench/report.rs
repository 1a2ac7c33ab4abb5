//! What was measured, row by row beside its bounds: the files of `docs/measurements` that have rows are this structure.
//!
//! It is shown as tables: rows with a bound in the summary, all rows and how they were measured on the report's page.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::results::{Machine, quantile, quartiles};
use super::shown::{Blocks, Shown};
use super::table::{number, with_quartiles};
use super::{machine, server};

const HEAD: &str = "| figure | bound | vmstrata | stock QEMU | |\n|---|---|--:|--:|---|\n";

/// What a value must keep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub name: String,
    /// Unit of the values; empty for ratios.
    pub unit: String,
    /// What it must keep, if anything.
    pub bound: Option<Bound>,
    /// The value that is judged: the samples' median, unless the name says otherwise.
    pub value: f64,
    /// The samples' quartiles; only beside a median.
    pub quartiles: Option<(f64, f64)>,
    /// Number of samples.
    pub samples: usize,
    /// The same of stock QEMU.
    pub qemu: Option<f64>,
}

impl Row {
    /// The value that `part` of the samples are no larger than counts, such as 0.99.
    ///
    /// # Panics
    /// When there are no values, as for the others.
    pub fn quantile(name: &str, unit: &str, values: &[f64], part: f64) -> Self {
        Self {
            name: name.to_owned(),
            unit: unit.to_owned(),
            bound: None,
            value: quantile(values, part),
            quartiles: (part == 0.5).then(|| quartiles(values)),
            samples: values.len(),
            qemu: None,
        }
    }

    /// The median counts.
    ///
    /// # Panics
    /// When there are no values.
    pub fn median(name: &str, unit: &str, values: &[f64]) -> Self {
        Self::quantile(name, unit, values, 0.5)
    }

    /// The largest value counts.
    ///
    /// # Panics
    /// When there are no values.
    pub fn largest(name: &str, unit: &str, values: &[f64]) -> Self {
        Self::quantile(name, unit, values, 1.0)
    }

    /// With a bound.
    #[must_use]
    pub fn at_most(self, bound: f64) -> Self {
        Self { bound: Some(Bound::AtMost(bound)), ..self }
    }

    /// With a bound.
    #[must_use]
    pub fn at_least(self, bound: f64) -> Self {
        Self { bound: Some(Bound::AtLeast(bound)), ..self }
    }

    /// With what stock QEMU shows.
    #[must_use]
    pub fn beside(self, qemu: f64) -> Self {
        Self { qemu: Some(qemu), ..self }
    }

    /// Whether the value keeps its bound, if it has one.
    pub fn met(&self) -> Option<bool> {
        self.bound.map(|bound| match bound {
            Bound::AtLeast(bound) => self.value >= bound,
            Bound::AtMost(bound) => self.value <= bound,
        })
    }
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Day of the measurement, `YYYY-MM-DD`.
    pub date: String,
    /// Where.
    pub machine: Machine,
    /// Program and version of everything that took part.
    pub versions: Vec<(String, String)>,
    /// How each thing was done.
    pub parameters: Vec<(String, String)>,
    /// The figures.
    pub rows: Vec<Row>,
}

impl Report {
    /// A report without rows, in which QEMU takes part as `qemu`.
    pub(super) fn new(qemu: &str, parameters: Vec<(String, String)>) -> Self {
        let version = |name: &str, program: &str| (name.to_owned(), machine::version(program));
        Self {
            date: machine::today(),
            machine: machine::machine(),
            versions: vec![
                version("qemu", qemu),
                version("vmstrata", &server::vmstrata().display().to_string()),
            ],
            parameters,
            rows: Vec::new(),
        }
    }

    /// Takes over what a later, partial one says.
    fn amend(&mut self, later: Self) {
        let mut rows = later.rows;
        for row in &mut self.rows {
            if let Some(at) = rows.iter().position(|later| later.name == row.name) {
                *row = rows.remove(at);
            }
        }
        self.rows.append(&mut rows);
        *self = Self { rows: std::mem::take(&mut self.rows), ..later };
    }

    /// Adds a figure, and says it.
    pub(super) fn add(&mut self, row: Row) {
        eprintln!("         {}: {:.3} {}", row.name, row.value, row.unit);
        self.rows.push(row);
    }
}

fn blocks(report: &Report) -> Blocks {
    let bounded = report.rows.iter().filter(|row| row.bound.is_some());
    let circumstances = report.machine.circumstances(&report.versions, &report.date);
    let short: String = bounded.map(line).collect();
    Blocks { short: format!("{HEAD}{short}\n{circumstances}\n"), whole: markdown(report) }
}

/// All rows, and how they were measured.
fn markdown(report: &Report) -> String {
    let mut text = String::from(HEAD);
    report.rows.iter().for_each(|row| text.push_str(&line(row)));
    text.push('\n');
    for (name, value) in &report.parameters {
        _ = writeln!(text, "- {name}: {value}");
    }
    _ = writeln!(text, "\n{}", report.machine.circumstances(&report.versions, &report.date));
    text
}

fn line(row: &Row) -> String {
    let [name, bound, value, qemu, verdict] = cells(row);
    format!("| {name} | {bound} | {value} | {qemu} | {verdict} |\n")
}

/// What a table shows of a row: name, bound, value, stock QEMU's, and whether the bound holds.
pub(super) fn cells(row: &Row) -> [String; 5] {
    let with_unit = |value: f64| format!("{} {}", number(value), row.unit).trim_end().to_owned();
    let bound = row.bound.map_or(String::new(), |bound| match bound {
        Bound::AtLeast(bound) => format!("at least {}", with_unit(bound)),
        Bound::AtMost(bound) => format!("at most {}", with_unit(bound)),
    });
    let verdict = match row.met() {
        Some(true) => "holds",
        Some(false) => "**missed**",
        None => "",
    };
    let qemu = row.qemu.map_or(String::new(), with_unit);
    let value = with_quartiles(row.value, row.quartiles.unwrap_or((row.value, row.value)));
    let value = format!("{value} {}", row.unit).trim_end().to_owned();
    [row.name.clone(), bound, value, qemu, verdict.to_owned()]
}

impl Shown {
    /// Prints a report and, below a repository's root, writes it and what shows it.
    ///
    /// # Errors
    /// When a file cannot be written or has no place for the table.
    pub(super) fn publish(&self, root: Option<&Path>, report: &Report) -> Result<()> {
        println!("{}", markdown(report));
        let Some(root) = root else { return Ok(()) };
        let file = root.join(self.file);
        fs::create_dir_all(file.parent().context("a file in a directory")?)?;
        let mut json = serde_json::to_string_pretty(report)?;
        json.push('\n');
        fs::write(file, json)?;
        self.write(root, &blocks(report))
    }

    /// The same of `report`, which has all parts or some.
    pub(super) fn publish_parts(&self, root: Option<&Path>, report: &Report, are_all: bool) -> Result<()> {
        match root.filter(|_| !are_all) {
            Some(root) => self.amend(root, report.clone()),
            None => self.publish(root, report),
        }
    }

    /// The same of a part of a measurement: its rows take the place of those of their names in what is kept.
    ///
    /// # Errors
    /// What is kept is no report; as [`Shown::publish`].
    fn amend(&self, root: &Path, report: Report) -> Result<()> {
        let file = root.join(self.file);
        let kept = if file.exists() {
            let mut kept: Report = serde_json::from_slice(&fs::read(file)?).context(self.file)?;
            kept.amend(report);
            kept
        } else {
            report
        };
        self.publish(Some(root), &kept)
    }

    /// The tables of the report kept in this measurement's file; nothing while there is none.
    ///
    /// # Errors
    /// When the file is no report.
    pub fn of_report(&self, root: &Path) -> Result<Option<Blocks>> {
        let file = root.join(self.file);
        if !file.is_file() {
            return Ok(None);
        }
        let report: Report = serde_json::from_slice(&fs::read(&file)?).context(self.file)?;
        Ok(Some(blocks(&report)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_what_the_row_says() {
        let values = [3.0, 1.0, 2.0];
        let row = Row::median("a", "ms", &values);
        assert_eq!((row.value, row.quartiles, row.samples, row.met()), (2.0, Some((1.5, 2.5)), 3, None));
        let row = Row::largest("a", "ms", &values);
        assert_eq!((row.value, row.quartiles), (3.0, None));
    }

    #[test]
    fn bounds_hold_at_their_edge() {
        let row = Row::median("a", "", &[0.9]);
        assert_eq!(row.clone().at_least(0.9).met(), Some(true));
        assert_eq!(row.clone().at_least(0.91).met(), Some(false));
        assert_eq!(row.clone().at_most(0.9).met(), Some(true));
        assert_eq!(row.at_most(0.89).met(), Some(false));
    }

    const SHOWN: Shown = Shown {
        file: "docs/measurements/x.json",
        summary: "README.md",
        page: "docs/measurements/x.md",
        mark: "bench:x",
    };

    fn report() -> Report {
        let mut report = Report::new("qemu-img", vec![("all of it".into(), "x".into())]);
        report.rows.push(Row::median("open", "ms", &[12.0, 13.0, 14.0]).at_most(20.0).beside(4350.0));
        report.rows.push(Row::median("throughput", "", &[0.8]).at_least(0.9));
        report.rows.push(Row::largest("noise", "ms", &[0.25]));
        report
    }

    #[test]
    fn a_later_part_takes_the_place_of_rows_of_its_names() {
        let mut kept = report();
        let mut later = Report { date: "later".to_owned(), rows: Vec::new(), ..report() };
        later.rows.push(Row::median("throughput", "", &[1.0]));
        later.rows.push(Row::median("new", "", &[2.0]));
        kept.amend(later);
        let rows: Vec<(&str, f64)> = kept.rows.iter().map(|row| (&*row.name, row.value)).collect();
        assert_eq!(rows, [("open", 13.0), ("throughput", 1.0), ("noise", 0.25), ("new", 2.0)]);
        assert_eq!(kept.date, "later");
    }

    #[test]
    fn rows_show_bound_value_peer_and_verdict() {
        let text = markdown(&report());
        assert!(
            text.contains("| open | at most 20.0 ms | 13.0 (12.5–13.5) ms | 4,400 ms | holds |\n"),
            "{text}"
        );
        assert!(text.contains("| throughput | at least 0.900 | 0.800 |  | **missed** |\n"), "{text}");
        assert!(text.contains("| noise |  | 0.250 ms |  |  |\n"), "{text}");
    }

    #[test]
    fn the_summary_shows_what_has_a_bound() {
        let Blocks { short, whole } = blocks(&report());
        assert!(whole.contains("| noise |") && whole.contains("- all of it: x\n"), "{whole}");
        assert!(short.contains("| open |") && !short.contains("noise"), "{short}");
    }

    #[test]
    fn what_is_published_agrees_with_itself() {
        let root = tempfile::tempdir().unwrap();
        assert!(SHOWN.of_report(root.path()).unwrap().is_none(), "nothing measured yet");
        fs::create_dir_all(root.path().join("docs/measurements")).unwrap();
        for file in [SHOWN.summary, SHOWN.page] {
            fs::write(root.path().join(file), "# x\n<!-- bench:x -->\n<!-- /bench:x -->\n").unwrap();
        }
        SHOWN.publish(Some(root.path()), &report()).unwrap();
        let read = SHOWN.of_report(root.path()).unwrap().expect("a report");
        assert_eq!(SHOWN.stale(root.path(), &read).unwrap(), None, "tidy would complain");
    }
}
