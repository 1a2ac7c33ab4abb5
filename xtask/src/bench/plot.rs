//! The picture of a measurement: random reads and memory over chain length, both axes logarithmic.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::prelude::*;

use super::results::{Figure, Results};
use super::server::Kind;

const SIZE: (u32, u32) = (960, 400);
const QEMU: RGBColor = RGBColor(0xc4, 0x4e, 0x52);
const VMSTRATA: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const FLOOR: RGBColor = RGBColor(0x77, 0x77, 0x77);

struct Panel {
    title: &'static str,
    figure: Figure,
    servers: &'static [Kind],
}

const PANELS: [Panel; 2] = [
    Panel {
        title: "4 KiB random read, QD32 (IOPS)",
        figure: Figure::RandomRead32,
        servers: &[Kind::Qemu, Kind::Vmstrata, Kind::Floor],
    },
    Panel { title: "resident memory (MiB)", figure: Figure::Memory, servers: &[Kind::Qemu, Kind::Vmstrata] },
];

/// Draws `results` into an SVG file.
///
/// # Errors
/// When there is nothing to draw or the file cannot be written.
pub fn draw(results: &Results, path: &Path) -> Result<()> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    for (panel, area) in PANELS.iter().zip(area.split_evenly((1, 2))) {
        draw_panel(results, panel, &area).with_context(|| panel.title)?;
    }
    area.present()?;
    Ok(())
}

fn draw_panel(
    results: &Results,
    panel: &Panel,
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
) -> Result<()> {
    let lines: Vec<_> =
        panel.servers.iter().map(|kind| (*kind, line(results, panel.figure, *kind))).collect();
    let points = || lines.iter().flat_map(|(_, line)| line.iter());
    let longest = points().map(|point| point.0).max().context("no samples")?.max(2);
    let lowest = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d(
            (1u32..longest + longest / 5).log_scale(),
            (lowest / 2.0..highest * 2.0).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("layers in the chain")
        .x_label_formatter(&|layers| layers.to_string())
        .y_label_formatter(&|value| compact(*value))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (kind, line) in lines.into_iter().filter(|(_, line)| !line.is_empty()) {
        draw_line(&mut chart, kind, line, longest)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(FLOOR)
        .draw()?;
    Ok(())
}

type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::combinators::LogCoord<u32>, plotters::coord::combinators::LogCoord<f64>>,
>;

fn draw_line(chart: &mut Chart<'_, '_>, kind: Kind, line: Vec<(u32, f64)>, longest: u32) -> Result<()> {
    let color = match kind {
        Kind::Qemu => QEMU,
        Kind::Vmstrata => VMSTRATA,
        Kind::Floor => FLOOR,
    };
    let style = color.stroke_width(if kind == Kind::Floor { 1 } else { 3 });
    // The floor has no chain: a level line.
    let line: Vec<_> = match line[..] {
        [(0, value)] => vec![(1, value), (longest, value)],
        _ => line,
    };
    chart
        .draw_series(LineSeries::new(line.clone(), style))?
        .label(kind.label())
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    if kind != Kind::Floor {
        chart.draw_series(line.into_iter().map(|point| Circle::new(point, 4, color.filled())))?;
    }
    Ok(())
}

fn line(results: &Results, figure: Figure, kind: Kind) -> Vec<(u32, f64)> {
    let same = |cell: &&super::results::Cell| cell.figure == figure && cell.server == kind;
    results.cells.iter().filter(same).map(|cell| (cell.layers, cell.median)).collect()
}

fn compact(value: f64) -> String {
    match value {
        big if big >= 1e6 => format!("{:.0}M", big / 1e6),
        big if big >= 1e3 => format!("{:.0}k", big / 1e3),
        small => format!("{small:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_a_line_for_each_server_and_both_panels() {
        let file = tempfile::NamedTempFile::new().unwrap();
        draw(&crate::bench::results::example(), file.path()).unwrap();
        let svg = std::fs::read_to_string(file.path()).unwrap();
        for text in ["QEMU", "vmstrata", "floor", PANELS[0].title, PANELS[1].title] {
            assert!(svg.contains(text), "{text} is missing");
        }
        let lines = svg.matches("<polyline").count();
        assert!(lines >= 5, "{lines} lines for five series");
    }

    #[test]
    fn nothing_measured_is_an_error_and_no_empty_plot() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut results = crate::bench::results::example();
        results.cells.clear();
        assert!(draw(&results, file.path()).is_err());
    }
}
