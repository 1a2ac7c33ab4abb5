//! What the study found, as `docs/measurements/migrate.json` keeps it, and its page.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::super::machine;
use super::super::report::{self, Row};
use super::super::shown::{Blocks, Shown};
use super::super::table::number;
use super::{mean, plot};

/// Where the study is kept. Users meet it on its page only.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/migrate.json",
    summary: "docs/measurements/migrate.md",
    page: "docs/measurements/migrate.md",
    mark: "bench:migrate",
};
const PLOT: &str = "docs/measurements/migrate.svg";

/// Values of several things under the same headings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// What they are.
    pub title: String,
    /// The headings.
    pub columns: Vec<String>,
    /// A name and a value for each heading, if there is one.
    pub lines: Vec<(String, Vec<Option<f64>>)>,
}

impl Table {
    pub(super) fn new<S: AsRef<str>>(title: &str, columns: &[S]) -> Self {
        let columns = columns.iter().map(|column| column.as_ref().to_owned()).collect();
        Self { title: title.to_owned(), columns, lines: Vec::new() }
    }

    pub(super) fn add(&mut self, name: &str, values: &[f64]) {
        eprintln!("         {}: {name}: {values:.3?}", self.title);
        self.lines.push((name.to_owned(), values.iter().copied().map(Some).collect()));
    }

    /// With their mean as the last value.
    pub(super) fn add_with_mean(&mut self, name: &str, values: &[f64]) {
        self.add(name, &[values, &[mean(values)]].concat());
    }

    /// What the paper has as the mean of its traces, which are others.
    pub(super) fn add_paper(&mut self, name: &str, traces: usize, mean: f64) {
        let mut values = vec![None; traces];
        values.push(Some(mean));
        self.lines.push((name.to_owned(), values));
    }

    /// The last value of a line.
    pub(super) fn mean_of(&self, name: &str) -> Option<f64> {
        *self.lines.iter().find(|line| line.0 == name)?.1.last()?
    }
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Study {
    /// Day of the study, `YYYY-MM-DD`.
    pub date: String,
    /// How it was made.
    pub parameters: Vec<(String, String)>,
    /// The figures with bounds, and what they are compared with.
    pub rows: Vec<Row>,
    /// All of it.
    pub tables: Vec<Table>,
}

impl Study {
    pub(super) fn new(parameters: Vec<(String, String)>) -> Self {
        Self { date: machine::today(), parameters, rows: Vec::new(), tables: Vec::new() }
    }

    /// Prints the study and, below a repository's root, writes its files.
    pub(super) fn publish(&self, root: Option<&Path>) -> Result<()> {
        println!("{}", self.markdown());
        let Some(root) = root else { return Ok(()) };
        let mut json = serde_json::to_string_pretty(self)?;
        json.push('\n');
        fs::write(root.join(SHOWN.file), json).context(SHOWN.file)?;
        self.write(root)
    }

    /// Writes the page and the plot.
    ///
    /// # Errors
    /// When a file cannot be written or has no place for the block.
    pub fn write(&self, root: &Path) -> Result<()> {
        plot::draw(&self.tables, &root.join(PLOT))?;
        SHOWN.write(root, &self.blocks())
    }

    fn blocks(&self) -> Blocks {
        Blocks { short: self.markdown(), whole: self.markdown() }
    }

    fn markdown(&self) -> String {
        let mut text =
            String::from("Means of the traces:\n\n| figure | bound | value | |\n|---|---|--:|---|\n");
        for row in &self.rows {
            let [name, bound, value, _, verdict] = report::cells(row);
            _ = writeln!(text, "| {name} | {bound} | {value} | {verdict} |");
        }
        text.push('\n');
        for (name, value) in &self.parameters {
            _ = writeln!(text, "- {name}: {value}");
        }
        for table in &self.tables {
            _ = writeln!(text, "\n**{}**\n\n| | {} |", table.title, table.columns.join(" | "));
            _ = writeln!(text, "|---|{}", "--:|".repeat(table.columns.len()));
            for (name, values) in &table.lines {
                let values = values.iter().map(|value| value.map_or(String::new(), number));
                _ = writeln!(text, "| {name} | {} |", values.collect::<Vec<_>>().join(" | "));
            }
        }
        _ = writeln!(text, "\n{}", self.date);
        text
    }
}

/// What is kept; nothing while nothing was studied.
///
/// # Errors
/// When the file is none of a study.
pub fn kept(root: &Path) -> Result<Option<Study>> {
    let file = root.join(SHOWN.file);
    if !file.is_file() {
        return Ok(None);
    }
    serde_json::from_slice(&fs::read(&file)?).map(Some).context(SHOWN.file)
}

/// The tables of what is kept.
///
/// # Errors
/// As for [`kept`].
pub fn blocks(root: &Path) -> Result<Option<Blocks>> {
    Ok(kept(root)?.as_ref().map(Study::blocks))
}
