//! Deliberately broken images: each breaks one field, and the error must name that field, its byte offset and
//! what is wrong, whatever stock QEMU makes of the image.
//!
//! The corpus is the tables in the modules below. `stock` records whether QEMU 7.2 opens the image: where it
//! does and we do not, we are stricter on purpose, and the case's name says on what.

mod headers;
mod tables;

use std::collections::HashSet;

use crate::common;
use crate::common::image::{self, File, parse, version_2, version_3};
use vmstrata_qcow2::ParseError;

/// What `qemu-img info` does with the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stock {
    Opens,
    Refuses,
}

/// One broken image.
pub(crate) struct Case {
    /// What is broken.
    pub(crate) name: &'static str,
    /// The image to break.
    pub(crate) base: fn() -> File,
    /// Breaks it.
    pub(crate) change: fn(&mut File),
    /// The field the error must name,
    pub(crate) field: &'static str,
    /// the byte offset it must give,
    pub(crate) offset: u64,
    /// and the reason, as it reads.
    pub(crate) message: &'static str,
    /// What QEMU does.
    pub(crate) stock: Stock,
}

impl Case {
    fn broken(&self) -> File {
        let mut file = (self.base)();
        (self.change)(&mut file);
        file
    }
}

fn corpus() -> impl Iterator<Item = &'static Case> {
    headers::CASES.iter().chain(tables::CASES)
}

#[test]
fn the_images_are_sound_before_they_are_broken() {
    let v3 = parse(&version_3()).unwrap();
    assert_eq!(v3.name.as_deref(), Some(&b"base.qcow2"[..]));
    assert_eq!(v3.extensions.backing_format(), Some("qcow2"));
    assert_eq!(v3.extensions.items.len(), 4);
    assert_eq!((v3.snapshots[0].id.as_str(), v3.snapshots[0].name.as_str()), ("1", "before"));
    assert_eq!((v3.snapshots[0].l1_size, v3.snapshots[0].disk_size), (2, image::SIZE));
    assert_eq!((v3.bitmaps[0].name.as_str(), v3.bitmaps[0].granularity_bits), ("backup", 16));
    let v2 = parse(&version_2()).unwrap();
    assert_eq!((v2.header.version, v2.header.header_length), (2, 72));
    assert_eq!(v2.name.as_deref(), Some(&b"base.qcow2"[..]));
    for (name, file) in [("v3", version_3()), ("v2", version_2())] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(name), &file.bytes).unwrap();
        common::qemu_img_ok(dir.path(), &["create", "-f", "qcow2", "base.qcow2", "4M"]);
        common::qemu_img_ok(dir.path(), &["check", "-f", "qcow2", name]);
    }
}

#[test]
fn every_broken_image_is_refused_with_field_offset_and_reason() {
    for case in corpus() {
        let error = match parse(&case.broken()) {
            Ok(parsed) => panic!("{}: accepted as {parsed:?}", case.name),
            Err(error) => error,
        };
        let ParseError { field, offset, kind } = &error;
        let found = (*field, *offset, kind.to_string());
        assert_eq!(found, (case.field, case.offset, case.message.to_owned()), "{}", case.name);
    }
}

#[test]
fn stock_tools_refuse_what_the_corpus_says_they_refuse() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for case in corpus() {
        std::fs::write(dir.path().join("broken"), case.broken().bytes).unwrap();
        let opened = common::qemu_img(dir.path(), &["info", "-f", "qcow2", "broken"]).status.success();
        if opened != (case.stock == Stock::Opens) {
            wrong.push(case.name);
        }
    }
    assert!(wrong.is_empty(), "stock does otherwise: {wrong:#?}");
}

#[test]
fn the_corpus_is_large_and_its_names_differ() {
    let names: HashSet<_> = corpus().map(|case| case.name).collect();
    assert_eq!(names.len(), corpus().count());
    assert!(names.len() >= 100, "{} cases", names.len());
}
