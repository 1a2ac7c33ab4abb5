//! Size limits, and the list of what is above them: `xtask/tidy.toml`, which may only shrink.
//!
//! Shipped code stays within 300 lines a file and 40 a function. What is longer needs an entry with its exact
//! ceiling, and never passes 800 and 70. Tests have those upper limits only, and no entries.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, bail};

use super::sizes::{Role, Size, Unit};

/// Name and ceiling in lines of everything that is above its limit.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Exceptions {
    files: BTreeMap<String, usize>,
    functions: BTreeMap<String, usize>,
}

struct Limit {
    usual: usize,
    most: usize,
}

const fn limit(unit: Unit) -> Limit {
    match unit {
        Unit::File => Limit { usual: 300, most: 800 },
        Unit::Function => Limit { usual: 40, most: 70 },
    }
}

impl Exceptions {
    /// Reads the list: lines `"name" = lines` below `[files]` and `[functions]`.
    ///
    /// # Errors
    /// Any other line but comments.
    pub fn parse(text: &str) -> Result<Self> {
        let mut exceptions = Self::default();
        let mut unit = None;
        for (number, line) in (1..).zip(text.lines()) {
            match line.trim() {
                "" => {}
                "[files]" => unit = Some(Unit::File),
                "[functions]" => unit = Some(Unit::Function),
                comment if comment.starts_with('#') => {}
                entry => {
                    let (name, lines) =
                        parse_entry(entry).with_context(|| format!("tidy.toml:{number}: {entry}"))?;
                    let Some(unit) = unit else { bail!("tidy.toml:{number}: an entry outside a section") };
                    exceptions.of(unit).insert(name, lines);
                }
            }
        }
        Ok(exceptions)
    }

    fn of(&mut self, unit: Unit) -> &mut BTreeMap<String, usize> {
        match unit {
            Unit::File => &mut self.files,
            Unit::Function => &mut self.functions,
        }
    }

    fn ceiling(&self, unit: Unit, name: &str) -> Option<usize> {
        let map = match unit {
            Unit::File => &self.files,
            Unit::Function => &self.functions,
        };
        map.get(name).copied()
    }

    /// Everything too long, grown, or excepted without need.
    pub fn judge(&self, sizes: &[Size]) -> Vec<String> {
        let mut complaints: Vec<String> = sizes.iter().filter_map(|size| self.judge_one(size)).collect();
        for (unit, entries) in [(Unit::File, &self.files), (Unit::Function, &self.functions)] {
            for (name, ceiling) in entries {
                let longest = longest(sizes, unit, name);
                if longest <= limit(unit).usual {
                    complaints.push(format!("tidy.toml: {name} needs no exception any more: remove it"));
                } else if longest < *ceiling {
                    complaints
                        .push(format!("tidy.toml: {name} has shrunk to {longest} lines: lower {ceiling}"));
                }
            }
        }
        complaints
    }

    fn judge_one(&self, size: &Size) -> Option<String> {
        let Limit { usual, most } = limit(size.unit);
        let (name, lines) = (&size.name, size.lines);
        let allowed = match size.role {
            Role::Test => most,
            Role::Code => self.ceiling(size.unit, name).map_or(usual, |ceiling| ceiling.min(most)),
        };
        (lines > allowed).then(|| format!("{name}: {lines} lines, {allowed} are allowed: split it"))
    }

    /// The list for today's sizes: no entry grows or is added.
    pub fn shrink(&self, sizes: &[Size]) -> Self {
        let mut shrunk = Self::default();
        for (unit, entries) in [(Unit::File, &self.files), (Unit::Function, &self.functions)] {
            for (name, ceiling) in entries {
                let lines = longest(sizes, unit, name).min(*ceiling);
                if lines > limit(unit).usual {
                    shrunk.of(unit).insert(name.clone(), lines);
                }
            }
        }
        shrunk
    }

    /// The list as its file holds it.
    pub fn to_text(&self) -> String {
        let mut text = String::from(
            "# What is longer than 300 lines (files) or 40 (functions), with its ceiling. This list may only shrink:\n\
             # `cargo xtask tidy` fails when an entry has grown or is no longer needed; `--shrink` lowers entries.\n",
        );
        for (section, entries) in [("files", &self.files), ("functions", &self.functions)] {
            _ = write!(text, "\n[{section}]\n");
            entries.iter().for_each(|(name, lines)| _ = writeln!(text, "\"{name}\" = {lines}"));
        }
        text
    }
}

/// The longest of that name: methods of several types in one file may share it.
fn longest(sizes: &[Size], unit: Unit, name: &str) -> usize {
    let same = sizes.iter().filter(|size| size.unit == unit && size.role == Role::Code && size.name == name);
    same.map(|size| size.lines).max().unwrap_or(0)
}

fn parse_entry(entry: &str) -> Result<(String, usize)> {
    let (name, lines) = entry.split_once('=').context("expected \"name\" = lines")?;
    let name =
        name.trim().strip_prefix('"').and_then(|name| name.strip_suffix('"')).context("a quoted name")?;
    Ok((name.to_owned(), lines.trim().parse().context("a number of lines")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(name: &str, unit: Unit, role: Role, lines: usize) -> Size {
        Size { name: name.into(), unit, role, lines }
    }

    #[test]
    fn long_code_needs_an_exception_that_neither_grows_nor_outlives_its_need() {
        let sizes = |lines| [size("a.rs", Unit::File, Role::Code, lines)];
        let none = Exceptions::default();
        assert!(none.judge(&sizes(300)).is_empty());
        assert_eq!(none.judge(&sizes(301)).len(), 1);
        let some = Exceptions::parse("[files]\n\"a.rs\" = 400\n").unwrap();
        assert!(some.judge(&sizes(400)).is_empty());
        assert!(some.judge(&sizes(401))[0].contains("split it"), "grown");
        assert!(some.judge(&sizes(350))[0].contains("lower 400"), "shrunk");
        assert!(some.judge(&sizes(300))[0].contains("no exception"), "needless");
        assert!(some.judge(&[])[0].contains("no exception"), "gone");
    }

    #[test]
    fn no_exception_passes_the_upper_limit() {
        let some = Exceptions::parse("[functions]\n\"a.rs::f\" = 90\n").unwrap();
        assert!(!some.judge(&[size("a.rs::f", Unit::Function, Role::Code, 90)]).is_empty());
        assert!(Exceptions::default().judge(&[size("t.rs::f", Unit::Function, Role::Test, 70)]).is_empty());
        assert!(!Exceptions::default().judge(&[size("t.rs::f", Unit::Function, Role::Test, 71)]).is_empty());
    }

    #[test]
    fn shrinking_lowers_and_removes_but_never_adds_or_raises() {
        let list = Exceptions::parse("[files]\n\"a\" = 400\n\"b\" = 400\n\"c\" = 400\n").unwrap();
        let sizes = [
            size("a", Unit::File, Role::Code, 350),
            size("b", Unit::File, Role::Code, 200),
            size("c", Unit::File, Role::Code, 500),
            size("d", Unit::File, Role::Code, 600),
        ];
        let shrunk = list.shrink(&sizes);
        assert_eq!(shrunk, Exceptions::parse("[files]\n\"a\" = 350\n\"c\" = 400\n").unwrap());
        assert_eq!(Exceptions::parse(&shrunk.to_text()).unwrap(), shrunk);
    }

    #[test]
    fn a_damaged_list_is_refused_with_its_line() {
        let error = Exceptions::parse("[files]\na.rs = 4\n").unwrap_err();
        assert!(format!("{error:#}").contains("tidy.toml:2"), "{error:#}");
        assert!(Exceptions::parse("\"a\" = 4\n").is_err());
    }
}
