//! Rules about the sources that the compiler does not check.
//!
//! ```text
//!   git's files ──► lexer (tokens without comments and strings) ──► sizes, unsafe, docs ──┐
//!   cargo metadata ──► layers (who may depend on whom) ──────────────────────────────────┼──► complaints
//!   docs/measurements/*.json ──► tables in README and docs ──────────────────────────────┘
//! ```
//!
//! A rule reports every offence it finds, each as one line with the place and what to do.

pub mod circles;
pub mod layers;
pub mod lexer;
pub mod seam;
pub mod sizes;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::bench::{
    convert, fragmented, fresh, fuse, history, memory, migrate, moving, publish, rocksdb, tier,
};
use lexer::{Token, tokens};

/// One Rust source file.
#[derive(Debug)]
pub struct Source {
    /// Path from the root of the repository.
    pub path: String,
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
}

impl Source {
    /// Reads a source from its text.
    pub fn new(path: String, text: String) -> Self {
        let tokens = tokens(&text);
        Self { path, text, tokens }
    }

    /// Whether the whole file is tests (or benches, examples), and not shipped.
    pub fn is_test(&self) -> bool {
        ["tests/", "benches/", "examples/"].iter().any(|dir| self.path.contains(&format!("/{dir}")))
            || self.path.ends_with("/tests.rs")
    }
}

/// Where `unsafe` may stand: rings and aligned buffers, guest memory, the benchmark's use of libblkio and of mappings,
/// and the simulation's system calls.
const UNSAFE_ALLOWED: [&str; 6] = [
    "crates/store/",
    "crates/export/",
    "crates/memory/",
    "xtask/src/bench/cached.rs",
    "xtask/src/bench/client.rs",
    "sim/src/",
];

/// Checks the repository at `root`; returns the complaints.
///
/// # Errors
/// When files cannot be read or git and cargo do not run.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let sources = sources(root)?;
    let mut complaints = layers::check(&layers::read(root)?);
    complaints.extend(sources.iter().filter_map(missing_docs));
    complaints.extend(sources.iter().filter_map(forbidden_unsafe));
    complaints.extend(unrun_tests(&sources));
    complaints.extend(circles::check(&sources));
    complaints.extend(sources.iter().flat_map(seam::check));
    complaints.extend(sizes::judge(&sizes::measure(&sources)));
    complaints.extend(stale_tables(root)?);
    Ok(complaints)
}

/// All Rust files git knows or would add, so that build output and other checkouts stay out.
fn sources(root: &Path) -> Result<Vec<Source>> {
    let list = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.rs"])
        .current_dir(root)
        .output()
        .context("git does not run")?;
    ensure!(list.status.success(), "git ls-files: {}", String::from_utf8_lossy(&list.stderr));
    let names = String::from_utf8(list.stdout)?;
    let existing = names.split_terminator('\0').filter(|name| root.join(name).is_file());
    let read = |name: &str| -> Result<Source> {
        let text = fs::read_to_string(root.join(PathBuf::from(name))).with_context(|| name.to_owned())?;
        Ok(Source::new(name.to_owned(), text))
    };
    existing.map(read).collect()
}

/// `tests.rs`, the unit tests of the module beside it, needs no words of its own.
fn missing_docs(source: &Source) -> Option<String> {
    if source.path.ends_with("/tests.rs") {
        return None;
    }
    let documented = source.text.lines().find(|line| !line.trim().is_empty() && !line.starts_with("#!["));
    let documented = documented.is_some_and(|line| line.starts_with("//!"));
    (!documented).then(|| format!("{}:1: begin with `//!`: what the module is for", source.path))
}

/// Tests may hand buffers to asynchronous queues, which is unsafe; what ships may not.
fn forbidden_unsafe(source: &Source) -> Option<String> {
    if source.is_test() || UNSAFE_ALLOWED.iter().any(|allowed| source.path.starts_with(allowed)) {
        return None;
    }
    let token = source.tokens.iter().find(|token| token.text == "unsafe")?;
    Some(format!("{}:{}: `unsafe` belongs into the crates store, export and memory", source.path, token.line))
}

/// Files in a crate's `tests` that its one test binary, `main.rs`, does not name.
fn unrun_tests(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for main in sources {
        let Some(dir) = main.path.strip_suffix("tests/main.rs") else { continue };
        for source in sources {
            let name = source
                .path
                .strip_prefix(dir)
                .and_then(|name| name.strip_prefix("tests/")?.strip_suffix(".rs"));
            let Some(name) = name.filter(|name| *name != "main" && !name.contains('/')) else { continue };
            let is_named =
                |three: &[Token]| three[0].text == "mod" && three[1].text == name && three[2].text == ";";
            if !main.tokens.windows(3).any(is_named) {
                complaints.push(format!("{}:1: no test of it runs: name it in {}", source.path, main.path));
            }
        }
    }
    complaints
}

/// Tables that are not what `docs/measurements` has.
fn stale_tables(root: &Path) -> Result<Vec<String>> {
    let measured = [
        (publish::SHOWN, publish::blocks(root)?),
        (convert::SHOWN, convert::SHOWN.of_report(root)?),
        (fragmented::SHOWN, fragmented::SHOWN.of_report(root)?),
        (fresh::SHOWN, fresh::SHOWN.of_report(root)?),
        (fuse::SHOWN, fuse::SHOWN.of_report(root)?),
        (history::SHOWN, history::SHOWN.of_report(root)?),
        (memory::SHOWN, memory::SHOWN.of_report(root)?),
        (rocksdb::SHOWN, rocksdb::SHOWN.of_report(root)?),
        (migrate::SHOWN, migrate::blocks(root)?),
        (migrate::REAL, migrate::REAL.of_report(root)?),
        (moving::SHOWN, moving::SHOWN.of_report(root)?),
        (tier::SHOWN, tier::SHOWN.of_report(root)?),
    ];
    let mut complaints = Vec::new();
    for (shown, blocks) in measured {
        if let Some(name) = blocks.map(|blocks| shown.stale(root, &blocks)).transpose()?.flatten() {
            complaints.push(format!("{name}: a table is not {}: cargo xtask bench render", shown.file));
        }
    }
    Ok(complaints)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source::new(path.into(), text.into())
    }

    #[test]
    fn unsafe_is_found_in_code_and_only_there() {
        let plain = "//! x\n// unsafe\nconst A: &str = \"unsafe\";\n#![forbid(unsafe_code)]\n";
        assert_eq!(forbidden_unsafe(&source("crates/disk/src/a.rs", plain)), None);
        let code = source("crates/disk/src/a.rs", "//! x\nfn a() {\n    unsafe { b() }\n}\n");
        assert!(forbidden_unsafe(&code).unwrap().starts_with("crates/disk/src/a.rs:3"));
        assert_eq!(forbidden_unsafe(&source("crates/store/src/a.rs", &code.text)), None);
    }

    #[test]
    fn a_file_of_tests_that_nothing_names_is_found() {
        let sources = [
            source("crates/a/tests/main.rs", "//! x\nmod named;\n// mod lost;\n"),
            source("crates/a/tests/named.rs", ""),
            source("crates/a/tests/lost.rs", ""),
            source("crates/a/tests/named/deeper.rs", ""),
            source("crates/b/tests/other.rs", ""),
        ];
        let found = unrun_tests(&sources);
        assert!(found.len() == 1 && found[0].starts_with("crates/a/tests/lost.rs"), "{found:?}");
    }

    #[test]
    fn a_module_begins_with_its_documentation() {
        assert_eq!(missing_docs(&source("a.rs", "//! Does.\n")), None);
        assert_eq!(missing_docs(&source("a.rs", "#![allow(x)]\n//! Does.\n")), None);
        assert!(missing_docs(&source("a.rs", "// Does.\nuse a;\n")).is_some());
        assert!(missing_docs(&source("a.rs", "")).is_some());
    }
}
