//! What `--json` prints against `docs/survey.md`: every key is on the page, and nothing else is.

use std::collections::BTreeSet;

use crate::common::Tree;
use serde_json::Value;
use vmstrata_qcow2::SnapshotInfo;
use vmstrata_survey::{RiskKind, SurveyOptions, survey};

const PAGE: &str = include_str!("../../../docs/survey.md");

/// What the first column of the page's tables with this heading has in backticks.
fn first_column(heading: &str) -> BTreeSet<&'static str> {
    let mut names = BTreeSet::new();
    let mut is_wanted = false;
    for line in PAGE.lines() {
        let cell = line.strip_prefix("| ").and_then(|row| row.split(" |").next());
        match cell {
            Some(cell) if cell.starts_with('`') => {
                names.extend(cell.split('`').skip(1).step_by(2).filter(|_| is_wanted));
            }
            Some(cell) => is_wanted = cell == heading,
            None => {}
        }
    }
    names
}

/// The keys of all objects in it.
fn keys(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            into.insert(key.clone());
            keys(value, into);
        }),
        Value::Array(values) => values.iter().for_each(|value| keys(value, into)),
        _ => {}
    }
}

#[test]
fn every_key_is_on_the_page_and_each_on_the_page_is_there() {
    let tree = Tree::new();
    tree.quick("base.qcow2", None);
    // Later than the file below was made: one that seems older is left out.
    let taken_ns = 4_000_000_000_000_000_000;
    let taken = SnapshotInfo { name: "monday".into(), taken_ns, ..SnapshotInfo::default() };
    tree.quick_snapshot("disk.qcow2", Some("base.qcow2"), Some(taken));
    tree.overlay("lost.qcow2", "gone.qcow2");
    let report = survey(&SurveyOptions { deep: true, ..tree.options() }).expect("the root is there");
    let mut json = serde_json::to_value(&report).expect("JSON");
    // Named in words, as those of a summary's row.
    let sources = json["snapshots"]["sources"].as_object_mut().expect("an object");
    for source in std::mem::take(sources) {
        assert!(["metadata", "birth", "change"].contains(&source.0.as_str()), "{source:?}");
        assert!(PAGE.contains(&format!("`{}`", source.0)));
    }
    let mut printed = BTreeSet::new();
    keys(&json, &mut printed);
    // In the second column, beside the list that they are in.
    for inside in ["paths", "position", "window", "at"] {
        assert!(printed.remove(inside) && PAGE.contains(&format!("`{inside}`")), "{inside}");
    }
    assert_eq!(first_column("key"), printed.iter().map(String::as_str).collect());
}

#[test]
fn every_kind_of_risk_is_on_the_page_with_its_severity() {
    let kinds = RiskKind::ALL.map(RiskKind::name);
    assert_eq!(first_column("kind"), BTreeSet::from(kinds));
    for kind in RiskKind::ALL {
        let severity = serde_json::to_value(kind.severity()).expect("JSON");
        let row = format!("| `{}` | {} |", kind.name(), severity.as_str().expect("a name"));
        assert!(PAGE.contains(&row), "{row}");
    }
}
