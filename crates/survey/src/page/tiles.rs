//! The figures at the head of the page.

use crate::human::{bytes, count, duration};
use crate::report::{Report, Savings, Totals};

/// A figure with its name, and what to know about it.
struct Tile {
    name: &'static str,
    figure: String,
    note: String,
    is_bad: bool,
}

/// All of them, as a list.
pub(super) fn all(report: &Report) -> String {
    let mut tiles = of_totals(&report.summary);
    tiles.extend(of_savings(&report.savings));
    tiles.extend(report.deep.as_ref().map(|deep| Tile {
        name: "hidden clusters",
        figure: bytes(deep.hidden_bytes as f64),
        note: format!("of {} in clusters, given back by merging", bytes(deep.mapped_bytes as f64)),
        is_bad: false,
    }));
    format!("<ul class=\"tiles\">\n{}</ul>\n", tiles.iter().map(render).collect::<String>())
}

fn render(tile: &Tile) -> String {
    let class = if tile.is_bad { "tile bad" } else { "tile" };
    let Tile { name, figure, note, .. } = tile;
    format!("<li class=\"{class}\"><span>{name}</span><strong>{figure}</strong><small>{note}</small></li>\n")
}

fn of_totals(totals: &Totals) -> Vec<Tile> {
    let plain = |name, figure, note| Tile { name, figure, note, is_bad: false };
    vec![
        plain(
            "disks",
            count(totals.chains as f64),
            format!("{} as guests see them", bytes(totals.virtual_size.total)),
        ),
        plain(
            "layer files",
            count(totals.layers as f64),
            format!("{} on the host", bytes(totals.allocated_bytes as f64)),
        ),
        plain(
            "longest chain",
            count(totals.chain_length.max),
            format!("half have {} or fewer", count(totals.chain_length.p50)),
        ),
        Tile {
            name: "chains at risk",
            figure: count((totals.chains_broken + totals.chains_suspect) as f64),
            note: format!("{} of them cannot be opened", count(totals.chains_broken as f64)),
            is_bad: totals.chains_broken > 0,
        },
    ]
}

fn of_savings(savings: &Savings) -> [Tile; 2] {
    let size = |size: u64| bytes(size as f64);
    let saved = savings.stock_memory_max.saturating_sub(savings.memory_max);
    [
        Tile {
            name: "memory saved",
            figure: size(saved),
            note: format!("at most: {} becomes {}", size(savings.stock_memory_max), size(savings.memory_max)),
            is_bad: false,
        },
        Tile {
            name: "opening all disks",
            figure: duration(savings.open_s),
            note: format!("stock QEMU: {}", duration(savings.stock_open_s)),
            is_bad: false,
        },
    ]
}
