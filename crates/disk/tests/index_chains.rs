//! Indices of whole chains: made, read back against the tables, kept, shared, removed; stock tools find every file clean.

use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;

use crate::common::stock::{content, path_str, qemu_img};
use crate::common::{for_seeds, random};
use crate::index_support::{Chain, Maker, random_chain};
use rand::Rng as _;
use vmstrata_disk::index::{IndexOptions, build, remove};
use vmstrata_types::ClusterBits;

#[test]
fn files_of_our_making_take_their_index_and_stay_what_they_are() {
    let chain = Chain::ours(5);
    let before = content(chain.top(), "qcow2");
    assert_eq!(chain.verify(), ["missing"; 4]);
    assert_eq!(chain.build(), ["file"; 4]);
    assert_eq!(chain.verify(), ["good"; 4]);
    assert_eq!(chain.build(), ["kept"; 4]);
    chain.assert_clean();
    assert!(content(chain.top(), "qcow2") == before);
}

#[test]
fn stock_files_stay_untouched_beside_their_sidecars() {
    let mut chain = Chain::new();
    for (number, maker) in [Maker::Raw, Maker::Stock, Maker::Old, Maker::Ours].into_iter().enumerate() {
        chain.add(maker, 4 << 20, ClusterBits::DEFAULT);
        if maker != Maker::Raw {
            chain.write(number, &[&format!("write -P {number} {number}M 100k")]);
        }
    }
    chain.add(Maker::Ours, 3 << 20, ClusterBits::DEFAULT);
    let stock = |number: usize| std::fs::read(&chain.files[number]).expect("reads");
    let before: Vec<_> = (0..3).map(stock).collect();
    assert_eq!(chain.build(), ["none", "sidecar", "sidecar", "file"]);
    assert_eq!(chain.verify(), ["none", "good", "good", "good"]);
    assert!((0..3).map(stock).eq(before));
    chain.assert_clean();
}

/// What is no index is not taken for one because of its name, and whoever may not read a layer may not read its sidecar.
#[test]
fn a_sidecar_takes_no_other_files_place_and_has_its_layers_permissions() {
    let mut chain = Chain::new();
    for _ in 0..3 {
        chain.add(Maker::Stock, 4 << 20, ClusterBits::DEFAULT);
    }
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&chain.files[1], private).expect("ours");
    for precious in ["precious", ""] {
        std::fs::write(chain.sidecar(0), precious).expect("written");
        let built = build(chain.top(), &IndexOptions::default()).expect("the chain is read");
        let said = format!("{:?}", built.layers[0].outcome);
        assert!(said.contains("SidecarTaken"), "{said}");
        assert_eq!(std::fs::read_to_string(chain.sidecar(0)).expect("there"), precious);
        let mode = chain.sidecar(1).metadata().expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::remove_file(chain.sidecar(1)).expect("there");
    }
    std::fs::remove_file(chain.sidecar(0)).expect("there");
    assert_eq!(chain.build(), ["sidecar"; 2]);
}

/// Version 2 has no bit that says that the link holds, though what was made as version 3 keeps the room for the link.
#[test]
fn an_image_amended_to_version_2_gets_a_sidecar() {
    let chain = Chain::ours(3);
    chain.build();
    let before = content(chain.top(), "qcow2");
    qemu_img(&["amend", "-q", "-f", "qcow2", "-o", "compat=0.10", path_str(&chain.files[0])]);
    assert_eq!(chain.build(), ["sidecar", "file"]);
    assert_eq!(chain.verify(), ["good"; 2]);
    qemu_img(&["amend", "-q", "-f", "qcow2", "-o", "compat=1.1", path_str(&chain.files[0])]);
    chain.build();
    assert_eq!(chain.verify(), ["good"; 2]);
    chain.assert_clean();
    assert!(content(chain.top(), "qcow2") == before);
}

#[test]
fn random_chains_read_back_as_their_tables_say() {
    for_seeds(12, |seed| {
        let mut random = random("random chains", seed);
        let layers = random.random_range(2..8);
        let chain = random_chain(&mut random, layers);
        chain.build();
        let verdicts = chain.verify();
        assert!(verdicts.iter().all(|&verdict| verdict == "good" || verdict == "none"), "{verdicts:?}");
        assert!(chain.build().iter().all(|&outcome| outcome == "kept" || outcome == "none"));
        chain.assert_clean();
    });
}

/// A stock tool may leave away what is not written of a file's last cluster, which a layer of smaller clusters cuts in units.
#[test]
fn the_end_of_a_cluster_that_the_file_lacks_is_no_damage() {
    let mut chain = Chain::new();
    for (number, bits) in
        [ClusterBits::DEFAULT, ClusterBits::DEFAULT, ClusterBits::MIN].into_iter().enumerate()
    {
        chain.add(if number < 2 { Maker::Old } else { Maker::Ours }, 4 << 20, bits);
        chain.write(number, &[&format!("write -q -P 5 {number}M 64k")]);
        let file = File::options().write(true).open(&chain.files[number]).expect("opens");
        let len = file.metadata().expect("exists").len();
        file.set_len(if number < 2 { len - 60_000 } else { len }).expect("cuts");
    }
    chain.add(Maker::Ours, 4 << 20, ClusterBits::MIN);
    assert_eq!(chain.build(), ["sidecar", "sidecar", "file"]);
    assert_eq!(chain.build(), ["kept"; 3]);
    assert_eq!(chain.verify(), ["good"; 3]);
}

#[test]
fn removing_indices_leaves_the_files_as_they_were() {
    let chain = Chain::ours(4);
    let bytes = || chain.files.iter().map(|file| std::fs::read(file).expect("reads")).collect::<Vec<_>>();
    let times = || {
        let time = |file| std::fs::metadata(file).and_then(|data| data.modified()).expect("exists");
        chain.files.iter().map(time).collect::<Vec<_>>()
    };
    let before = (bytes(), times());
    chain.build();
    assert_eq!(times(), before.1, "an index does not change when a file was changed");
    chain.remove();
    assert!((bytes(), times()) == before);
    assert_eq!(chain.verify(), ["missing"; 3]);
    chain.assert_clean();
}

#[test]
fn removing_takes_sidecars_away_and_nothing_else() {
    let mut chain = Chain::new();
    (0..3).for_each(|_| drop(chain.add(Maker::Stock, 1 << 20, ClusterBits::DEFAULT)));
    chain.build();
    assert!(chain.sidecar(0).exists() && chain.sidecar(1).exists());
    let strange = chain.sidecar(2);
    std::fs::write(&strange, vec![1; 5000]).expect("written");
    let dropped = remove(chain.top(), &IndexOptions::default()).expect("removes");
    assert!(dropped[..2].iter().all(|layer| matches!(layer.sidecar, Ok(true))));
    assert!(dropped[2].sidecar.is_err(), "not ours to remove");
    assert!(!chain.sidecar(0).exists() && !chain.sidecar(1).exists() && strange.exists());
}

/// What a snapshot adds is in proportion to what changed since the last one.
#[test]
fn an_index_adds_what_its_layer_changed() {
    let mut chain = Chain::new();
    // 64 GiB in clusters of 64 KiB: 2,048 leaves, 8 inner pages and a top.
    chain.add(Maker::Ours, 64 << 30, ClusterBits::DEFAULT);
    let everywhere: Vec<String> =
        (0..64).map(|number| format!("write -q {}M 4k", number * 1000 + 1)).collect();
    chain.write(0, &everywhere.iter().map(String::as_str).collect::<Vec<_>>());
    for number in 1..4 {
        chain.add(Maker::Ours, 64 << 30, ClusterBits::DEFAULT);
        chain.write(number, &["write -q 5M 4k", "write -q 40000M 4k"]);
    }
    let before: Vec<u64> = chain.files.iter().map(|file| file.metadata().expect("exists").len()).collect();
    chain.build();
    let added = |number: usize| chain.files[number].metadata().expect("exists").len() - before[number];
    // Two leaves, two inner pages, the top; table page, its inner page; the root; and up to the next cluster.
    assert!(added(1) <= 8 * 4096 + 65536 && added(2) <= 8 * 4096 + 65536, "{} {}", added(1), added(2));
    assert_eq!(chain.verify(), ["good"; 3]);
}

/// Tables are read in windows of 1,024 leaves, and pages written meanwhile change the very file that the next window is
/// read from.
#[test]
fn an_index_of_many_pages_is_made_of_several_windows() {
    let mut chain = Chain::new();
    chain.add(Maker::Ours, 64 << 30, ClusterBits::DEFAULT);
    let many: Vec<String> = (0..100).map(|number| format!("write -q {}M 4k", number * 300)).collect();
    chain.write(0, &many.iter().map(String::as_str).collect::<Vec<_>>());
    chain.write(0, &["write -q 40000M 4k"]);
    chain.add(Maker::Ours, 64 << 30, ClusterBits::DEFAULT);
    assert_eq!(chain.build(), ["file"]);
    assert_eq!(chain.verify(), ["good"]);
    chain.assert_clean();
}
