//! Where a measurement is shown: what matters most on the page that users read, all of it on a page in `docs/measurements`.
//!
//! Both hold a block between two marker lines that is a function of the measurement's JSON file; `cargo xtask tidy`
//! fails when one says anything else.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// The two blocks of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The measurement, from the repository's root.
    pub file: &'static str,
    /// The page with what matters most.
    pub summary: &'static str,
    /// The page with everything.
    pub page: &'static str,
    /// The word in the comments before and after the block.
    pub mark: &'static str,
}

/// The text of both blocks, markers not included.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// For the summary.
    pub short: String,
    /// For the page.
    pub whole: String,
}

impl Shown {
    /// Writes both blocks.
    ///
    /// # Errors
    /// When a file cannot be read or written, or has no place for the block.
    pub fn write(&self, root: &Path, blocks: &Blocks) -> Result<()> {
        for (name, block) in self.files(blocks) {
            let path = root.join(name);
            let text = fs::read_to_string(&path).with_context(|| name.to_owned())?;
            fs::write(&path, self.insert(name, &text, block)?).with_context(|| name.to_owned())?;
        }
        Ok(())
    }

    /// The first file whose block is not this one.
    ///
    /// # Errors
    /// When a file cannot be read or has no place for the block.
    pub fn stale(&self, root: &Path, blocks: &Blocks) -> Result<Option<&'static str>> {
        for (name, block) in self.files(blocks) {
            let text = fs::read_to_string(root.join(name)).with_context(|| name.to_owned())?;
            if self.insert(name, &text, block)? != text {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    fn files<'a>(&self, blocks: &'a Blocks) -> [(&'static str, &'a str); 2] {
        [(self.summary, &blocks.short), (self.page, &blocks.whole)]
    }

    /// `text` with what is between the marker lines replaced.
    fn insert(&self, name: &str, text: &str, block: &str) -> Result<String> {
        let (begin, end) = (format!("<!-- {} -->", self.mark), format!("<!-- /{} -->", self.mark));
        let (before, rest) = text.split_once(&begin).with_context(|| format!("{name}: no line {begin}"))?;
        let (_, after) =
            rest.split_once(&end).with_context(|| format!("{name}: no line {end} after {begin}"))?;
        Ok(format!("{before}{begin}\n\n{}\n\n{end}{after}", block.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: Shown = Shown { file: "x.json", summary: "README.md", page: "x.md", mark: "bench:x" };

    #[test]
    fn both_blocks_are_replaced_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        let old = "head\n<!-- bench:x -->\nold\n<!-- /bench:x -->\ntail\n";
        fs::write(path("README.md"), old).unwrap();
        let blocks = Blocks { short: "| a |\n".into(), whole: "| a |\n| b |\n".into() };
        assert!(SHOWN.write(root.path(), &blocks).unwrap_err().to_string().contains("x.md"));
        fs::write(path("x.md"), old).unwrap();
        assert_eq!(SHOWN.stale(root.path(), &blocks).unwrap(), Some("x.md"));
        SHOWN.write(root.path(), &blocks).unwrap();
        assert_eq!(SHOWN.stale(root.path(), &blocks).unwrap(), None);
        let text = fs::read_to_string(path("x.md")).unwrap();
        assert_eq!(text, "head\n<!-- bench:x -->\n\n| a |\n| b |\n\n<!-- /bench:x -->\ntail\n");
    }

    #[test]
    fn a_file_without_a_place_for_it_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("README.md"), "no markers").unwrap();
        let blocks = Blocks { short: String::new(), whole: String::new() };
        assert!(SHOWN.stale(root.path(), &blocks).is_err());
    }
}
