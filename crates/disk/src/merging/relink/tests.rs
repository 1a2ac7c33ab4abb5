use vmstrata_qcow2::{CreateOptions, NewBacking, SnapshotInfo, new_image};
use vmstrata_store::MemoryStore;
use vmstrata_types::ClusterBits;

use super::*;
use crate::chain::{Qcow2Head, read_head};

fn record(name: &str) -> Vec<u8> {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }.encode().unwrap()
}

fn image(bits: u32, name: &str, snapshot: Option<&str>) -> MemoryStore {
    let snapshot = snapshot.map(|name| SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() });
    let image = new_image(&CreateOptions {
        cluster_bits: ClusterBits::new(bits).unwrap(),
        backing: Some(NewBacking { name: name.as_bytes().to_vec(), format: Some("qcow2".to_owned()) }),
        feature_names: true,
        index_room: true,
        record: snapshot.map(Into::into),
        ..CreateOptions::new(1 << 20)
    })
    .unwrap();
    let store = MemoryStore::new();
    store.set_len(image.file_len).unwrap();
    for (at, bytes) in &image.parts {
        store.write_all(bytes, *at).unwrap();
    }
    store
}

impl Relink {
    fn carry_out(&self, store: &MemoryStore) {
        self.write_body(store).unwrap();
        self.write_sector(store).unwrap();
    }
}

fn head(store: &MemoryStore) -> Qcow2Head {
    read_head(store, store.len().unwrap()).unwrap()
}

fn below(number: usize) -> Below {
    let name = ("x".repeat(number * 37 % 90 + 1) + ".qcow2").into();
    let format = if number.is_multiple_of(3) { Format::Raw } else { Format::Qcow2 };
    let record = (number % 4 != 1).then(|| record(&"n".repeat(number * 13 % 80 + 1)));
    Below { name, format, record }
}

fn says(head: &Qcow2Head, below: &Below) -> bool {
    head.backing_name.as_ref() == Some(&below.name)
        && head.backing_format == Some(below.format.to_string())
        && head.snapshot == below.record
}

/// Again and again, with the host dying after the first write, and after all of it.
#[test]
fn a_header_names_the_old_file_or_the_new_one() {
    for bits in [10, 11, 12, 16, 21] {
        let store = image(bits, "base.qcow2", Some("mon"));
        let link = vmstrata_qcow2::index::link_place(&store.to_vec()[..1 << bits], &head(&store).header);
        let mut last: Option<Below> = None;
        for number in 0..40 {
            let next = below(number);
            let old = head(&store);
            let relink = Relink::plan(&store, &old.header, Some(&next)).unwrap();
            if relink.write_body(&store).unwrap() {
                let now = head(&store);
                assert_eq!(now.header, old.header);
                assert!(
                    last.is_none_or(|last| says(&now, &last)),
                    "{bits} bits, {number}: changed too early"
                );
            }
            relink.write_sector(&store).unwrap();
            let now = head(&store);
            assert!(says(&now, &next), "{bits} bits, {number}");
            assert_eq!(vmstrata_qcow2::index::link_place(&store.to_vec()[..1 << bits], &now.header), link);
            last = Some(next);
        }
    }
}

#[test]
fn a_header_can_come_to_name_nothing() {
    for bits in [9, 12, 16] {
        let store = image(bits, "base.qcow2", (bits > 9).then_some("mon"));
        Relink::plan(&store, &head(&store).header, None).unwrap().carry_out(&store);
        let now = head(&store);
        assert_eq!((now.backing_name, now.backing_format, now.snapshot), (None, None, None));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let store = image(9, "base.qcow2", None);
    let before = store.to_vec();
    let long = Below { name: "x".repeat(400).into(), format: Format::Qcow2, record: None };
    let refused = Relink::plan(&store, &head(&store).header, Some(&long)).unwrap_err();
    assert!(refused.to_string().contains("no room"), "{refused}");
    assert_eq!(store.to_vec(), before);
}
