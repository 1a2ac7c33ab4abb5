//! The Markdown table of a measurement, and its place in the README.
//!
//! The README's block is a function of `docs/measurements/chain.json`: `cargo xtask tidy` fails when it says
//! anything else.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::results::{Cell, Figure, Ratio, Results};
use super::server::Kind;

/// Line before the block in the README.
pub const BEGIN: &str = "<!-- bench:chain -->";
/// Line after it.
pub const END: &str = "<!-- /bench:chain -->";

const FIGURES: [Figure; 11] = [
    Figure::RandomRead32,
    Figure::RandomRead1,
    Figure::Sequential,
    Figure::NbdRandomRead16,
    Figure::NbdCopy,
    Figure::FileRead,
    Figure::Overwrite,
    Figure::FirstWrite,
    Figure::Memory,
    Figure::Open,
    Figure::Boot,
];

/// The block between the markers, markers not included.
pub fn markdown(results: &Results) -> String {
    let mut lengths: Vec<u32> =
        results.cells.iter().map(|cell| cell.layers).filter(|layers| *layers > 0).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut text = String::from("\n| figure | server |");
    lengths.iter().for_each(|layers| _ = write!(text, " {} |", plural(*layers)));
    text.push_str("\n|---|---|");
    lengths.iter().for_each(|_| text.push_str("--:|"));
    text.push('\n');
    for figure in FIGURES {
        for server in [Kind::Qemu, Kind::Vmstrata, Kind::Floor] {
            if let Some(row) = row(results, figure, server, &lengths) {
                text.push_str(&row);
            }
        }
    }
    text.push_str("\n| what must hold | target | measured | |\n|---|---|--:|---|\n");
    results.ratios.iter().for_each(|ratio| text.push_str(&ratio_row(ratio)));
    let circumstances = results.machine.circumstances(&results.versions, &results.date);
    _ = writeln!(text, "\nMedians; {circumstances}");
    text
}

fn plural(layers: u32) -> String {
    if layers == 1 { "1 layer".into() } else { format!("{} layers", thousands(f64::from(layers))) }
}

fn row(results: &Results, figure: Figure, server: Kind, lengths: &[u32]) -> Option<String> {
    let of = |layers: u32| -> Option<&Cell> {
        let same = |cell: &&Cell| (cell.figure, cell.server, cell.layers) == (figure, server, layers);
        results.cells.iter().find(same)
    };
    // The floor of most figures knows no layers: it stands in the first column.
    let plain = if server == Kind::Floor { of(0) } else { None };
    let cells: Vec<Option<&Cell>> = lengths.iter().map(|layers| of(*layers)).collect();
    if plain.is_none() && cells.iter().all(Option::is_none) {
        return None;
    }
    let mut text = format!("| {}, {} | {} |", figure.label(), figure.unit(), server.label());
    for (column, cell) in cells.into_iter().enumerate() {
        let cell = cell.or(plain.filter(|_| column == 0));
        text.push_str(&cell.map_or(" |".into(), |cell| format!(" {} |", number(cell.median))));
    }
    text.push('\n');
    Some(text)
}

fn ratio_row(ratio: &Ratio) -> String {
    let unit = ratio.target.rsplit_once(' ').map_or("", |(_, unit)| match unit {
        "KiB" | "MiB" | "s" => unit,
        _ => "",
    });
    let verdict = if ratio.met { "holds" } else { "**missed**" };
    let measured = format!("{} {unit}", number(ratio.value));
    format!("| {} | {} | {} | {verdict} |\n", ratio.name, ratio.target, measured.trim_end())
}

/// Three significant digits, thousands separated.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => thousands((value / 100.0).round() * 100.0),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

pub(super) fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The README with its block replaced.
///
/// # Errors
/// When the markers are missing.
pub fn insert(readme: &str, block: &str) -> Result<String> {
    insert_between(readme, (BEGIN, END), block)
}

/// `text` with what is between two marker lines replaced.
///
/// # Errors
/// When the markers are missing.
pub(super) fn insert_between(text: &str, (begin, end): (&str, &str), block: &str) -> Result<String> {
    let (before, rest) = text.split_once(begin).with_context(|| format!("no line {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("no line {end} after {begin}"))?;
    Ok(format!("{before}{begin}\n{}\n{end}{after}", block.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts: Vec<_> = [0.0361, 0.95, 3.456, 34.56, 345.6, 34_567.0, 1_234_567.0].map(number).into();
        assert_eq!(texts, ["0.036", "0.950", "3.46", "34.6", "346", "34,600", "1,234,600"]);
    }

    #[test]
    fn a_row_for_each_server_and_a_column_for_each_length() {
        let text = markdown(&crate::bench::results::example());
        let line = |start: &str| {
            text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{text}"))
        };
        assert_eq!(line("| figure"), "| figure | server | 1 layer | 50 layers | 1,000 layers |");
        let reads = "| vhost-user 4 KiB random read, QD32, IOPS |";
        assert_eq!(line(&format!("{reads} QEMU")), format!("{reads} QEMU | 168,000 | 26,000 | 110 |"));
        assert_eq!(line(&format!("{reads} floor")), format!("{reads} floor | 720,000 | | |"));
        let missed = line("| vhost-user 4 KiB random read, QD32: vmstrata, 1 layer / QEMU");
        assert!(missed.ends_with("| at least 4 | 3.81 | **missed** |"), "{missed}");
        let memory = line("| resident memory, everything read: vmstrata, 1,000 layers");
        assert!(memory.ends_with("| at most 32 MiB | 8.50 MiB | holds |"), "{memory}");
    }

    #[test]
    fn inserting_twice_changes_nothing_more() {
        let readme = format!("head\n{BEGIN}\nold\n{END}\ntail\n");
        let once = insert(&readme, "| new |\n").unwrap();
        assert_eq!(once, format!("head\n{BEGIN}\n| new |\n{END}\ntail\n"));
        assert_eq!(insert(&once, "| new |\n").unwrap(), once);
        assert!(insert("nothing", "x").is_err());
    }
}
