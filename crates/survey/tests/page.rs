//! The page: well-formed, self-contained, told to those who do not see it, and true.

use std::os::unix::ffi::OsStrExt as _;

use crate::common::{Tree, patch};
use roxmltree::{Document, Node, ParsingOptions};
use vmstrata_survey::{Report, page};

fn parse(html: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(html, options).unwrap_or_else(|error| panic!("{error}\n{html}"))
}

fn elements<'a>(document: &'a Document<'_>, name: &'static str) -> impl Iterator<Item = Node<'a, 'a>> {
    document.descendants().filter(move |node| node.has_tag_name(name) || node.tag_name().name() == name)
}

fn varied() -> (Tree, Report) {
    let tree = Tree::new();
    tree.quick("base.qcow2", None);
    for disk in 0..20 {
        tree.quick(&format!("{disk}.qcow2"), Some("base.qcow2"));
        tree.quick(&format!("{disk}-top.qcow2"), Some(&format!("{disk}.qcow2")));
    }
    tree.quick("broken.qcow2", Some("gone.qcow2"));
    let report = tree.survey();
    (tree, report)
}

/// Attributes through which a page can load or run something.
const LOADING: [&str; 10] =
    ["src", "href", "srcset", "action", "data", "poster", "background", "style", "ping", "formaction"];

#[test]
fn the_page_is_well_formed_and_needs_nothing_from_elsewhere() {
    let (_tree, report) = varied();
    let html = page::render(&report);
    let document = parse(&html);
    for node in document.descendants().filter(Node::is_element) {
        let tag = node.tag_name().name();
        assert!(
            !["script", "link", "iframe", "img", "object", "embed", "base", "image", "use"].contains(&tag),
            "{tag}"
        );
        for attribute in node.attributes() {
            assert!(!LOADING.contains(&attribute.name()), "{tag} {}", attribute.name());
            assert!(!attribute.name().starts_with("on"), "{tag} {}", attribute.name());
        }
    }
    let style = elements(&document, "style").next().unwrap().text().unwrap();
    assert!(!style.contains("url(") && !style.contains("@import"), "{style}");
    assert!(style.contains("prefers-color-scheme: dark"), "dark and light");
    // The one address in the page is the name of SVG, which nobody fetches.
    assert_eq!(html.matches("://").count(), html.matches("xmlns=\"http://www.w3.org/2000/svg\"").count());
}

#[test]
fn every_plot_has_axes_with_units_and_is_told_in_words() {
    let (_tree, report) = varied();
    let html = page::render(&report);
    let document = parse(&html);
    let plots: Vec<_> = elements(&document, "svg").collect();
    assert_eq!(plots.len(), 10);
    for plot in plots {
        let label = plot.attribute("aria-label").unwrap();
        assert_eq!(plot.attribute("role"), Some("img"));
        assert!(label.len() > 20, "{label}");
        let labels = plot.descendants().filter(|node| node.attribute("class") == Some("label")).count();
        assert!(labels >= 2, "{label}: both axes are named");
        let ticks = plot.descendants().filter(|node| node.attribute("text-anchor") == Some("middle")).count();
        assert!(ticks >= 3, "{label}");
        let says = plot.descendants().filter(|node| node.tag_name().name() == "circle");
        assert!(says.clone().count() >= 1, "{label}");
        assert!(says.clone().all(|disc| disc.descendants().any(|node| node.tag_name().name() == "title")));
        for number in
            plot.descendants().flat_map(|node| node.attributes()).filter(|a| ["cx", "cy"].contains(&a.name()))
        {
            let value: f64 = number.value().parse().unwrap();
            assert!(value.is_finite() && (0.0..=1320.0).contains(&value), "{label}: {value}");
        }
        assert!(!html.contains("NaN") && !html.contains("inf "));
    }
}

#[test]
fn discs_count_every_chain_once() {
    let (_tree, report) = varied();
    let html = page::render(&report);
    let document = parse(&html);
    let sharing = elements(&document, "svg")
        .find(|svg| svg.attribute("aria-label").unwrap().contains("sharing"))
        .unwrap();
    let says: Vec<&str> = sharing
        .descendants()
        .filter(|node| {
            node.tag_name().name() == "title" && node.parent_element().unwrap().tag_name().name() == "circle"
        })
        .filter_map(|node| node.text())
        .collect();
    let count = |says: &&str| says.split(' ').next().unwrap().parse::<u64>().unwrap();
    assert_eq!(says.iter().map(count).sum::<u64>(), report.chains.len() as u64);
    assert!(says.iter().any(|says| says.starts_with("20 chains: 3 layers, 1 shared\nsuch as ")), "{says:?}");
}

#[test]
fn names_cannot_become_markup() {
    let tree = Tree::new();
    let evil = "x<script>alert(1)</script>\"'&\u{202e}\u{1b}]0;\n.qcow2";
    tree.quick(evil, Some("<img src=x onerror=alert(1)>.qcow2"));
    // Not UTF-8 at all.
    let bytes = std::ffi::OsStr::from_bytes(b"\xff\xfe.qcow2");
    std::fs::copy(tree.path(evil), tree.root().join(bytes)).unwrap();
    let report = tree.survey();
    assert_eq!(report.chains.len(), 2);
    let html = page::render(&report);
    let document = parse(&html);
    assert!(elements(&document, "script").next().is_none() && elements(&document, "img").next().is_none());
    assert!(!html.contains('\u{202e}') && !html.contains('\u{1b}'));
    let text = vmstrata_survey::text::render(&report);
    assert!(!text.contains('\u{1b}') && text.contains("missing"), "{text}");
}

#[test]
fn a_tree_without_images_has_a_page_that_says_so() {
    let tree = Tree::new();
    let html = page::render(&tree.survey());
    let document = parse(&html);
    assert!(html.contains("No image was found"));
    assert_eq!(elements(&document, "svg").count(), 0);
    assert!(vmstrata_survey::text::render(&tree.survey()).contains("No image was found"));
}

#[test]
fn one_image_and_images_that_tell_nothing_can_be_plotted() {
    let tree = Tree::new();
    tree.quick("a.qcow2", None);
    parse(&page::render(&tree.survey()));
    // A header that cannot be read leaves every distribution of sizes empty.
    patch(&tree.path("a.qcow2"), 20, &[0, 0, 0, 63]);
    let html = page::render(&tree.survey());
    parse(&html);
    assert!(html.contains("corrupt") && !html.contains("NaN"), "{html}");
}
