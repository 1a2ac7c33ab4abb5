//! Where the report is kept: `docs/measurements/history.json`, and the README's table, a function of it.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::super::table::{insert_between, number};
use super::report::{Bound, Report, Row};

/// Line before the block in the README.
pub const BEGIN: &str = "<!-- bench:history -->";
/// Line after it.
pub const END: &str = "<!-- /bench:history -->";

const FILE: &str = "docs/measurements/history.json";

/// The block between the markers, markers not included.
pub fn markdown(report: &Report) -> String {
    let mut text = String::from("\n| figure | bound | vmstrata | stock QEMU | |\n|---|---|--:|--:|---|\n");
    report.rows.iter().for_each(|row| text.push_str(&line(row)));
    let machine = &report.machine;
    _ = write!(
        text,
        "\n{}. {} cores ({}), {} GiB, Linux {}; {}; {}. Page cache warm.\n",
        report
            .parameters
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect::<Vec<_>>()
            .join("; "),
        machine.cores,
        machine.cpu,
        machine.memory_mib.div_ceil(1024),
        machine.kernel,
        report.versions.first().map_or("", |(_, version)| version),
        report.date
    );
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

/// Writes `docs/measurements/history.json` and the README's table.
///
/// # Errors
/// When a file cannot be written or the README has no place for the table.
pub(super) fn write(root: &Path, report: &Report) -> Result<()> {
    fs::create_dir_all(root.join("docs/measurements"))?;
    let mut json = serde_json::to_string_pretty(report)?;
    json.push('\n');
    fs::write(root.join(FILE), json)?;
    render(root)
}

/// Makes the README's table what `docs/measurements/history.json` says.
///
/// # Errors
/// As for [`published`], and when the README cannot be written.
pub fn render(root: &Path) -> Result<()> {
    let text = fs::read_to_string(root.join("README.md")).context("README.md")?;
    Ok(fs::write(root.join("README.md"), published(root, &text)?)?)
}

/// `readme` with its table as `docs/measurements/history.json` has it; unchanged when there is no such file.
///
/// # Errors
/// When the file is no report, or `readme` has no place for the table.
pub fn published(root: &Path, readme: &str) -> Result<String> {
    let file = root.join(FILE);
    if !file.is_file() {
        return Ok(readme.to_owned());
    }
    let report: Report = serde_json::from_slice(&fs::read(&file)?).context(FILE)?;
    insert_between(readme, (BEGIN, END), &markdown(&report))
}

#[cfg(test)]
mod tests {
    use super::super::Options;
    use super::*;

    fn report() -> Report {
        let mut report = Report::new(&Options::full("target".into()));
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
    fn what_is_published_agrees_with_itself() {
        let root = tempfile::tempdir().unwrap();
        let readme = root.path().join("README.md");
        fs::write(&readme, format!("# x\n{BEGIN}\n{END}\n")).unwrap();
        let before = fs::read_to_string(&readme).unwrap();
        assert_eq!(published(root.path(), &before).unwrap(), before, "nothing measured yet");
        write(root.path(), &report()).unwrap();
        let text = fs::read_to_string(&readme).unwrap();
        assert_eq!(published(root.path(), &text).unwrap(), text, "tidy would complain");
        assert!(text.contains("| open |") && published(root.path(), "no markers").is_err());
    }
}
