//! Where reports are kept: in `docs/measurements`, and in tables of the README, which are functions of them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::report::{Bound, Report, Row};
use super::table::{insert_between, number};

/// A report's file and the README's table that is a function of it.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The report, from the repository's root.
    pub file: &'static str,
    /// The word in the comments before and after the table.
    pub mark: &'static str,
}

/// The block between the markers, markers not included.
pub fn markdown(report: &Report) -> String {
    let mut text = String::from("\n| figure | bound | vmstrata | stock QEMU | |\n|---|---|--:|--:|---|\n");
    report.rows.iter().for_each(|row| text.push_str(&line(row)));
    let parameters: Vec<_> =
        report.parameters.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    let circumstances = report.machine.circumstances(&report.versions, &report.date);
    _ = writeln!(text, "\n{}. {circumstances}", parameters.join("; "));
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

impl Page {
    /// Prints the report and, below a repository's root, writes it.
    ///
    /// # Errors
    /// When a file cannot be written or the README has no place for the table.
    pub(super) fn publish(&self, root: Option<&Path>, report: &Report) -> Result<()> {
        println!("{}", markdown(report));
        root.map_or(Ok(()), |root| self.write(root, report))
    }

    /// Writes the report and the README's table.
    fn write(&self, root: &Path, report: &Report) -> Result<()> {
        let file = root.join(self.file);
        fs::create_dir_all(file.parent().context("a file in a directory")?)?;
        let mut json = serde_json::to_string_pretty(report)?;
        json.push('\n');
        fs::write(file, json)?;
        self.render(root)
    }

    /// Makes the README's table what the report says.
    ///
    /// # Errors
    /// As for [`Page::published`], and when the README cannot be written.
    pub fn render(&self, root: &Path) -> Result<()> {
        let text = fs::read_to_string(root.join("README.md")).context("README.md")?;
        Ok(fs::write(root.join("README.md"), self.published(root, &text)?)?)
    }

    /// `readme` with its table as the report has it; unchanged when there is no report.
    ///
    /// # Errors
    /// When the file is no report, or `readme` has no place for the table.
    pub fn published(&self, root: &Path, readme: &str) -> Result<String> {
        let file = root.join(self.file);
        if !file.is_file() {
            return Ok(readme.to_owned());
        }
        let report: Report = serde_json::from_slice(&fs::read(&file)?).context(self.file)?;
        let (begin, end) = (format!("<!-- {} -->", self.mark), format!("<!-- /{} -->", self.mark));
        insert_between(readme, (&begin, &end), &markdown(&report))
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Row;
    use super::*;

    const PAGE: Page = Page { file: "docs/measurements/x.json", mark: "bench:x" };

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
    fn what_is_published_agrees_with_itself() {
        let root = tempfile::tempdir().unwrap();
        let readme = root.path().join("README.md");
        fs::write(&readme, "# x\n<!-- bench:x -->\n<!-- /bench:x -->\n").unwrap();
        let before = fs::read_to_string(&readme).unwrap();
        assert_eq!(PAGE.published(root.path(), &before).unwrap(), before, "nothing measured yet");
        PAGE.write(root.path(), &report()).unwrap();
        let text = fs::read_to_string(&readme).unwrap();
        assert_eq!(PAGE.published(root.path(), &text).unwrap(), text, "tidy would complain");
        assert!(text.contains("| open |") && PAGE.published(root.path(), "no markers").is_err());
    }
}
