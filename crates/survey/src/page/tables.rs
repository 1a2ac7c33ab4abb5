//! The tables of the page: what is at risk, the longest chains, the most shared layers.

use std::cmp::Reverse;

use super::escape;
use crate::human::{bytes, count, duration};
use crate::report::{Chain, Layer, Report, Risk};
use crate::risk::Severity;

/// Risks listed; JSON has all.
const RISKS_MAX: usize = 500;
/// Chains and layers listed.
const TOP: usize = 15;

pub(super) fn risks(report: &Report) -> String {
    if report.risks.is_empty() {
        return "<section>\n<h2>At risk</h2>\n<p>No chain is at risk.</p>\n</section>\n".to_owned();
    }
    let rows: Vec<String> = report.risks.iter().take(RISKS_MAX).map(risk).collect();
    let more = match report.risks.len().saturating_sub(RISKS_MAX) {
        0 => String::new(),
        more => format!(
            "<p>And {} more: <code>vmstrata survey --json</code> lists them all.</p>\n",
            count(more as f64)
        ),
    };
    let table = table(&["risk", "chains", "where and what"], &rows);
    format!("<section>\n<h2>At risk</h2>\n{table}{more}</section>\n")
}

fn risk(risk: &Risk) -> String {
    let class = if risk.severity == Severity::Broken { "broken" } else { "suspect" };
    format!(
        "<tr><td><span class=\"mark {class}\">{}</span></td><td class=\"n\">{}</td><td class=\"path\">{}</td></tr>\n",
        risk.kind.name(),
        count(risk.chains.into()),
        escape(&risk.told())
    )
}

pub(super) fn longest(report: &Report) -> String {
    let rows: Vec<String> = report.longest_chains().into_iter().take(TOP).map(chain).collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = ["layers", "shared", "disk", "size", "on host", "open, stock", "open", "memory, stock"];
    format!("<section>\n<h2>Longest chains</h2>\n{}</section>\n", table(&head, &rows))
}

fn chain(chain: &Chain) -> String {
    let (cost, size) = (&chain.cost, |size: u64| bytes(size as f64));
    let after = [
        size(chain.virtual_size),
        size(chain.allocated),
        duration(cost.stock_open_s),
        duration(cost.open_s),
        size(cost.stock_memory_max),
    ];
    row([count(chain.layers.into()), count(chain.shared.into())], &chain.path, &after)
}

/// Numbers, a path, and more numbers.
fn row(before: [String; 2], path: &str, after: &[String]) -> String {
    let numbers =
        |all: &[String]| all.iter().map(|n| format!("<td class=\"n\">{n}</td>")).collect::<String>();
    let (before, path, after) = (numbers(&before), escape(path), numbers(after));
    format!("<tr>{before}<td class=\"path\"><code>{path}</code></td>{after}</tr>\n")
}

pub(super) fn most_shared(report: &Report) -> String {
    let mut layers: Vec<&Layer> = report.layers.iter().filter(|layer| layer.chains > 1).collect();
    layers.sort_by_key(|layer| Reverse(layer.chains));
    let rows: Vec<String> = layers.into_iter().take(TOP).map(layer).collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = ["chains", "overlays", "layer", "place", "size", "on host"];
    format!("<section>\n<h2>Most shared layers</h2>\n{}</section>\n", table(&head, &rows))
}

fn layer(layer: &Layer) -> String {
    let size = |size: u64| bytes(size as f64);
    let after = [count(layer.depth.into()), size(layer.virtual_size), size(layer.allocated)];
    row([count(layer.chains.into()), count(layer.overlays.into())], &layer.path, &after)
}

fn table(head: &[&str], rows: &[String]) -> String {
    // Columns of text; all others are numbers, set to the right.
    let class = |name: &str| {
        if matches!(name, "risk" | "layer" | "where and what" | "disk") { "" } else { " class=\"n\"" }
    };
    let head: String =
        head.iter().map(|name| format!("<th scope=\"col\"{}>{name}</th>", class(name))).collect();
    format!(
        "<div class=\"wide\" tabindex=\"0\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{}</tbody>\n</table></div>\n",
        rows.concat()
    )
}
