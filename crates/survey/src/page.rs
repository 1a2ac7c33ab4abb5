//! The report as one HTML page: figures, plots as inline SVG, tables; nothing is loaded from anywhere, nothing runs.
//!
//! ```text
//!   figures ──► plot (axes, marks) ──► SVG ─┐
//!   tables ─────────────────────────────────┴─► render
//! ```
//!
//! Invariants: the page is well-formed XML as well as HTML; every name that comes from a file or an image passes
//! [`escape`]; its size is bounded, as points that would lie on each other are drawn once and tables have a limit.

mod axis;
mod cdf;
mod figures;
mod plot;
mod scatter;
mod tables;

use std::fmt::Write;

use crate::human::{bytes, count, duration};
use crate::report::Report;

const STYLE: &str = include_str!("page/style.css");

/// The whole page.
pub fn render(report: &Report) -> String {
    let mut page = String::with_capacity(256 << 10);
    let roots = escape(&report.roots.join(", "));
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
         <title>Disks of {roots}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header>\n<h1>Disks of {roots}</h1>\n<p>{}</p>\n</header>\n<main>\n",
        subtitle(report)
    );
    page.push_str(&tiles(report));
    if report.chains.is_empty() {
        page.push_str("<p class=\"empty\">No image was found: there is nothing to plot.</p>\n");
    } else {
        page.push_str(&tables::risks(report));
        page.push_str(&figures::all(report));
        page.push_str(&tables::longest(report));
        page.push_str(&tables::most_shared(report));
        page.push_str(&model(report));
    }
    page.push_str(&left_out(report));
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

fn subtitle(report: &Report) -> String {
    let scanned = &report.scanned;
    format!(
        "<code>vmstrata survey</code> on {}: {} files in {} directories, {} of them images",
        utc(report.made_at),
        count(scanned.files as f64),
        count(scanned.directories as f64),
        count(scanned.images as f64)
    )
}

/// `2026-11-21 23:01 UTC`.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to civil date, counted in eras of 400 years that begin on 1 March.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (date, number) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(number <= 2);
    format!("{year:04}-{number:02}-{date:02} {:02}:{:02} UTC", rest / 3600, rest / 60 % 60)
}

fn tiles(report: &Report) -> String {
    let (totals, savings) = (&report.summary, &report.savings);
    let at_risk = totals.chains_broken + totals.chains_suspect;
    let size = |bytes_: u64| bytes(bytes_ as f64);
    let tiles = [
        (
            "disks",
            count(totals.chains as f64),
            format!("{} as guests see them", bytes(totals.virtual_size.total)),
            "",
        ),
        (
            "layer files",
            count(totals.layers as f64),
            format!("{} on the host", size(totals.allocated_bytes)),
            "",
        ),
        (
            "longest chain",
            count(totals.chain_length.max),
            format!("half have {} or fewer", count(totals.chain_length.p50)),
            "",
        ),
        (
            "chains at risk",
            count(at_risk as f64),
            format!("{} of them cannot be opened", count(totals.chains_broken as f64)),
            if totals.chains_broken > 0 { " bad" } else { "" },
        ),
        (
            "memory saved",
            size(savings.stock_memory_max.saturating_sub(savings.memory_max)),
            format!("at most: {} becomes {}", size(savings.stock_memory_max), size(savings.memory_max)),
            "",
        ),
        (
            "opening all disks",
            duration(savings.open_s),
            format!("stock QEMU: {}", duration(savings.stock_open_s)),
            "",
        ),
    ];
    let tiles = tiles.map(|(name, figure, note, class)| {
        format!("<li class=\"tile{class}\"><span>{name}</span><strong>{figure}</strong><small>{note}</small></li>\n")
    });
    format!("<ul class=\"tiles\">\n{}</ul>\n", tiles.concat())
}

fn model(report: &Report) -> String {
    let savings = &report.savings;
    let beyond = match savings.beyond_measured {
        0 => String::new(),
        chains => format!(
            " {} longer than any that was measured: they have the figures of the longest.",
            if chains == 1 {
                "One chain is".to_owned()
            } else {
                format!("{} chains are", count(chains as f64))
            }
        ),
    };
    format!(
        "<section>\n<h2>How it was reckoned</h2>\n<p>Memory: {}</p>\n\
         <p>Opening and reads: measured for chains of 1 to 1,000 layers on {} (one disk of 4 GiB, page cache warm), and \
         interpolated between.{beyond} Another machine has other figures; their ratio is what to look at.</p>\n\
         <p>Times between snapshots are those of the files: {} of {} could be dated.</p>\n</section>\n",
        escape(savings.model),
        escape(&savings.measured),
        count(report.snapshots.dated as f64),
        count(report.snapshots.taken as f64)
    )
}

fn left_out(report: &Report) -> String {
    let scanned = &report.scanned;
    let sorts = [
        (&scanned.unreadable, "files or directories that could not be read"),
        (&scanned.links, "symbolic links, which are not followed"),
        (&scanned.special, "special files, which are not opened"),
        (&scanned.too_deep, "directories too deep to enter"),
        (&scanned.too_many, "images beyond the limit of a survey"),
    ];
    let items: String = sorts
        .iter()
        .filter(|(omitted, _)| omitted.count > 0)
        .map(|(omitted, what)| {
            let first = omitted.paths.first().map(|path| escape(path)).unwrap_or_default();
            format!("<li>{} {what}, such as <code>{first}</code></li>\n", count(omitted.count as f64))
        })
        .collect();
    if items.is_empty() {
        items
    } else {
        format!("<section>\n<h2>Left out</h2>\n<ul>\n{items}</ul>\n</section>\n")
    }
}

/// Text made safe for content and attributes, of HTML and of XML.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Neither XML nor a reader can do anything with these; the last two are no characters at all.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            // Direction marks would let a name dress up as another.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place() {
        assert_eq!(
            escape("</title><script a='\"&\u{1b}[0m\u{202e}"),
            "&lt;/title&gt;&lt;script a=&#39;&quot;&amp;\u{fffd}[0m\u{fffd}"
        );
        assert_eq!(escape("größe 東京.qcow2"), "größe 東京.qcow2");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(951_868_800), "2000-03-01 00:00 UTC");
        assert_eq!(utc(1_795_302_119), "2026-11-21 23:01 UTC");
        assert_eq!(utc(4_107_542_399), "2100-02-28 23:59 UTC");
    }
}
