//! One plot: a frame with axes, grid, legend and marks, as SVG.

use std::fmt::Write;

use super::axis::Axis;
use super::escape;

/// Size of the drawing, in its own units.
const WIDTH: f64 = 640.0;
const WIDTH_ALONE: f64 = 1320.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 108.0;
const RIGHT: f64 = 32.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 54.0;
/// Room between the axes and the discs of a scatter plot.
const INSET: f64 = 14.0;

/// Which of the page's colours a series has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ink {
    First,
    Second,
}

impl Ink {
    pub(super) fn class(self) -> &'static str {
        match self {
            Self::First => "a",
            Self::Second => "b",
        }
    }
}

/// A plot in the making.
#[derive(Debug)]
pub(super) struct Plot {
    title: &'static str,
    /// What it shows, in a sentence: for those who do not see it.
    told: String,
    x: Axis,
    y: Axis,
    width: f64,
    inset: f64,
    marks: String,
    legend: Vec<(Ink, &'static str)>,
}

impl Plot {
    /// A plot whose marks may touch its axes.
    pub(super) fn new(title: &'static str, told: String, x: Axis, y: Axis) -> Self {
        Self { title, told, x, y, width: WIDTH, inset: 0.0, marks: String::new(), legend: Vec::new() }
    }

    /// A plot with room for discs.
    pub(super) fn scatter(title: &'static str, told: String, x: Axis, y: Axis) -> Self {
        Self { inset: INSET, ..Self::new(title, told, x, y) }
    }

    /// As wide as two plots.
    pub(super) fn alone(self) -> Self {
        Self { width: WIDTH_ALONE, ..self }
    }

    /// Names a series; a plot with one needs no name.
    pub(super) fn name(&mut self, ink: Ink, name: &'static str) {
        self.legend.push((ink, name));
    }

    /// Where a point lies on the drawing.
    pub(super) fn place(&self, x: f64, y: f64) -> (f64, f64) {
        let width = self.width - LEFT - RIGHT - 2.0 * self.inset;
        let height = HEIGHT - TOP - BOTTOM - 2.0 * self.inset;
        let (left, bottom) = (LEFT + self.inset, HEIGHT - BOTTOM - self.inset);
        (left + self.x.place(x) * width, bottom - self.y.place(y) * height)
    }

    pub(super) fn axes(&self) -> (&Axis, &Axis) {
        (&self.x, &self.y)
    }

    /// Draws a line through points.
    pub(super) fn line(&mut self, class: &str, points: &[(f64, f64)]) {
        let mut path = String::new();
        for (at, (x, y)) in points.iter().enumerate() {
            let (x, y) = self.place(*x, *y);
            let _ = write!(path, "{}{x:.1} {y:.1}", if at == 0 { "M" } else { "L" });
        }
        let _ = writeln!(self.marks, "<path class=\"line {class}\" d=\"{path}\"/>");
    }

    /// Draws a disc at a place on the drawing, with the lines it says under the pointer.
    pub(super) fn disc(&mut self, class: &str, (x, y): (f64, f64), radius: f64, says: &[&str]) {
        let says = says.iter().map(|line| escape(line)).collect::<Vec<_>>().join("\n");
        let _ = writeln!(
            self.marks,
            "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\"><title>{says}</title></circle>"
        );
    }

    /// The figure, with `note` below it.
    pub(super) fn figure(&self, note: &str) -> String {
        format!(
            "<figure>\n<svg viewBox=\"0 0 {} {HEIGHT}\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{}\">\n\
             <title>{}</title>\n<desc>{}</desc>\n{}{}{}</svg>\n<figcaption><b>{}</b> {}</figcaption>\n</figure>\n",
            self.width,
            escape(&format!("{} {}", self.title, self.told)),
            escape(self.title),
            escape(&self.told),
            self.frame(),
            self.marks,
            self.legend(),
            escape(self.title),
            escape(note),
        )
    }

    fn frame(&self) -> String {
        let mut out = String::from("<g class=\"frame\" aria-hidden=\"true\">\n");
        let (bottom, right) = (HEIGHT - BOTTOM, self.width - RIGHT);
        for (value, label) in &self.x.ticks {
            let (x, _) = self.place(*value, self.y.min());
            let _ = writeln!(out, "<path d=\"M{x:.1} {TOP}V{bottom}\"/>");
            let _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                bottom + 18.0
            );
        }
        for (value, label) in &self.y.ticks {
            let (_, y) = self.place(self.x.min(), *value);
            let _ = writeln!(out, "<path d=\"M{LEFT} {y:.1}H{right}\"/>");
            let (x, y) = (LEFT - 8.0, y + 4.0);
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>");
        }
        let _ = writeln!(out, "<path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>");
        let middle = (LEFT + right) / 2.0;
        let _ = writeln!(
            out,
            "<text class=\"label\" x=\"{middle}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 12.0,
            self.x.label
        );
        let _ = writeln!(out, "<text class=\"label\" x=\"4\" y=\"16\">{}</text>\n</g>", self.y.label);
        out
    }

    fn legend(&self) -> String {
        let mut out = String::new();
        let mut x = self.width - RIGHT;
        for (ink, name) in self.legend.iter().rev() {
            let class = ink.class();
            let _ = writeln!(
                out,
                "<text class=\"label\" x=\"{x:.1}\" y=\"16\" text-anchor=\"end\">{name}</text>"
            );
            // About the width of the letters: the text is set by the reader's fonts.
            x -= name.chars().count() as f64 * 6.8 + 8.0;
            let _ = writeln!(out, "<path class=\"line {class}\" d=\"M{:.1} 12H{x:.1}\"/>", x - 22.0);
            x -= 40.0;
        }
        out
    }
}
