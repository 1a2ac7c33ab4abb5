//! Where seeds lie: `fuzz/seeds/<body>/`, inputs made by stock tools and inputs that once broke something.

use std::path::PathBuf;

/// The seeds of a body, in the order of their names.
pub fn of(name: &str) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> =
        std::fs::read_dir(directory(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// The directory of a body's seeds.
pub fn directory(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../seeds")).join(name)
}
