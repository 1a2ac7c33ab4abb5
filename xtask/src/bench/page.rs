//! Reports as tables: rows with a bound in the README, all rows and how they were measured on the report's page.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::report::{Bound, Report, Row};
use super::shown::{Blocks, Shown};
use super::table::number;

const HEAD: &str = "| figure | bound | vmstrata | stock QEMU | |\n|---|---|--:|--:|---|\n";

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
    format!("| {} | {bound} | {} | {qemu} | {verdict} |\n", row.name, with_unit(row.value))
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
    use super::super::report::Row;
    use super::*;

    const SHOWN: Shown =
        Shown { file: "docs/measurements/x.json", page: "docs/measurements/x.md", mark: "bench:x" };

    fn report() -> Report {
        let mut report = Report::new("qemu-img", vec![("all of it".into(), "x".into())]);
        report.rows.push(Row::median("open", "ms", &[12.0, 13.0, 14.0]).at_most(20.0).beside(4350.0));
        report.rows.push(Row::smallest("throughput", "", &[0.8, 0.95]).at_least(0.9));
        report.rows.push(Row::largest("noise", "ms", &[0.25]));
        report
    }

    #[test]
    fn rows_show_bound_value_peer_and_verdict() {
        let text = markdown(&report());
        assert!(text.contains("| open | at most 20.0 ms | 13.0 ms | 4,400 ms | holds |\n"), "{text}");
        assert!(text.contains("| throughput | at least 0.900 | 0.800 |  | **missed** |\n"), "{text}");
        assert!(text.contains("| noise |  | 0.250 ms |  |  |\n"), "{text}");
    }

    #[test]
    fn the_readme_shows_what_has_a_bound() {
        let Blocks { short, whole } = blocks(&report());
        assert!(whole.contains("| noise |") && whole.contains("- all of it: x\n"), "{whole}");
        assert!(short.contains("| open |") && !short.contains("noise"), "{short}");
    }

    #[test]
    fn what_is_published_agrees_with_itself() {
        let root = tempfile::tempdir().unwrap();
        assert!(SHOWN.of_report(root.path()).unwrap().is_none(), "nothing measured yet");
        fs::create_dir_all(root.path().join("docs/measurements")).unwrap();
        for file in ["README.md", SHOWN.page] {
            fs::write(root.path().join(file), "# x\n<!-- bench:x -->\n<!-- /bench:x -->\n").unwrap();
        }
        SHOWN.publish(Some(root.path()), &report()).unwrap();
        let read = SHOWN.of_report(root.path()).unwrap().expect("a report");
        assert_eq!(SHOWN.stale(root.path(), &read).unwrap(), None, "tidy would complain");
    }
}
