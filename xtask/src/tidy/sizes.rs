//! Lengths of files and functions. Unit tests at the end of a file do not count towards its length.

use std::ops::RangeInclusive;

use super::Source;
use super::lexer::Token;

/// What a length belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unit {
    /// A file without its unit tests.
    File,
    /// A function, from `fn` to its closing brace.
    Function,
}

impl Unit {
    /// More than a concept needs.
    const fn lines_max(self) -> usize {
        match self {
            Self::File => 800,
            Self::Function => 100,
        }
    }
}

/// One measured thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    /// File path, or `path::function`.
    pub name: String,
    /// What it is.
    pub unit: Unit,
    /// Its length.
    pub lines: usize,
}

/// Measures every file and function.
pub fn measure(sources: &[Source]) -> Vec<Size> {
    sources.iter().flat_map(measure_file).collect()
}

/// Everything that is too long.
pub fn judge(sizes: &[Size]) -> Vec<String> {
    let is_long = |size: &&Size| size.lines > size.unit.lines_max();
    let complaint = |Size { name, unit, lines }: &Size| {
        format!("{name}: {lines} lines, {} are allowed: split it", unit.lines_max())
    };
    sizes.iter().filter(is_long).map(complaint).collect()
}

fn measure_file(source: &Source) -> Vec<Size> {
    let test_mods = test_modules(&source.tokens);
    let test_lines: usize = test_mods.iter().map(|lines| lines.end() - lines.start() + 1).sum();
    let file =
        Size { name: source.path.clone(), unit: Unit::File, lines: source.text.lines().count() - test_lines };
    let function = |(name, lines): (String, RangeInclusive<usize>)| Size {
        name: format!("{}::{name}", source.path),
        unit: Unit::Function,
        lines: lines.end() - lines.start() + 1,
    };
    std::iter::once(file).chain(functions(&source.tokens).into_iter().map(function)).collect()
}

fn is(tokens: &[Token], at: usize, text: &str) -> bool {
    tokens.get(at).is_some_and(|token| token.text == text)
}

/// Lines of each `#[cfg(test)] mod name { ... }`, attribute included.
pub(super) fn test_modules(tokens: &[Token]) -> Vec<RangeInclusive<usize>> {
    const HEAD: [&str; 8] = ["#", "[", "cfg", "(", "test", ")", "]", "mod"];
    let begins = |at: &usize| HEAD.iter().enumerate().all(|(offset, text)| is(tokens, at + offset, text));
    let module = |at: usize| {
        let open = at + HEAD.len() + 1;
        is(tokens, open, "{").then(|| tokens[at].line..=closing_line(tokens, open))
    };
    (0..tokens.len()).filter(begins).filter_map(module).collect()
}

/// Name and lines of every function with a body.
fn functions(tokens: &[Token]) -> Vec<(String, RangeInclusive<usize>)> {
    let word = |at: usize| {
        tokens
            .get(at)
            .filter(|token| token.text.starts_with(|first: char| first == '_' || first.is_alphabetic()))
    };
    let function = |at: usize| {
        let name = word(at + 1)?;
        let open = body(tokens, at + 2)?;
        Some((name.text.clone(), tokens[at].line..=closing_line(tokens, open)))
    };
    (0..tokens.len()).filter(|at| is(tokens, *at, "fn")).filter_map(function).collect()
}

/// The `{` of a function whose signature goes on at `from`; `None` when it ends with `;`.
fn body(tokens: &[Token], from: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(from) {
        match token.text.as_str() {
            "(" | "[" => depth += 1,
            ")" | "]" => depth -= 1,
            "{" if depth == 0 => return Some(at),
            ";" if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Line of the brace that closes the one at `open`; the last line when it is missing.
fn closing_line(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for token in &tokens[open..] {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return token.line;
        }
    }
    tokens.last().map_or(1, |token| token.line)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//! x
fn short() -> [u8; 2] {
    [1, 2]
}
trait T {
    fn no_body(x: fn(u8) -> u8);
    fn with_body(&self) {
        if true { \"}\"; }
    }
}
#[cfg(test)]
mod tests {
    #[test]
    fn a_test() {
    }
}
";

    #[test]
    fn functions_with_bodies_are_measured_from_fn_to_brace() {
        let sizes = measure(&[Source::new("crates/a/src/lib.rs".into(), TEXT.into())]);
        let lines: Vec<_> = sizes.iter().map(|size| (size.name.as_str(), size.lines)).collect();
        assert_eq!(
            lines,
            [
                ("crates/a/src/lib.rs", 10),
                ("crates/a/src/lib.rs::short", 3),
                ("crates/a/src/lib.rs::with_body", 3),
                ("crates/a/src/lib.rs::a_test", 2),
            ]
        );
    }

    #[test]
    fn what_is_too_long_is_named_with_its_limit() {
        let size = |unit, lines| Size { name: "a.rs".into(), unit, lines };
        let sizes = [(Unit::File, 800), (Unit::Function, 100), (Unit::File, 801), (Unit::Function, 101)];
        let complaints = judge(&sizes.map(|(unit, lines)| size(unit, lines)));
        assert_eq!(
            complaints,
            ["a.rs: 801 lines, 800 are allowed: split it", "a.rs: 101 lines, 100 are allowed: split it"]
        );
    }
}
