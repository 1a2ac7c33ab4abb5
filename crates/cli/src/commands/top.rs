//! `vmstrata top`: what a running server's disks are doing, again and again.
//!
//! ```text
//!   GET /v1/stats ──► sample ──┐
//!                              ├─► difference ──► rows ──► screen, or stdout with --once
//!   the sample before ─────────┘
//! ```
//!
//! The screen is redrawn in place with the escape sequences every terminal knows. Meanwhile the terminal shows no keys that are
//! pressed; `q` and Ctrl-C end it. What does not fit in the window is left out, the least important columns first.

mod keys;
mod rates;

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use rustix::termios::tcgetwinsize;
use vmstrata_api::{JobList, ServerStatus, StatsList};

use self::keys::Keys;
use self::rates::{DiskRates, rates};
use super::status::{failures, headline, tiers};
use crate::args::TopArgs;
use crate::client::Client;
use crate::commands::backup::until_stopped;
use crate::output::{Table, percent, print, print_json, share};
use crate::units::short_size;

/// Redraws until interrupted; with `--once`, prints one interval.
///
/// # Errors
/// When no server answers, or it ends.
pub fn run(args: &TopArgs) -> Result<ExitCode> {
    let client = Client::new(&args.server)?;
    let interval = Duration::from_secs_f64(args.interval);
    let mut before: StatsList = client.get("/v1/stats")?;
    let live = !args.once && !args.json && stdout().is_terminal();
    until_stopped(|stop| {
        let keys = live.then(Keys::listen).flatten();
        while !Keys::is_quit_pressed(keys.as_ref(), interval, stop) {
            let now: StatsList = client.get("/v1/stats")?;
            let disks = rates(&before, &now);
            if args.json {
                print_json(&disks)?;
            } else {
                show(|room| screen(&client, &now, &disks, room), live)?;
            }
            if args.once {
                break;
            }
            before = now;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Home, each line erased to its end as it is written, and whatever was below erased at last: no flicker.
fn show(screen: impl FnOnce(usize) -> Result<String>, live: bool) -> Result<()> {
    if !live {
        return Ok(print(&format!("{}\n", screen(usize::MAX)?))?);
    }
    let mut out = stdout().lock();
    // Anew each time: windows change. A terminal that does not know its size says 0.
    let size = tcgetwinsize(&out).ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
    let text = screen(size.map_or(usize::MAX, |size| size.ws_col.into()))?;
    let text = size.map_or_else(|| text.clone(), |size| fit(&text, size.ws_row.into(), size.ws_col.into()));
    write!(out, "\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n"))?;
    Ok(out.flush()?)
}

/// As much of it as a window of `rows` and `columns` holds, the cursor's line below it included.
fn fit(text: &str, rows: usize, columns: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let room = rows.saturating_sub(1);
    let fitting = if lines.len() <= room { lines.len() } else { room.saturating_sub(1) };
    let hidden = lines.len() - fitting;
    let note = (hidden > 0).then(|| format!("… {hidden} more lines: a taller window or --once shows them"));
    let cut = |line: &str| line.chars().take(columns).chain(['\n']).collect::<String>();
    lines[..fitting].iter().copied().chain(note.as_deref()).map(cut).collect()
}

fn screen(client: &Client, now: &StatsList, disks: &[DiskRates], room: usize) -> Result<String> {
    let status: ServerStatus = client.get("/v1/status")?;
    let jobs: JobList = client.get("/v1/jobs")?;
    let failed = failures(&status) + &tiers(&status);
    let headline = headline(&ServerStatus { resources: now.resources, ..status });
    let running = jobs.jobs.iter().filter(|job| !job.state.is_ended()).map(|job| {
        let share = percent(job.done, job.total);
        format!("job {} on {}: {share:.0} % of {} {}\n", job.id, job.disk, job.total, job.unit)
    });
    // What is wrong or under way comes first: a window may be too small for all disks.
    Ok(format!(
        "{headline}\n{failed}{}\n{}",
        running.collect::<String>(),
        table(disks).fitted(room, &DISPENSABLE)
    ))
}

/// Columns that a narrow window does without, in this order.
const DISPENSABLE: [usize; 6] = [7, 10, 11, 6, 1, 9];

fn table(disks: &[DiskRates]) -> Table<13> {
    let mut table = Table::new([
        "DISK", ">LAYERS", ">READ/s", ">READ", ">WRITE/s", ">WRITE", ">FLUSH/s", ">R p50", ">R p99",
        ">W p99", ">HITS", ">SLOW", ">ERRORS",
    ]);
    for disk in disks {
        let speed = |bytes: f64| format!("{}/s", short_size(bytes as u64));
        table.row([
            disk.name.clone(),
            disk.layers.to_string(),
            count(disk.reads_per_second),
            speed(disk.read_bytes_per_second),
            count(disk.writes_per_second),
            speed(disk.write_bytes_per_second),
            count(disk.flushes_per_second),
            time(disk.read_p50_us),
            time(disk.read_p99_us),
            time(disk.write_p99_us),
            share(disk.metadata_hits_percent),
            format!("{:.0} %", disk.at_workers_percent),
            disk.errors.to_string(),
        ]);
    }
    table
}

fn count(per_second: f64) -> String {
    if per_second > 0.0 && per_second < 10.0 {
        format!("{per_second:.1}")
    } else {
        format!("{per_second:.0}")
    }
}

/// `<8 µs`: buckets are bounds.
pub fn time(bound_us: Option<f64>) -> String {
    match bound_us {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("<{us:.0} µs"),
        Some(us) if us < 1e6 => format!("<{:.0} ms", us / 1e3),
        Some(us) => format!("<{:.0} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_cut_off_and_said() {
        assert_eq!(fit("ab\ncd\n", 3, 80), "ab\ncd\n");
        assert_eq!(fit("µ│cd\nef", 24, 2), "µ│\nef\n");
        let text = "1\n2\n3\n4\n5\n";
        assert_eq!(fit(text, 6, 80), text);
        let note = "… 3 more lines: a taller window or --once shows them\n";
        assert_eq!(fit(text, 4, 80), format!("1\n2\n{note}"), "and the cursor's line");
        assert_eq!(fit(text, 1, 3), "… 5\n", "there is always something");
    }

    #[test]
    fn numbers_are_short() {
        for (number, shown) in [(0.0, "0"), (0.04, "0.0"), (3.25, "3.2"), (9.94, "9.9"), (12345.6, "12346")] {
            assert_eq!(count(number), shown);
        }
        for (us, shown) in
            [(1.024, "<1 µs"), (524.288, "<524 µs"), (2097.152, "<2 ms"), (8_589_934.6, "<9 s")]
        {
            assert_eq!(time(Some(us)), shown);
        }
    }
}
