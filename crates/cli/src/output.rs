//! What reaches the user: results on stdout, as text or JSON; progress on stderr, when someone watches.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::units::short_size;

/// Writes `value` to stdout as indented JSON and a newline.
///
/// # Errors
/// When stdout does not take it.
pub fn print_json(value: &impl Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Writes `value` to stdout as JSON if that is asked for, else what `text` says of it.
///
/// # Errors
/// When stdout does not take it.
pub fn answer(json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    if json {
        print_json(value)?
    } else {
        print(&text())?
    }
    Ok(())
}

/// Writes `value` to stdout as JSON on one line, for readers that wait for exactly one.
///
/// # Errors
/// When stdout does not take it.
pub fn print_json_line(value: &impl Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// `text` without what a terminal would obey: names come from images that others made. What is no character to be seen, or would
/// turn the direction of writing, is replaced.
pub fn visible(text: &str) -> Cow<'_, str> {
    replaced(text, is_command)
}

/// As [`visible`], with the ends of lines, and tabs.
pub fn visible_lines(text: &str) -> Cow<'_, str> {
    replaced(text, |c| is_command(c) && !matches!(c, '\n' | '\t'))
}

fn replaced(text: &str, is_unwanted: impl Fn(char) -> bool) -> Cow<'_, str> {
    if text.contains(&is_unwanted) {
        text.chars().map(|c| if is_unwanted(c) { '\u{fffd}' } else { c }).collect()
    } else {
        Cow::Borrowed(text)
    }
}

fn is_command(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Writes `text` to stdout, nothing of which a terminal obeys but the ends of lines.
///
/// # Errors
/// When stdout does not take it.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(visible_lines(text).as_bytes())?;
    out.flush()
}

/// `1 layer`, `2 layers`.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Rows of text under a headline, each column as wide as its widest cell.
#[derive(Debug)]
pub struct Table<const COLUMNS: usize> {
    rows: Vec<[String; COLUMNS]>,
    /// Which columns hold numbers, and end on the right.
    numbers: [bool; COLUMNS],
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    /// A table that is only a headline. `>` before a name says that the column holds numbers.
    pub fn new(headline: [&str; COLUMNS]) -> Self {
        let numbers = headline.map(|name| name.starts_with('>'));
        Self { rows: vec![headline.map(|name| name.trim_start_matches('>').to_owned())], numbers }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: [String; COLUMNS]) {
        self.rows.push(cells.map(|cell| visible(&cell).into_owned()));
    }

    /// The table in a window of so many characters: columns go until it fits, the first ones of `dispensable` first.
    pub fn fitted(&self, room: usize, dispensable: &[usize]) -> String {
        let widths = self.widths();
        let mut shown: Vec<usize> = (0..COLUMNS).collect();
        for dropped in dispensable {
            let needed = shown.iter().map(|&column| widths[column] + GAP.len()).sum::<usize>();
            if needed - GAP.len() <= room {
                break;
            }
            shown.retain(|column| column != dropped);
        }
        self.text(&shown)
    }

    fn widths(&self) -> [usize; COLUMNS] {
        std::array::from_fn(|column| {
            self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
        })
    }

    fn text(&self, shown: &[usize]) -> String {
        let widths = self.widths();
        let line = |row: &[String; COLUMNS]| {
            let padded = shown.iter().map(|&column| {
                let (cell, width) = (&row[column], widths[column]);
                if self.numbers[column] { format!("{cell:>width$}") } else { format!("{cell:width$}") }
            });
            format!("{}\n", padded.collect::<Vec<_>>().join(GAP).trim_end())
        };
        self.rows.iter().map(line).collect()
    }
}

/// Between two columns.
const GAP: &str = "  ";

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: [usize; COLUMNS] = std::array::from_fn(|column| column);
        f.write_str(&self.text(&all))
    }
}

/// A line on a terminal that shows how far a long job is, how fast it goes, and when it will end; silent elsewhere. May be updated
/// from several threads.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Counts bytes. Shows something only if stderr is a terminal and `quiet` is not asked for.
    pub fn of_bytes(quiet: bool) -> Self {
        Self::new(
            quiet,
            "{msg}: {percent} %, {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
        )
    }

    /// Counts things such as `layers`.
    pub fn of(quiet: bool, unit: &str) -> Self {
        Self::new(quiet, &format!("{{msg}}: {{percent}} %, {{pos}} of {{len}} {unit}, {{eta}} left"))
    }

    /// For a job whose end is not known.
    pub fn endless(quiet: bool) -> Self {
        Self::new(quiet, "{msg}, {elapsed}")
    }

    fn new(quiet: bool, template: &str) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template(template).expect("the template is one of this file's");
        Self(ProgressBar::with_draw_target(None, target).with_style(style))
    }

    /// Shows that `what` is at `done` of `total`.
    pub fn update(&self, what: &str, done: u64, total: u64) {
        if self.0.is_hidden() {
            return;
        }
        if self.0.message() != what {
            self.0.set_message(what.to_owned());
        }
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// The same of a job that has written so many bytes.
    pub fn update_written(&self, what: &str, done: u64, total: u64, written: u64) {
        if !self.0.is_hidden() {
            let rate = (written as f64 / self.0.elapsed().as_secs_f64().max(0.001)) as u64;
            let written = format!("{what}, {} written, {}/s", short_size(written), short_size(rate));
            self.update(&written, done, total);
        }
    }

    /// Shows `line`.
    pub fn show(&self, line: impl FnOnce() -> String) {
        if !self.0.is_hidden() {
            self.0.set_message(line());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// `done` of `total` in percent; an empty job is done.
pub fn percent(done: u64, total: u64) -> f64 {
    if total == 0 { 100.0 } else { (done as f64 / total as f64 * 100.0).min(100.0) }
}

/// The share of `part` in `part` and `rest`, in percent; `None` if there is neither.
pub fn share_of(part: u64, rest: u64) -> Option<f64> {
    let all = part.saturating_add(rest);
    (all > 0).then(|| part as f64 / all as f64 * 100.0)
}

/// A share as people read it: what is not all of it never reads as 100 %.
pub fn share(percent: Option<f64>) -> String {
    percent.map_or_else(|| "-".to_owned(), |percent| format!("{:.1} %", (percent * 10.0).floor() / 10.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_something_and_only_all_of_it_is_100_percent() {
        let shown =
            [(0, 0), (0, 3), (1, 2), (99_999, 1), (5, 0)].map(|(part, rest)| share(share_of(part, rest)));
        assert_eq!(shown, ["-", "0.0 %", "33.3 %", "99.9 %", "100.0 %"]);
    }

    #[test]
    fn an_empty_job_is_done_and_no_job_passes_100_percent() {
        assert_eq!(percent(0, 0), 100.0);
        assert_eq!(percent(1, 4), 25.0);
        assert_eq!(percent(9, 4), 100.0);
    }

    #[test]
    fn one_of_a_thing_is_singular() {
        assert_eq!(counted(1, "layer"), "1 layer");
        assert_eq!(counted(0, "layer"), "0 layers");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_numbers_end_on_the_right() {
        let mut table = Table::new(["DISK", ">SIZE", "FILE"]);
        table.row(["ü".to_owned(), "10 GiB".to_owned(), "a".to_owned()]);
        table.row(["a long name".to_owned(), "1 B".to_owned(), String::new()]);
        assert_eq!(
            table.to_string(),
            "DISK           SIZE  FILE\nü            10 GiB  a\na long name     1 B\n"
        );
    }

    #[test]
    fn a_narrow_window_shows_the_columns_that_matter() {
        let mut table = Table::new(["DISK", ">READ", ">WRITE", ">SLOW"]);
        table.row(["web", "1", "22", "3 %"].map(str::to_owned));
        assert_eq!(table.fitted(23, &[3, 1]), table.to_string());
        assert_eq!(table.fitted(22, &[3, 1]), "DISK  READ  WRITE\nweb      1     22\n");
        assert_eq!(table.fitted(3, &[3, 1]), "DISK  WRITE\nweb      22\n", "the rest stays");
    }

    #[test]
    fn progress_is_silent_when_quiet() {
        let progress = Progress::of_bytes(true);
        progress.update("checking", 1, 2);
        assert!(progress.0.is_hidden() && progress.0.message().is_empty());
    }
}
