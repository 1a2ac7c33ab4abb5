//! Where the chains' measurement is kept: `docs/measurements/chain.json`, the plot beside it, and the tables that show it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::results::Results;
use super::shown::{Blocks, Shown};
use super::{plot, table};

/// Where chains are shown.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/chain.json",
    summary: "README.md",
    page: "docs/measurements/chain.md",
    mark: "bench:chain",
};

/// Writes `docs/measurements/chain.json`, the plot beside it, and the tables.
///
/// # Errors
/// When a file cannot be written or has no place for a table.
pub fn write(root: &Path, results: &Results) -> Result<()> {
    let dir = root.join("docs/measurements");
    fs::create_dir_all(&dir)?;
    let mut json = serde_json::to_string_pretty(results)?;
    json.push('\n');
    fs::write(dir.join("chain.json"), json)?;
    plot::draw(results, &dir.join("chain.svg"))?;
    SHOWN.write(root, &table::blocks(results))
}

/// Everything that was measured, as tables.
pub(super) fn markdown(results: &Results) -> String {
    table::blocks(results).whole
}

/// What is kept; nothing while nothing was measured.
///
/// # Errors
/// When the file is none of a measurement.
pub fn kept(root: &Path) -> Result<Option<Results>> {
    let file = root.join(SHOWN.file);
    if !file.is_file() {
        return Ok(None);
    }
    serde_json::from_slice(&fs::read(&file)?).map(Some).context(SHOWN.file)
}

/// The tables of what is kept.
///
/// # Errors
/// As for [`kept`].
pub fn blocks(root: &Path) -> Result<Option<Blocks>> {
    Ok(kept(root)?.as_ref().map(table::blocks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_agrees_with_itself() {
        let root = tempfile::tempdir().unwrap();
        assert!(blocks(root.path()).unwrap().is_none(), "nothing measured yet");
        fs::create_dir_all(root.path().join("docs/measurements")).unwrap();
        for file in [SHOWN.summary, SHOWN.page] {
            fs::write(root.path().join(file), "# x\n<!-- bench:chain -->\n<!-- /bench:chain -->\n").unwrap();
        }
        write(root.path(), &super::super::results::example()).unwrap();
        let read = blocks(root.path()).unwrap().expect("a measurement");
        assert_eq!(SHOWN.stale(root.path(), &read).unwrap(), None, "tidy would complain");
        assert!(root.path().join("docs/measurements/chain.svg").is_file());
    }
}
