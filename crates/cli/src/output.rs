//! What reaches the user: results on stdout, as text or JSON; progress on stderr, when someone watches.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Serialize;

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
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    /// A table that is only a headline.
    pub fn new(headline: [&str; COLUMNS]) -> Self {
        Self { rows: vec![headline.map(str::to_owned)] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: [String; COLUMNS]) {
        self.rows.push(cells.map(|cell| visible(&cell).into_owned()));
    }
}

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; COLUMNS] = std::array::from_fn(width);
        for row in &self.rows {
            let padded = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
            writeln!(f, "{}", padded.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// A line on a terminal that shows how far a long job is; silent elsewhere. May be updated from several threads.
#[derive(Debug)]
pub struct Progress {
    enabled: bool,
    shown: Mutex<Option<Instant>>,
}

impl Progress {
    /// Often enough to look alive, seldom enough to cost nothing.
    const INTERVAL: Duration = Duration::from_millis(100);

    /// Shows something only if stderr is a terminal and `quiet` is not asked for.
    pub fn new(quiet: bool) -> Self {
        Self { enabled: !quiet && io::stderr().is_terminal(), shown: Mutex::new(None) }
    }

    /// Shows that `what` is at `done` of `total`, unless something was shown a moment ago.
    pub fn update(&self, what: &str, done: u64, total: u64) {
        self.show(|| format!("{what}: {:.1} %", percent(done, total)));
    }

    /// Shows `line`, unless something was shown a moment ago: for jobs whose end is not known.
    pub fn show(&self, line: impl FnOnce() -> String) {
        // A thread that finds another one showing has nothing to add.
        let (true, Ok(mut shown)) = (self.enabled, self.shown.try_lock()) else { return };
        if shown.is_some_and(|last| last.elapsed() < Self::INTERVAL) {
            return;
        }
        *shown = Some(Instant::now());
        // A terminal that has gone away is no reason to stop the job.
        let _ = write!(io::stderr(), "\r\x1b[K{}", line());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.get_mut().is_ok_and(|shown| shown.is_some()) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
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
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["DISK", "SIZE"]);
        table.row(["ü".to_owned(), "1 GiB".to_owned()]);
        table.row(["a long name".to_owned(), String::new()]);
        assert_eq!(table.to_string(), "DISK         SIZE\nü            1 GiB\na long name\n");
    }

    #[test]
    fn progress_is_silent_when_quiet() {
        let progress = Progress::new(true);
        progress.update("checking", 1, 2);
        assert!(progress.shown.lock().unwrap().is_none());
    }
}
