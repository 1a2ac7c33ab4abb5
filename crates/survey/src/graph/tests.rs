use vmstrata_disk::Format;

use super::*;
use crate::image::Below;
use crate::image::tests::{qcow2_image, raw_image};

fn found(images: Vec<Image>) -> Found {
    let mut found = Found::default();
    images.into_iter().for_each(|image| found.add(image));
    found.put_in_order();
    found
}

fn stack_of(graph: &Graph<'_>, name: &str) -> (Stack, u32) {
    let at = graph.images.iter().position(|image| image.path.ends_with(name)).expect("there");
    (graph.stacks[at], graph.chains[at])
}

fn kinds(graph: &Graph<'_>) -> Vec<(String, RiskKind)> {
    let name = |at: usize| graph.images[at].path.display().to_string();
    graph.risks.iter().map(|risk| (name(risk.image), risk.fault.kind)).collect()
}

#[test]
fn shared_layers_are_counted_for_each_chain_and_gathered_once() {
    // a and b on mid on base; c on base; alone.
    let found = found(vec![
        qcow2_image("a", Some("mid")),
        qcow2_image("b", Some("mid")),
        qcow2_image("c", Some("base")),
        qcow2_image("mid", Some("base")),
        raw_image("alone"),
        qcow2_image("base", None),
    ]);
    let graph = Graph::new(&found, 200);
    assert_eq!(graph.tops.len(), 4);
    let expected = [("a", 3, 2, 1), ("c", 2, 1, 1), ("mid", 2, 2, 2), ("base", 1, 1, 3), ("alone", 1, 0, 1)];
    for (name, layers, shared, chains) in expected {
        let (stack, belongs_to) = stack_of(&graph, name);
        assert_eq!((stack.layers, stack.shared, belongs_to), (layers, shared, chains), "{name}");
        assert_eq!(stack.allocated, u64::from(layers) << 20, "{name}");
    }
    assert!(graph.risks.is_empty(), "{:?}", graph.risks);
}

#[test]
fn a_loop_is_one_chain_and_every_chain_into_it_is_broken() {
    let ring = |name, below| qcow2_image(name, Some(below));
    let lonely = found(vec![ring("x", "y"), ring("y", "z"), ring("z", "x"), ring("self", "self")]);
    let graph = Graph::new(&lonely, 200);
    assert_eq!(graph.tops.len(), 2, "one for each loop");
    assert_eq!(stack_of(&graph, "x").0.layers, 3);
    assert_eq!(stack_of(&graph, "self").0.layers, 1);
    assert_eq!(kinds(&graph).len(), 4);

    let entered = found(vec![ring("a", "x"), ring("b", "y"), ring("x", "y"), ring("y", "x")]);
    let graph = Graph::new(&entered, 200);
    assert_eq!(graph.tops.len(), 2);
    for name in ["a", "b"] {
        let (stack, _) = stack_of(&graph, name);
        assert_eq!(
            (stack.layers, stack.risks.kinds().collect::<Vec<_>>()),
            (3, vec![RiskKind::Loop]),
            "{name}"
        );
    }
    assert_eq!(stack_of(&graph, "x").1, 2);
}

#[test]
fn a_header_that_a_guest_wrote_into_its_raw_disk_is_no_link() {
    let as_raw = Some(Below::File(raw_image("disk.raw").id, Some(Format::Raw)));
    let mut overlay = qcow2_image("top", None);
    overlay.qcow2.as_mut().unwrap().below = as_raw;
    // The "raw" disk claims to stand on someone's image.
    let found = found(vec![overlay, qcow2_image("disk.raw", Some("victim")), qcow2_image("victim", None)]);
    let graph = Graph::new(&found, 200);
    assert_eq!(stack_of(&graph, "top").0.layers, 2);
    assert_eq!(stack_of(&graph, "victim").1, 1);
    assert_eq!(graph.tops.len(), 2);
}

#[test]
fn a_raw_file_in_the_place_of_a_qcow2_layer_is_corrupt() {
    let found = found(vec![qcow2_image("top", Some("base")), raw_image("base")]);
    let graph = Graph::new(&found, 200);
    assert_eq!(kinds(&graph), [("top".to_owned(), RiskKind::Corrupt)]);
}

#[test]
fn long_chains_are_told_at_and_past_the_edge() {
    let name = |at: usize| format!("{at:06}");
    let chain = |layers: usize| {
        let below = |at: usize| at.checked_sub(1).map(name);
        found((0..layers).map(|at| qcow2_image(&name(at), below(at).as_deref())).collect())
    };
    let risks = |layers| {
        kinds(&Graph::new(&chain(layers), 200)).into_iter().map(|(_, kind)| kind).collect::<Vec<_>>()
    };
    assert_eq!(risks(200), []);
    assert_eq!(risks(201), [RiskKind::Long]);
    assert_eq!(risks(MAX_LAYERS), [RiskKind::Long]);
    assert_eq!(risks(MAX_LAYERS + 1), [RiskKind::TooLong]);
}

#[test]
fn writers_and_unclean_images_are_told_apart() {
    let mut busy_top = qcow2_image("busy-top", Some("base"));
    busy_top.writer = true;
    busy_top.qcow2.as_mut().unwrap().marked_dirty = true;
    let mut left = qcow2_image("left", None);
    left.qcow2.as_mut().unwrap().in_session = true;
    let base = Image { writer: true, ..qcow2_image("base", None) };
    let found = found(vec![busy_top, left, base]);
    let graph = Graph::new(&found, 200);
    assert_eq!(
        kinds(&graph),
        [("base".to_owned(), RiskKind::Written), ("left".to_owned(), RiskKind::Unclean)],
        "a dirty image that is being written is as it should be"
    );
}

#[test]
fn a_layer_under_many_overlays_is_one_risk() {
    let mut images: Vec<Image> = (0..50).map(|at| qcow2_image(&format!("o{at}"), Some("base"))).collect();
    images.push(Image { mtime_ns: 3_600_000_000_000, ..qcow2_image("base", None) });
    let found = found(images);
    let graph = Graph::new(&found, 200);
    assert_eq!(kinds(&graph), [("base".to_owned(), RiskKind::Changed)]);
    assert!(graph.risks[0].fault.message.contains("and 49 more"), "{}", graph.risks[0].fault.message);
    assert!(graph.tops.iter().all(|&top| graph.stacks[top].risks.severity().is_some()));
}
