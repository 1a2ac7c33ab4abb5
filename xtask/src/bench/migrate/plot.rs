//! The picture of the study: the paper's figures 5 to 7, ours beside its means.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::prelude::*;

use super::study::Table;

const SIZE: (u32, u32) = (1200, 380);
const PANELS: [&str; 3] = ["Figure 5", "Figure 6", "Figure 7"];
const GUEST: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const MOVE: RGBColor = RGBColor(0xc4, 0x4e, 0x52);

/// Draws the tables into an SVG file.
///
/// # Errors
/// When a figure is missing, or the file cannot be written.
pub(super) fn draw(tables: &[Table], path: &Path) -> Result<()> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    for (name, area) in PANELS.iter().zip(area.split_evenly((1, 3))) {
        let table = tables.iter().find(|table| table.title.starts_with(name)).context(*name)?;
        panel(table, &area).with_context(|| table.title.clone())?;
    }
    area.present()?;
    Ok(())
}

fn panel(table: &Table, area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<()> {
    let last = table.columns.len() - 1;
    let mut chart = ChartBuilder::on(area)
        .caption(&table.title, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..last as f64, 0.0..1.2)?;
    let column = |at: &f64| table.columns.get(at.round() as usize).cloned().unwrap_or_default();
    let mut mesh = chart.configure_mesh();
    mesh.x_labels(table.columns.len()).x_label_formatter(&column).light_line_style(TRANSPARENT).draw()?;
    let lines = table
        .lines
        .iter()
        .filter(|line| line.0.contains("guest") || line.0.contains("move's") || line.0.contains("move,"));
    for (name, values) in lines {
        let color = if name.contains("guest") { GUEST } else { MOVE };
        let style = color.stroke_width(if name.starts_with("paper") { 1 } else { 3 });
        let points = values.iter().enumerate().filter_map(|(at, value)| Some((at as f64, (*value)?)));
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_both_lines_beside_the_papers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut tables: Vec<Table> = PANELS.iter().map(|title| Table::new(title, &["1", "2"])).collect();
        for table in &mut tables {
            for name in [
                "guest's response / standard",
                "paper: guest, mean",
                "move's response / standard",
                "paper: move, mean",
            ] {
                table.add(name, &[0.5, 0.6]);
            }
        }
        draw(&tables, file.path()).unwrap();
        let svg = std::fs::read_to_string(file.path()).unwrap();
        assert!(PANELS.iter().all(|title| svg.contains(title)));
        assert!(svg.matches("<polyline").count() >= 12);
        assert!(draw(&tables[1..], file.path()).is_err(), "a figure that is missing is an error");
    }
}
