//! The plots: those of section 3 of the sQemu paper, and what vmstrata would change.

use super::axis::Axis;
use super::cdf::{self, Quantity, Series};
use super::plot::{Ink, Plot};
use super::scatter::{self, Point};
use super::utc;
use crate::human::{bytes, count, counted};
use crate::report::{Chain, Report};
use crate::times::WINDOWS;

/// All of them, in sections.
pub(super) fn all(report: &Report) -> String {
    let sections = [
        ("Sizes", vec![disk_sizes(report), host_sizes(report)]),
        ("Chains", vec![chain_lengths(report), length_and_size(report)]),
        ("Growth", longest_chain(report).into_iter().collect()),
        ("Sharing", vec![sharing(report), chains_of_layers(report)]),
        ("Snapshots", vec![snapshots(report)]),
        ("What vmstrata would change", vec![memory(report), reads(report)]),
    ];
    let section = |(title, figures): (&str, Vec<String>)| {
        if figures.is_empty() {
            return String::new();
        }
        format!(
            "<section>\n<h2>{title}</h2>\n<div class=\"plots\">\n{}</div>\n</section>\n",
            figures.concat()
        )
    };
    sections.map(section).concat()
}

fn bytes_axis(values: &[f64]) -> Axis {
    Axis::bytes("bytes (log)", values.iter().copied())
}

fn known(report: &Report) -> impl Iterator<Item = &Chain> {
    report.chains.iter().filter(|chain| chain.known)
}

fn series(ink: Ink, name: &'static str, values: impl Iterator<Item = f64>) -> Series {
    Series { ink, name, values: values.collect() }
}

fn disk_sizes(report: &Report) -> String {
    let quantity = Quantity {
        title: "Disk sizes.",
        axis: bytes_axis,
        show: bytes,
        note: "What guests see, of disks and of the backing files below them (the paper's Figure 4).",
    };
    let backing = report.layers.iter().filter(|layer| layer.overlays > 0 && layer.format != "unknown");
    let disks = known(report).map(|chain| chain.virtual_size as f64);
    cdf::figure(
        &quantity,
        vec![
            series(Ink::First, "disks", disks),
            series(Ink::Second, "backing files", backing.map(|layer| layer.virtual_size as f64)),
        ],
    )
}

fn host_sizes(report: &Report) -> String {
    let quantity = Quantity {
        title: "Bytes on the host.",
        axis: bytes_axis,
        show: bytes,
        note: "What files take: all of a chain's, those it shares included, and each file by itself.",
    };
    cdf::figure(
        &quantity,
        vec![
            series(Ink::First, "chains", report.chains.iter().map(|chain| chain.allocated as f64)),
            series(Ink::Second, "files", report.layers.iter().map(|layer| layer.allocated as f64)),
        ],
    )
}

fn chain_lengths(report: &Report) -> String {
    let quantity = Quantity {
        title: "Chain lengths.",
        axis: |values| Axis::counts("layers in the chain (log)", values.iter().copied()),
        show: |layers| counted(layers, "layer"),
        note: "Of chains, and of files by the longest chain they belong to (the paper's Figure 6).",
    };
    cdf::figure(
        &quantity,
        vec![
            series(Ink::First, "chains", report.chains.iter().map(|chain| f64::from(chain.layers))),
            series(Ink::Second, "files", report.layers.iter().map(|layer| f64::from(layer.longest_chain))),
        ],
    )
}

fn points<'a>(
    chains: impl Iterator<Item = &'a Chain>,
    figures: impl Fn(&Chain) -> (f64, f64),
) -> impl Iterator<Item = Point<'a>> {
    chains.map(move |chain| {
        let (x, y) = figures(chain);
        Point { x, y, count: 1, name: &chain.path }
    })
}

fn length_axis(report: &Report) -> Axis {
    Axis::counts("layers in the chain (log)", report.chains.iter().map(|chain| f64::from(chain.layers)))
}

fn length_and_size(report: &Report) -> String {
    let sizes = Axis::bytes("disk size (log)", known(report).map(|chain| chain.virtual_size as f64));
    let told = format!("{} chains by length and disk size.", count(known(report).count() as f64));
    let mut plot = Plot::scatter("Chain length and disk size.", told, length_axis(report), sizes);
    let points = points(known(report), |chain| (f64::from(chain.layers), chain.virtual_size as f64));
    let largest = scatter::draw(&mut plot, "a", "chain", points, |x, y, _| {
        format!("{}, {}", counted(x, "layer"), bytes(y))
    });
    plot.figure(&format!("Each disc is a disk, or several that are alike. {largest}"))
}

/// The paper's Figure 5, where anything can be dated.
fn longest_chain(report: &Report) -> Option<String> {
    let (growth, now) = (&report.growth, report.made_at as f64);
    let mut by_layers: Vec<(f64, f64)> =
        growth.by_layers.iter().map(|longest| (longest.at as f64, f64::from(longest.layers))).collect();
    by_layers.retain(|(at, _)| *at <= now);
    let surveys: Vec<(f64, f64)> = growth
        .surveys
        .iter()
        .map(|survey| (survey.made_at as f64, f64::from(survey.longest_chain)))
        .collect();
    if by_layers.is_empty() && surveys.len() < 2 {
        return None;
    }
    let all = || by_layers.iter().chain(&surveys);
    let x = Axis::times("UTC", all().map(|(at, _)| *at).chain([now]));
    let y = Axis::counts("layers of the longest chain (log)", all().map(|(_, layers)| *layers));
    let told = format!("The longest chain has {} now.", counted(report.summary.chain_length.max, "layer"));
    let mut plot = Plot::new("Longest chain over time.", told, x, y).alone();
    draw_growth(&mut plot, &by_layers, now);
    if surveys.len() > 1 {
        plot.line("b", &surveys);
        plot.name(Ink::Second, "as surveys found it");
        for (at, layers) in thinned(&surveys) {
            let says = format!("{}: {}", utc(at as u64), counted(layers, "layer"));
            plot.disc("hit b", plot.place(at, layers), 7.0, &[&says]);
        }
    }
    Some(plot.figure(
        "As the layers that are there now were made, so without those that were merged since; and as earlier surveys found it, \
         with --history (the paper's Figure 5).",
    ))
}

fn draw_growth(plot: &mut Plot, steps: &[(f64, f64)], now: f64) {
    let Some(&(_, last)) = steps.last() else { return };
    let mut line = vec![steps[0]];
    for pair in steps.windows(2) {
        line.extend([(pair[1].0, pair[0].1), pair[1]]);
    }
    line.push((now, last));
    plot.line("a", &line);
    plot.name(Ink::First, "by layers");
    for (at, layers) in thinned(steps) {
        let says = format!("{} since {}", counted(layers, "layer"), utc(at as u64));
        plot.disc("hit a", plot.place(at, layers), 7.0, &[&says]);
    }
}

/// As many of them as can be pointed at, the last among them.
fn thinned(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    const POINTS_MAX: usize = 100;
    points.iter().rev().step_by(points.len().div_ceil(POINTS_MAX).max(1)).copied()
}

fn sharing(report: &Report) -> String {
    let lengths = report.chains.iter().map(|chain| f64::from(chain.layers));
    let shared = report.chains.iter().map(|chain| f64::from(chain.shared)).chain([0.0]);
    let x = Axis::counts("layers in the chain (log)", lengths);
    let y = Axis::counts("of them shared with another chain (log)", shared);
    let told = format!("A chain shares {} backing files at most.", count(report.summary.chain_shared.max));
    let mut plot = Plot::scatter("Chain sharing.", told, x, y);
    let (low, high) = (plot.axes().0.min().max(1.0), plot.axes().0.max().min(plot.axes().1.max() + 1.0));
    let most: Vec<_> = (0..=60)
        .map(|step| low * (high / low).max(1.0).powf(f64::from(step) / 60.0))
        .map(|layers| (layers, layers - 1.0))
        .collect();
    plot.line("guide", &most);
    let points = points(report.chains.iter(), |chain| (f64::from(chain.layers), f64::from(chain.shared)));
    let largest = scatter::draw(&mut plot, "a", "chain", points, |x, y, _| {
        format!("{}, {} shared", counted(x, "layer"), count(y))
    });
    plot.figure(&format!("Backing files that more than one disk stands on (the paper's Figure 8); the line is all but the active layer. {largest}"))
}

fn chains_of_layers(report: &Report) -> String {
    let depths = report.layers.iter().map(|layer| f64::from(layer.depth));
    let x = Axis::counts("place in the chain, 0 is the base (log)", depths.chain([0.0]));
    let y = Axis::counts(
        "chains the layer belongs to (log)",
        report.layers.iter().map(|layer| f64::from(layer.chains)),
    );
    let told = format!("A layer belongs to {} chains at most.", count(report.summary.layer_chains.max));
    let mut plot = Plot::scatter("Chains of a layer.", told, x, y);
    let points = report.layers.iter().map(|layer| Point {
        x: f64::from(layer.depth),
        y: f64::from(layer.chains),
        count: 1,
        name: &layer.path,
    });
    let largest = scatter::draw(&mut plot, "b", "layer", points, |x, y, _| {
        format!("at place {}, in {}", count(x), counted(y, "chain"))
    });
    plot.figure(&format!(
        "Base images stand at the left and high: every disk made from one adds a chain. {largest}"
    ))
}

fn snapshots(report: &Report) -> String {
    let snapshots = &report.snapshots;
    let positions = snapshots.points.iter().map(|point| f64::from(point.position));
    let x = Axis::counts("backing files once the snapshot was taken (log)", positions);
    let y = Axis::steps("time since the link before", WINDOWS.iter().map(|(_, name)| *name));
    let told = format!("{} snapshots with their time since the link before.", count(snapshots.dated as f64));
    let mut plot = Plot::scatter("Snapshot frequency.", told, x, y).alone();
    let total = snapshots.dated.max(1) as f64;
    let points = snapshots.points.iter().map(|point| Point {
        x: f64::from(point.position),
        y: point.window as f64,
        count: point.count,
        name: "",
    });
    let largest = scatter::draw(&mut plot, "a", "snapshot", points, |x, y, here| {
        let share = here as f64 * 100.0 / total;
        format!("place {}, {} ({share:.2} % of all)", count(x), WINDOWS[y as usize].1)
    });
    plot.figure(&format!("Snapshots by their place in the chain and the time since the link before (the paper's Figure 9). {largest}"))
}

fn memory(report: &Report) -> String {
    let quantity = Quantity {
        title: "Memory of a disk.",
        axis: bytes_axis,
        show: bytes,
        note: "At most, as modelled: stock QEMU with full caches; vmstrata's map of the disk with its layers' records.",
    };
    let ours =
        |chain: &Chain| chain.cost.map_memory_max + u64::from(chain.layers) * crate::model::OURS_LAYER_BYTES;
    cdf::figure(
        &quantity,
        vec![
            series(
                Ink::Second,
                "stock QEMU",
                report.chains.iter().map(|chain| chain.cost.stock_memory_max as f64),
            ),
            series(Ink::First, "vmstrata", report.chains.iter().map(|chain| ours(chain) as f64)),
        ],
    )
}

fn reads(report: &Report) -> String {
    let quantity = Quantity {
        title: "Reads per second of a disk.",
        axis: |values| Axis::counts("random reads of 4 KiB per second, QD 32 (log)", values.iter().copied()),
        show: |reads| format!("{} reads/s", count(reads)),
        note: "Expected from what was measured for chains of the same length: further to the right is faster.",
    };
    cdf::figure(
        &quantity,
        vec![
            series(Ink::Second, "stock QEMU", report.chains.iter().map(|chain| chain.cost.stock_reads_per_s)),
            series(Ink::First, "vmstrata", report.chains.iter().map(|chain| chain.cost.reads_per_s)),
        ],
    )
}
