//! What was measured, row by row beside its bounds: the files of `docs/measurements` that have rows are this structure.

use serde::{Deserialize, Serialize};

use super::results::{Machine, median, range};
use super::{machine, server};

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
    /// The value that is judged: the samples' median, largest or smallest, as the name says.
    pub value: f64,
    /// Smallest and largest sample.
    pub range: (f64, f64),
    /// Number of samples.
    pub samples: usize,
    /// The same of stock QEMU.
    pub qemu: Option<f64>,
}

impl Row {
    fn new(name: &str, unit: &str, values: &[f64], judged: impl Fn(&[f64]) -> f64) -> Self {
        assert!(!values.is_empty(), "{name}: nothing was measured");
        Self {
            name: name.to_owned(),
            unit: unit.to_owned(),
            bound: None,
            value: judged(values),
            range: range(values),
            samples: values.len(),
            qemu: None,
        }
    }

    /// The median counts.
    ///
    /// # Panics
    /// When there are no values, as for the others.
    pub fn median(name: &str, unit: &str, values: &[f64]) -> Self {
        Self::new(name, unit, values, median)
    }

    /// The largest value counts.
    ///
    /// # Panics
    /// When there are no values.
    pub fn largest(name: &str, unit: &str, values: &[f64]) -> Self {
        Self::new(name, unit, values, |values| range(values).1)
    }

    /// The smallest value counts.
    ///
    /// # Panics
    /// When there are no values.
    pub fn smallest(name: &str, unit: &str, values: &[f64]) -> Self {
        Self::new(name, unit, values, |values| range(values).0)
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

    /// Adds a figure, and says it.
    pub(super) fn add(&mut self, row: Row) {
        eprintln!("         {}: {:.3} {}", row.name, row.value, row.unit);
        self.rows.push(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_what_the_row_says() {
        let values = [3.0, 1.0, 2.0];
        assert_eq!(Row::median("a", "ms", &values).value, 2.0);
        assert_eq!(Row::largest("a", "ms", &values).value, 3.0);
        let row = Row::smallest("a", "ms", &values);
        assert_eq!((row.value, row.range, row.samples, row.met()), (1.0, (1.0, 3.0), 3, None));
    }

    #[test]
    fn bounds_hold_at_their_edge() {
        let row = Row::median("a", "", &[0.9]);
        assert_eq!(row.clone().at_least(0.9).met(), Some(true));
        assert_eq!(row.clone().at_least(0.91).met(), Some(false));
        assert_eq!(row.clone().at_most(0.9).met(), Some(true));
        assert_eq!(row.at_most(0.89).met(), Some(false));
    }
}
