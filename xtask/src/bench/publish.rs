//! Where a measurement is kept: `docs/measurements/chain.json`, the plot beside it, and the README's table.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::results::Results;
use super::{plot, table};

/// Writes `docs/measurements/chain.json`, the plot beside it, and the README's table.
///
/// # Errors
/// When a file cannot be written or the README has no place for the table.
pub fn write(root: &Path, results: &Results) -> Result<()> {
    let dir = root.join("docs/measurements");
    fs::create_dir_all(&dir)?;
    let mut json = serde_json::to_string_pretty(results)?;
    json.push('\n');
    fs::write(dir.join("chain.json"), json)?;
    plot::draw(results, &dir.join("chain.svg"))?;
    let readme = root.join("README.md");
    let text = fs::read_to_string(&readme).context("README.md")?;
    fs::write(&readme, table::insert(&text, &table::markdown(results))?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_agrees_with_itself() {
        let root = tempfile::tempdir().unwrap();
        let readme = root.path().join("README.md");
        fs::write(&readme, format!("# x\n{}\n{}\n", table::BEGIN, table::END)).unwrap();
        let results = super::super::results::example();
        write(root.path(), &results).unwrap();
        let json = fs::read(root.path().join("docs/measurements/chain.json")).unwrap();
        let read: Results = serde_json::from_slice(&json).unwrap();
        let text = fs::read_to_string(&readme).unwrap();
        assert_eq!(table::insert(&text, &table::markdown(&read)).unwrap(), text, "tidy would complain");
        assert!(root.path().join("docs/measurements/chain.svg").is_file());
    }
}
