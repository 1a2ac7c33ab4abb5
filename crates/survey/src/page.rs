//! The report as one HTML page: figures, plots as inline SVG, tables; nothing is loaded from anywhere, nothing runs.
//!
//! ```text
//!   figures ──► plot (axes, marks) ──► SVG ─┐
//!   tables ─────────────────────────────────┴─► render
//! ```
//!
//! Invariants: the page is well-formed XML as well as HTML; every name that comes from a file or an image passes
//! `escape`; its size is bounded, as points that would lie on each other are drawn once and tables have a limit.

mod axis;
mod cdf;
mod figures;
mod plot;
mod scatter;
mod tables;
mod tiles;

use std::fmt::Write;

use vmstrata_types::time;

use crate::human::{bytes, count};
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
    page.push_str(&tiles::all(report));
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
    let [year, month, day] = time::date(days);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest / 60 % 60)
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
         <p>Times between snapshots are those of the files: {} of {} could be dated.</p>\n{}</section>\n",
        escape(savings.model),
        escape(&savings.measured),
        count(report.snapshots.dated as f64),
        count(report.snapshots.taken as f64),
        deep(report)
    )
}

fn deep(report: &Report) -> String {
    let Some(deep) = &report.deep else { return String::new() };
    format!(
        "<p>Hidden clusters: of {} in clusters, {} are seen by no disk surveyed, because every disk on their layer has \
         something newer there. Merging gives them back if no snapshot is to be kept. Tables of {} of {} layers were \
         read; what could not be read counts as seen.</p>\n",
        bytes(deep.mapped_bytes as f64),
        bytes(deep.hidden_bytes as f64),
        count(deep.layers_read as f64),
        count(report.layers.len() as f64)
    )
}

fn left_out(report: &Report) -> String {
    let scanned = &report.scanned;
    let sorts = [
        (&scanned.unreadable, "files or directories that could not be read"),
        (&scanned.links, "symbolic links, which are not followed"),
        (&scanned.special, "special files, which are not opened"),
        (&scanned.unfinished, "overlays of unfinished snapshots"),
        (&scanned.left_over, "files that disks let go of (vmstrata gc)"),
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
