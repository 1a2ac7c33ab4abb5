//! How long chains were before: by the layers that are there, and by what earlier surveys wrote down.

use crate::common::Tree;
use vmstrata_survey::history::HistoryError;
use vmstrata_survey::page;

/// A base, and `layers` more on it.
fn chain(layers: usize) -> Tree {
    let tree = Tree::new();
    tree.quick("0.qcow2", None);
    for layer in 1..=layers {
        tree.quick(&format!("{layer}.qcow2"), Some(&format!("{}.qcow2", layer - 1)));
    }
    tree
}

#[test]
fn the_layers_tell_how_the_longest_chain_has_grown() {
    let tree = chain(4);
    tree.quick("other.qcow2", Some("0.qcow2"));
    let report = tree.survey();
    let steps = &report.growth.by_layers;
    assert!(steps.is_sorted_by(|one, next| one.at < next.at && one.layers < next.layers), "{steps:?}");
    assert_eq!(steps.last().unwrap().layers, 5);
    assert!(steps.last().unwrap().at <= report.made_at);
    assert_eq!(report.growth.surveys.len(), 1, "this one");
    assert!(page::render(&report).contains("Longest chain over time."));
}

#[test]
fn surveys_of_one_tree_are_put_together_in_a_file() {
    let tree = chain(2);
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("history.jsonl");
    let mut first = tree.survey();
    first.continue_history(&file).unwrap();
    assert_eq!(first.growth.surveys.len(), 1);
    // Somebody else's tree, and one whose survey was killed as it wrote.
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("roots\":[\"", "roots\":[\"/other") + text.trim_end()).unwrap();
    tree.quick("3.qcow2", Some("2.qcow2"));
    let mut second = tree.survey();
    second.continue_history(&file).unwrap();
    let lengths: Vec<u32> = second.growth.surveys.iter().map(|survey| survey.longest_chain).collect();
    assert_eq!(lengths, [3, 4]);
    assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 3);
    let html = page::render(&second);
    assert!(html.contains("as surveys found it"), "{html}");
    // What no survey wrote is named, and nothing is added to it.
    std::fs::write(&file, format!("{text}precious\n")).unwrap();
    let refused = tree.survey().continue_history(&file).unwrap_err();
    assert!(matches!(refused, HistoryError::Line { line: 2, .. }), "{refused}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{text}precious\n"));
}
