//! The tables of the chains' measurement: a few figures for the README, all of them and their bounds for its page.

use std::fmt::Write;

use super::results::{Cell, Figure, Ratio, Results};
use super::server::Kind;
use super::shown::Blocks;

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

/// What a reader wants to know first: reading, writing, memory, opening, starting a guest.
const MOST: [Figure; 6] = [
    Figure::RandomRead32,
    Figure::Sequential,
    Figure::FirstWrite,
    Figure::Memory,
    Figure::Open,
    Figure::Boot,
];

/// Tables for the README and for the page.
pub(super) fn blocks(results: &Results) -> Blocks {
    let circumstances = results.machine.circumstances(&results.versions, &results.date);
    let ratios = results.ratios.iter().map(ratio_row);
    let ratios = String::from("| what must hold | target | measured | |\n|---|---|--:|---|\n")
        + &ratios.collect::<String>();
    Blocks {
        short: format!("{}\nMedians; {circumstances}\n", figures(results, &MOST)),
        whole: format!("{}\n{ratios}\nMedians; {circumstances}\n", figures(results, &FIGURES)),
    }
}

fn figures(results: &Results, shown: &[Figure]) -> String {
    let mut lengths: Vec<u32> =
        results.cells.iter().map(|cell| cell.layers).filter(|layers| *layers > 0).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut text = String::from("| figure | server |");
    lengths.iter().for_each(|layers| _ = write!(text, " {} |", plural(*layers)));
    text.push_str("\n|---|---|");
    lengths.iter().for_each(|_| text.push_str("--:|"));
    text.push('\n');
    for figure in shown.iter().copied() {
        for server in [Kind::Qemu, Kind::Vmstrata, Kind::Floor] {
            if let Some(row) = row(results, figure, server, &lengths) {
                text.push_str(&row);
            }
        }
    }
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
    let measured = format!("{} {unit}", with_quartiles(ratio.value, ratio.quartiles));
    format!("| {} | {} | {} | {verdict} |\n", ratio.name, ratio.target, measured.trim_end())
}

/// A median with its quartiles, unless they look the same.
pub(super) fn with_quartiles(median: f64, (low, high): (f64, f64)) -> String {
    let [median, low, high] = [median, low, high].map(number);
    if low == median && high == median { median } else { format!("{median} ({low}–{high})") }
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

pub(crate) fn thousands(value: f64) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts: Vec<_> = [0.0361, 0.95, 3.456, 34.56, 345.6, 34_567.0, 1_234_567.0].map(number).into();
        assert_eq!(texts, ["0.036", "0.950", "3.46", "34.6", "346", "34,600", "1,234,600"]);
        assert_eq!(with_quartiles(1.0, (0.5, 2.0)), "1.00 (0.500–2.00)");
        assert_eq!(with_quartiles(1.0, (1.0, 1.001)), "1.00");
    }

    #[test]
    fn a_row_for_each_server_and_a_column_for_each_length() {
        let text = blocks(&crate::bench::results::example()).whole;
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
    fn the_readme_has_fewer_figures_and_no_bounds() {
        let text = blocks(&crate::bench::results::example()).short;
        assert!(text.contains("| vhost-user 4 KiB random read, QD32, IOPS | QEMU |"), "{text}");
        assert!(!text.contains("QD1,") && !text.contains("what must hold"), "{text}");
    }
}
