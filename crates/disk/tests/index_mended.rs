//! `index build` over damaged indices: what it keeps is sound, and what is not is made anew with all that stands on it.

use crate::common::flat::assert_reads;
use crate::common::open_read_only;
use crate::index_support::{Chain, Damage, Maker, root_of};
use vmstrata_disk::index::{IndexOptions, IndexOutcome, build};

const CLUSTER: usize = 512;
const PAGE: u64 = 4096;
/// Three leaves, so that every layer shares some with the ones below it.
const SIZE: u64 = 3 * 512 * 512;

/// A base with all of the disk, two layers that change a leaf each, and a disk on top.
fn indexed(maker: Maker) -> (Chain, Vec<u8>) {
    let parts = [10..20, 600..610, 1100..1110].map(|part| part.start * CLUSTER..part.end * CLUSTER);
    let made = Chain::with_content(&[maker, maker, maker, Maker::Ours], SIZE, &parts, 0);
    made.0.build();
    made
}

/// Builds over damage in the index of `layer`: layers below it keep theirs.
fn mends(chain: &Chain, layer: usize, expected: &[u8], what: &str) {
    let before = chain.verify();
    assert_ne!(before[layer], "good", "{what} is noticed");
    let built = chain.build();
    assert_eq!(built[..layer], vec!["kept"; layer], "{what}");
    assert!(built[layer..].iter().all(|&outcome| outcome != "kept"), "{what}: {built:?}");
    assert_eq!(chain.verify(), ["good"; 3], "{what}");
    assert_eq!(chain.build(), ["kept"; 3], "{what}");
    assert_reads(&open_read_only(chain.top()), expected, what);
}

/// Every page of every index, leaves that layers above share among them.
#[test]
fn a_damaged_page_in_a_file_is_made_anew() {
    let (chain, expected) = indexed(Maker::Ours);
    for layer in 0..3 {
        let pages = |chain: &Chain| {
            let (root, _) = root_of(&chain.files[layer]);
            (root.area.start.get()..root.area.end.get()).step_by(PAGE as usize)
        };
        for number in 0..pages(&chain).count() {
            let at = pages(&chain).nth(number).expect("as many as before") + 1234;
            Damage::of(&chain.files[layer], true).flip(at);
            mends(&chain, layer, &expected, &format!("layer {layer}, page {number}"));
        }
    }
    chain.assert_clean();
}

#[test]
fn a_damaged_page_in_a_sidecar_is_made_anew() {
    let (chain, expected) = indexed(Maker::Stock);
    for layer in 0..3 {
        let pages = Damage::of(&chain.sidecar(layer), true).len() / PAGE;
        for number in 0..pages {
            Damage::of(&chain.sidecar(layer), true).flip(number * PAGE + 99);
            mends(&chain, layer, &expected, &format!("layer {layer}, page {number}"));
        }
    }
}

/// The layers' own files are what they were, so that nothing but the order of building tells that what others lead to has
/// gone: it does so for who reads no pages, too.
#[test]
fn a_sidecar_that_is_gone_is_made_anew_and_so_are_those_that_led_into_it() {
    let (chain, expected) = indexed(Maker::Stock);
    for layer in 0..3 {
        std::fs::remove_file(chain.sidecar(layer)).expect("removed");
        mends(&chain, layer, &expected, &format!("no sidecar of layer {layer}"));
        std::fs::remove_file(chain.sidecar(layer)).expect("removed");
        let unread = IndexOptions { keep_unread: true, ..IndexOptions::default() };
        build(chain.top(), &unread).expect("builds");
        assert_eq!(chain.verify(), ["good"; 3]);
    }
}

/// Who serves a disk keeps what he has not read; who asks for indices gets sound ones.
#[test]
fn only_a_build_for_a_disk_in_use_keeps_pages_unread() {
    let (chain, _) = indexed(Maker::Ours);
    let (root, _) = root_of(&chain.files[0]);
    // The first page of a full index is its first leaf, which the layers above share.
    Damage::of(&chain.files[0], true).flip(root.area.start.get());
    let unread = IndexOptions { keep_unread: true, ..IndexOptions::default() };
    let built = build(chain.top(), &unread).expect("builds").layers;
    assert!(built.iter().all(|layer| matches!(layer.outcome, IndexOutcome::Kept(_))), "{built:?}");
    assert_eq!(chain.verify(), ["damaged"; 3]);
    assert_eq!(chain.build(), ["file"; 3]);
    assert_eq!(chain.verify(), ["good"; 3]);
}
