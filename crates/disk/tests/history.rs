//! Whole histories of disks against flat arrays, one for each state: writes, snapshots, ways back, clones, merges and killed
//! processes in any order. After every few steps each state that there is reads as its array, and no layer is gone that
//! anybody needs; at the end stock tools say the same.

use crate::common::{for_seeds, random};
use crate::history_support::{Kind, World};
use rand::Rng as _;

const STEPS: usize = 150;

const PLAIN: Kind = Kind { options: "cluster_size=64k", version: 3, cluster: 64 << 10, has_raw_base: false };

const KINDS: [Kind; 8] = [
    PLAIN,
    Kind { options: "cluster_size=4k", cluster: 4 << 10, ..PLAIN },
    Kind { options: "cluster_size=128k,extended_l2=on", cluster: 4 << 10, ..PLAIN },
    Kind { has_raw_base: true, ..PLAIN },
    Kind { options: "compat=0.10", version: 2, ..PLAIN },
    Kind { options: "cluster_size=2M", cluster: 2 << 20, ..PLAIN },
    Kind { options: "cluster_size=16k,refcount_bits=1", cluster: 16 << 10, has_raw_base: true, ..PLAIN },
    Kind { options: "cluster_size=16k,extended_l2=on", cluster: 512, has_raw_base: true, ..PLAIN },
];

fn run(seed: u64, kills: bool) {
    let mut random = random("whole histories", seed * 2 + u64::from(kills));
    let mut world = World::new(KINDS[seed as usize % KINDS.len()], random.clone());
    for step in 0..STEPS {
        world.step();
        if kills && random.random_ratio(1, 20) {
            world.kill();
            if random.random_ratio(1, 3) {
                world.verify_by_stock();
            }
        }
        if step % 5 == 0 {
            world.verify(4);
        }
    }
    world.finish();
}

#[test]
fn every_state_reads_as_its_array() {
    for_seeds(8, |seed| run(seed, false));
}

#[test]
fn every_state_reads_as_its_array_though_processes_are_killed() {
    for_seeds(8, |seed| run(seed, true));
}
