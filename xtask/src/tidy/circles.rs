//! Modules of a crate do not import each other in circles.
//!
//! A crate's modules are its top-level ones; a file counts as part of the module whose directory it lies in. Of an import
//! only `crate::module` is looked at, and only in shipped code: tests may use what they test.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;
use super::lexer::Token;

/// Modules that are in a circle still, by crate: the list may only shrink.
const EXCEPTIONS: &[(&str, &[&str])] =
    &[("qcow2", &["header", "snapshot"]), ("survey", &["history", "report"])];

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Every circle that is no exception, and every exception that is no circle.
pub fn check(sources: &[Source]) -> Vec<String> {
    judge(&graphs(sources), EXCEPTIONS)
}

fn judge(graphs: &BTreeMap<String, Graph>, exceptions: &[(&str, &[&str])]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, graph) in graphs {
        let allowed = exceptions.iter().find(|(of, _)| of == name).map_or(&[][..], |(_, modules)| modules);
        let found: BTreeSet<&str> = circles(graph).into_iter().flatten().collect();
        for module in found.iter().filter(|module| !allowed.contains(module)) {
            complaints.push(format!(
                "crates/{name}/src: the module `{module}` is in a circle of imports: move what both sides need below them"
            ));
        }
        for module in allowed.iter().filter(|module| !found.contains(**module)) {
            complaints.push(format!(
                "xtask/src/tidy/circles.rs: `{module}` of {name} is in no circle any more: take it off the list"
            ));
        }
    }
    complaints
}

/// Which module of a crate imports which, crate by crate.
fn graphs(sources: &[Source]) -> BTreeMap<String, Graph> {
    let mut graphs: BTreeMap<String, Graph> = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.is_test()) {
        let Some((name, file)) = place(&source.path) else { continue };
        let module = file.split('/').next().unwrap_or(file).trim_end_matches(".rs");
        if !matches!(module, "lib" | "main") {
            let imports = graphs.entry(name.to_owned()).or_default().entry(module.to_owned()).or_default();
            imports.extend(imported(shipped(&source.tokens)).filter(|other| other != module));
        }
    }
    for graph in graphs.values_mut() {
        let modules: BTreeSet<String> = graph.keys().cloned().collect();
        graph.values_mut().for_each(|imports| imports.retain(|import| modules.contains(import)));
    }
    graphs
}

/// The crate and the file in it of `crates/NAME/src/FILE`.
fn place(path: &str) -> Option<(&str, &str)> {
    path.strip_prefix("crates/")?.split_once("/src/")
}

/// What comes before `#[cfg(test)]`.
fn shipped(tokens: &[Token]) -> &[Token] {
    let test = ["cfg", "(", "test", ")"];
    let is_test = |window: &[Token]| window.iter().map(|token| &*token.text).eq(test);
    &tokens[..tokens.windows(test.len()).position(is_test).unwrap_or(tokens.len())]
}

/// The modules that `crate::` leads to.
fn imported(tokens: &[Token]) -> impl Iterator<Item = String> + '_ {
    let starts = tokens
        .windows(4)
        .enumerate()
        .filter(|(_, window)| window[..3].iter().map(|token| &*token.text).eq(["crate", ":", ":"]));
    starts.flat_map(|(at, window)| {
        if window[3].text != "{" {
            return vec![window[3].text.clone()];
        }
        // The first word of each part of the group.
        let (mut depth, mut is_first, mut found) = (0, false, Vec::new());
        for token in &tokens[at + 3..] {
            match &*token.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                "," => is_first = depth == 1,
                word if is_first || depth == 1 && found.is_empty() => {
                    found.push(word.to_owned());
                    is_first = false;
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
        found
    })
}

/// The sets of modules that reach each other, of more than one.
fn circles(graph: &Graph) -> Vec<BTreeSet<&str>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|from| (&**from, reached(graph, from))).collect();
    let mut circles: Vec<BTreeSet<&str>> = Vec::new();
    for (module, to) in &reach {
        let circle: BTreeSet<&str> =
            to.iter().copied().filter(|other| reach[other].contains(module)).collect();
        if circle.len() > 1 && !circles.contains(&circle) {
            circles.push(circle);
        }
    }
    circles
}

/// All modules that `from` imports, and those that they import in turn.
fn reached<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        for next in graph.get(module).into_iter().flatten() {
            if reached.insert(&**next) {
                open.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source::new(format!("crates/a/src/{path}"), text.to_owned())
    }

    #[test]
    fn a_circle_is_found_through_any_number_of_modules_and_forms_of_import() {
        let sources = [
            source("one.rs", "use crate::two::Two;"),
            source("two/deep.rs", "use crate::{error::Error, three::{self, Three}};"),
            source("three.rs", "fn f() { crate::one::call() }"),
            source("error.rs", "#[cfg(test)] mod tests { use crate::one; }"),
        ];
        let complaints = judge(&graphs(&sources), &[]);
        let named =
            |module: &str| complaints.iter().any(|complaint| complaint.contains(&format!("`{module}`")));
        assert!(named("one") && named("two") && named("three") && !named("error"), "{complaints:?}");
        assert_eq!(judge(&graphs(&sources), &[("a", &["one", "two", "three"])]), Vec::<String>::new());
    }

    #[test]
    fn an_exception_that_is_none_is_named() {
        let sources = [source("one.rs", "use crate::two::Two;"), source("two.rs", "")];
        let complaints = judge(&graphs(&sources), &[("a", &["one"])]);
        assert!(matches!(&complaints[..], [only] if only.contains("take it off the list")), "{complaints:?}");
    }
}
