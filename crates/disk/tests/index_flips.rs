//! Disks that are served from damaged files: every byte of the headers and every eleventh of the indices of their frozen layers
//! flipped in turn, and their files cut at every page. That each byte of an index is guarded is shown by `index_damage`. A damaged index never costs more than time: what is read is right. A header
//! that stock tools do not read right either may be an error, or what they read.

use std::path::Path;

use crate::common::flat::read;
use crate::common::small_resources;
use crate::common::stock::{path_str, try_content};
use crate::index_support::{Chain, Damage, Maker, root_of};
use vmstrata_disk::{Disk, OpenOptions};

/// One leaf and a word: two leaves, of which the second has the last word of the disk only.
const SIZE: u64 = 513 * 512;
const CLUSTER: u64 = 512;
const PAGE: u64 = 4096;
/// Bytes from one flipped byte of an index to the next: coprime to the eight of a word, so that each of its bytes has its turn.
const STEP: usize = 11;
/// Bytes of the header proper, which every tool needs.
const HEADER: u64 = 112;

/// A base with all of the disk, a layer that changes the first leaf and another that changes both, and a disk on top.
fn small_chain(maker: Maker) -> (Chain, Vec<u8>) {
    let parts = [20 << 9..60 << 9, 50 << 9..52 << 9];
    let made = Chain::with_content(&[maker, maker, Maker::Ours], SIZE, &parts, 0);
    made.0.build();
    made
}

/// What a guest of the disk gets.
fn served(chain: &Chain) -> Result<Vec<u8>, String> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk =
        Disk::open(chain.top(), &options, &small_resources(None)).map_err(|error| error.to_string())?;
    read(&disk, 0, disk.size() as usize).map_err(|error| error.to_string())
}

/// What is served is right, whatever is damaged.
fn assert_serves(chain: &Chain, expected: &[u8], what: impl std::fmt::Display) {
    match served(chain) {
        Ok(bytes) => assert!(bytes == expected, "{what}: wrong bytes"),
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Damage outside of the index: what is served is right, or what stock tools read, or `may_fail`, or they fail as well.
fn assert_serves_no_worse_than_stock(chain: &Chain, expected: &[u8], may_fail: Option<&Path>, what: &str) {
    let found = served(chain);
    if found.as_deref() == Ok(expected) {
        return;
    }
    if let (Err(error), Some(file)) = (&found, may_fail) {
        assert!(error.contains(path_str(file)), "{what}: {error}");
        return;
    }
    match (found, try_content(chain.top())) {
        (Err(error), Ok(stock)) => assert!(stock != expected, "{what}: {error}"),
        (Err(_), Err(_)) => {}
        (Ok(bytes), Ok(stock)) => assert!(bytes == stock, "{what}: wrong bytes"),
        (Ok(_), Err(error)) => panic!("{what}: bytes where stock tools say {error}"),
    }
}

fn each_byte_of_the_header(layer: usize) {
    let (chain, expected) = small_chain(Maker::Ours);
    let file = &chain.files[layer];
    for hidden in [true, false] {
        let damage = Damage::of(file, hidden);
        for at in 0..CLUSTER {
            let may_fail = (at < HEADER).then_some(&**file);
            let what = format!("layer {layer}, byte {at:#x}, hidden: {hidden}");
            damage.flipped(at, || assert_serves_no_worse_than_stock(&chain, &expected, may_fail, &what));
        }
    }
}

#[test]
fn a_flipped_byte_in_the_header_of_the_base() {
    each_byte_of_the_header(0);
}

#[test]
fn a_flipped_byte_in_the_header_of_a_layer() {
    each_byte_of_the_header(1);
}

fn each_byte_of_the_index_in_the_file_of(layer: usize) {
    let (chain, expected) = small_chain(Maker::Ours);
    let (root, _) = root_of(&chain.files[layer]);
    let damage = Damage::of(&chain.files[layer], true);
    for at in (root.area.start.get()..root.area.end.get()).step_by(STEP) {
        damage.flipped(at, || assert_serves(&chain, &expected, format_args!("layer {layer}, byte {at:#x}")));
    }
}

#[test]
fn a_flipped_byte_in_the_index_of_the_base() {
    each_byte_of_the_index_in_the_file_of(0);
}

#[test]
fn a_flipped_byte_in_the_index_of_a_layer() {
    each_byte_of_the_index_in_the_file_of(1);
}

fn each_byte_of_the_sidecar_of(layer: usize) {
    let (chain, expected) = small_chain(Maker::Stock);
    let damage = Damage::of(&chain.sidecar(layer), true);
    assert!(damage.len() >= 5 * PAGE);
    for at in (0..damage.len()).step_by(STEP) {
        damage
            .flipped(at, || assert_serves(&chain, &expected, format_args!("sidecar {layer}, byte {at:#x}")));
    }
}

#[test]
fn a_flipped_byte_in_the_sidecar_of_the_base() {
    each_byte_of_the_sidecar_of(0);
}

#[test]
fn a_flipped_byte_in_the_sidecar_of_a_layer() {
    each_byte_of_the_sidecar_of(1);
}

#[test]
fn files_that_end_at_any_page() {
    let (chain, expected) = small_chain(Maker::Ours);
    for (layer, hidden) in [(0, true), (0, false), (1, true), (1, false)] {
        let (root, _) = root_of(&chain.files[layer]);
        let damage = Damage::of(&chain.files[layer], hidden);
        for len in (0..damage.len()).step_by(PAGE as usize) {
            let what = format!("layer {layer} cut at {len:#x}, hidden: {hidden}");
            // Of what is cut off before the index, reads are errors where stock tools make up zeros.
            let may_fail = (len < root.area.start.get()).then_some(&*chain.files[layer]);
            damage.cut(len, || assert_serves_no_worse_than_stock(&chain, &expected, may_fail, &what));
        }
    }
}

#[test]
fn sidecars_that_end_at_any_page() {
    let (chain, expected) = small_chain(Maker::Stock);
    for layer in 0..2 {
        let damage = Damage::of(&chain.sidecar(layer), true);
        for len in (0..damage.len()).step_by(PAGE as usize) {
            damage.cut(len, || {
                assert_serves(&chain, &expected, format_args!("sidecar {layer} cut at {len:#x}"))
            });
        }
    }
}
