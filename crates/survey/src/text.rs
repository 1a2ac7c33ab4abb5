//! The report for a terminal: a table of figures, the longest chains, and what is at risk.

use std::fmt::{Result, Write};

use crate::human::{bytes, count, counted, duration};
use crate::report::{Report, Risk, Summary};
use crate::risk::Severity;

/// Risks listed; `--json` has all, and the page more.
const LISTED: usize = 20;
/// Longest chains listed.
const LONGEST: usize = 5;

/// Name, figures, and how they are written.
type Row<'a> = (&'a str, &'a Summary, fn(f64) -> String);

/// The whole text, with a newline at its end.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    write_head(&mut text, report)
        .and_then(|()| write_figures(&mut text, report))
        .and_then(|()| write_savings(&mut text, report))
        .and_then(|()| write_deep(&mut text, report))
        .and_then(|()| write_longest(&mut text, report))
        .and_then(|()| write_risks(&mut text, report))
        .and_then(|()| write_left_out(&mut text, report))
        .expect("writing to a string");
    text
}

fn write_head(out: &mut String, report: &Report) -> Result {
    let totals = &report.summary;
    writeln!(
        out,
        "{}: {} in {}, {} on the host ({} looked at)",
        report.roots.join(", "),
        counted(totals.chains as f64, "disk"),
        counted(totals.layers as f64, "layer file"),
        bytes(totals.allocated_bytes as f64),
        counted(report.scanned.files as f64, "file"),
    )
}

fn write_figures(out: &mut String, report: &Report) -> Result {
    let totals = &report.summary;
    if totals.chains == 0 {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<32}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "", "lowest", "median", "90 %", "99 %", "highest"
    )?;
    let rows: [Row; 8] = [
        ("disk size", &totals.virtual_size, bytes),
        ("on the host, a chain", &totals.chain_allocated, bytes),
        ("on the host, a layer", &totals.layer_allocated, bytes),
        ("layers of a chain", &totals.chain_length, count),
        ("shared backing files of a chain", &totals.chain_shared, count),
        ("chains a layer belongs to", &totals.layer_chains, count),
        ("time between snapshots", &report.snapshots.interval_s, duration),
        ("reads/s expected, stock QEMU", &report.savings.stock_reads_per_s, count),
    ];
    rows.into_iter().try_for_each(|(name, summary, show)| write_row(out, name, summary, show))?;
    write_row(out, "reads/s expected, vmstrata", &report.savings.reads_per_s, count)
}

fn write_row(out: &mut String, name: &str, summary: &Summary, show: fn(f64) -> String) -> Result {
    if summary.count == 0 {
        return writeln!(out, "{name:<32}{:>12}", "unknown");
    }
    write!(out, "{name:<32}")?;
    for figure in [summary.min, summary.p50, summary.p90, summary.p99, summary.max] {
        write!(out, "{:>12}", show(figure))?;
    }
    writeln!(out)
}

fn write_savings(out: &mut String, report: &Report) -> Result {
    let savings = &report.savings;
    if report.chains.is_empty() {
        return Ok(());
    }
    let show = |size: u64| bytes(size as f64);
    writeln!(out, "\nAll disks open at once, as modelled:")?;
    writeln!(
        out,
        "  memory   stock QEMU {} to {}, vmstrata at most {}",
        show(savings.stock_memory_min),
        show(savings.stock_memory_max),
        show(savings.memory_max)
    )?;
    writeln!(
        out,
        "  opening  stock QEMU {}, vmstrata {}, one after the other",
        duration(savings.stock_open_s),
        duration(savings.open_s)
    )?;
    writeln!(out, "  measured {}; `vmstrata survey --help` has the model", savings.measured)
}

fn write_deep(out: &mut String, report: &Report) -> Result {
    let Some(deep) = &report.deep else { return Ok(()) };
    let (mapped, hidden) = (deep.mapped_bytes as f64, deep.hidden_bytes as f64);
    writeln!(
        out,
        "  merging  {} of {} in clusters are seen by no disk: given back if no snapshot is to be kept",
        bytes(hidden),
        bytes(mapped)
    )?;
    match deep.layers_failed {
        0 => Ok(()),
        failed => {
            writeln!(out, "           the tables of {} could not be read", counted(failed as f64, "layer"))
        }
    }
}

fn write_longest(out: &mut String, report: &Report) -> Result {
    let longest = report.longest_chains();
    if longest.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nLongest chains:\n{:>8}{:>8}{:>12}{:>12}  disk", "layers", "shared", "size", "on host")?;
    for chain in longest.into_iter().take(LONGEST) {
        let (size, host) = (bytes(chain.virtual_size as f64), bytes(chain.allocated as f64));
        writeln!(
            out,
            "{:>8}{:>8}{size:>12}{host:>12}  {}",
            chain.layers,
            chain.shared,
            printable(&chain.path)
        )?;
    }
    Ok(())
}

fn write_risks(out: &mut String, report: &Report) -> Result {
    let totals = &report.summary;
    let (broken, suspect) = (totals.chains_broken, totals.chains_suspect);
    if report.chains.is_empty() {
        return writeln!(out, "\nNo image was found.");
    }
    if broken + suspect == 0 {
        return writeln!(out, "\nNo chain is at risk.");
    }
    writeln!(
        out,
        "\nAt risk: {} broken, {} to be looked into",
        counted(broken as f64, "chain"),
        count(suspect as f64)
    )?;
    writeln!(out, "  {:<15}{:>7}  where and what", "risk", "chains")?;
    report.risks.iter().take(LISTED).try_for_each(|risk| write_risk(out, risk))?;
    match report.risks.len().saturating_sub(LISTED) {
        0 => Ok(()),
        more => writeln!(out, "  ... and {more} more: --json lists them all"),
    }
}

fn write_risk(out: &mut String, risk: &Risk) -> Result {
    let mark = if risk.severity == Severity::Broken { '!' } else { ' ' };
    let what = printable(&risk.told());
    writeln!(out, "{mark} {:<15}{:>7}  {what}", risk.kind.name(), risk.chains)
}

fn write_left_out(out: &mut String, report: &Report) -> Result {
    let scanned = &report.scanned;
    let sorts = [
        (&scanned.unreadable, "could not be read"),
        (&scanned.links, "symbolic links not followed"),
        (&scanned.special, "special files not opened"),
        (&scanned.unfinished, "overlays of unfinished snapshots"),
        (&scanned.too_deep, "directories too deep to enter"),
        (&scanned.too_many, "images beyond the limit"),
    ];
    for (omitted, what) in sorts.into_iter().filter(|(omitted, _)| omitted.count > 0) {
        let first = omitted.paths.first().map(|path| printable(path)).unwrap_or_default();
        writeln!(out, "Left out: {} {what}, such as {first}", count(omitted.count as f64))?;
    }
    let left = &scanned.left_over;
    if let Some(first) = left.paths.first() {
        let (count, first) = (count(left.count as f64), printable(first));
        writeln!(out, "Left over: {count} files that disks let go of, such as {first}: see vmstrata gc")?;
    }
    Ok(())
}

/// A name that a stranger chose, made safe for a terminal.
fn printable(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
