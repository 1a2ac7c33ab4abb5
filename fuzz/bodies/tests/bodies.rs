//! All bodies over their seeds, and for some seconds over mutations of them: what libFuzzer does, on stable Rust and
//! the same each time.
//!
//! `VMSTRATA_FUZZ_SECONDS` (3 by default) is how long each body gets; `VMSTRATA_SEED` starts the mutations elsewhere. An
//! input that fails is written to a file whose name the failure tells.

mod support;

use support::{memory, mutate::Mutator, seeds, watch::Watch};
use vmstrata_fuzz_bodies::BODIES;

/// Bytes that a body may have allocated at one time, whatever it is fed.
const MEMORY_MAX: usize = 96 << 20;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

/// One test after the other: the bound on memory is the process's, and some bodies have one disk only.
#[test]
fn no_bytes_break_a_body() {
    let (seconds, seed) = (support::knob("VMSTRATA_FUZZ_SECONDS", 3), support::knob("VMSTRATA_SEED", 0));
    println!("seed {seed}");
    let watch = Watch::start();
    for (name, body) in BODIES {
        let seeds = seeds::of(name);
        assert!(!seeds.is_empty(), "no seeds for {name}");
        let run = |input: &[u8]| {
            let before = memory::reset_peak();
            watch.run(name, input, body);
            let used = memory::peak() - before;
            assert!(used < MEMORY_MAX, "{name} took {used} bytes: {}", support::keep(name, input));
        };
        seeds.iter().for_each(|input| run(input));
        let mut mutator = Mutator::new(seed, seeds);
        let rounds = support::until(seconds, || run(&mutator.next()));
        println!("{name}: {rounds} mutations");
        assert!(rounds > 0);
    }
}

#[test]
fn every_body_has_a_target() {
    let targets = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../targets")).unwrap();
    let stem = |path: std::path::PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let mut targets: Vec<_> = targets.map(|target| stem(target.unwrap().path())).collect();
    let mut bodies: Vec<_> = BODIES.iter().map(|(name, _)| name.to_string()).collect();
    targets.sort();
    bodies.sort();
    assert_eq!(targets, bodies);
}
