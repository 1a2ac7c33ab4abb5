//! Differences of random chains against what the states read as, byte by byte.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{SECTOR, some_range};
use crate::common::shape::{LayerShape, make};
use crate::common::stock::{content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, patiently, random, scratch};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_backup::{BackupFault, Diff, DiffExtent, DiffKind, DiffOptions};
use vmstrata_disk::{ErrorKind, ResourceOptions, Resources};

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions { max_open_files: 8, ..ResourceOptions::default() })
}

fn open(old: &Path, new: &Path, options: &DiffOptions) -> Diff {
    patiently(|| Diff::open(old, new, options, &resources())).expect("the states can be compared")
}

fn extents(diff: &Diff) -> Vec<DiffExtent> {
    diff.extents().collect::<Result<_, _>>().expect("the tables can be read")
}

/// Makes sure that extents are sorted, merged and on the disk.
fn assert_in_order(extents: &[DiffExtent], size: u64) {
    for extent in extents {
        assert!(extent.range.len > 0 && extent.range.fits(size), "{extent:?} on {size:#x}");
    }
    for pair in extents.windows(2) {
        let (end, start) = (pair[0].range.end(), pair[1].range.start);
        assert!(end < start || end == start && pair[0].kind != pair[1].kind, "{pair:?}");
    }
}

/// For each sector of the newer state, what a diff says of it.
fn by_sector(extents: &[DiffExtent], size: u64) -> Vec<Option<DiffKind>> {
    let mut sectors = vec![None; (size / SECTOR) as usize];
    for extent in extents {
        // A raw base may end inside a sector.
        let (start, end) = (extent.range.start.get() / SECTOR, extent.range.end().get().div_ceil(SECTOR));
        for sector in &mut sectors[start as usize..end as usize] {
            // A sector that is partly data is data.
            sector.get_or_insert(extent.kind);
        }
    }
    sectors
}

/// Makes sure that a diff leaves out nothing that changed, calls nothing zeros that is not, and says of no sector that
/// reads as zeros in both states without being read that it changed.
fn assert_covers(diff: &Diff, old: &[u8], new: &[u8]) {
    let found = extents(diff);
    assert_in_order(&found, new.len() as u64);
    let said = by_sector(&found, new.len() as u64);
    let mut old = old.to_vec();
    old.resize(new.len().max(old.len()), 0);
    for (number, said) in said.iter().enumerate() {
        let at = number * SECTOR as usize;
        let (was, is) = (&old[at..at + SECTOR as usize], &new[at..at + SECTOR as usize]);
        assert!(said.is_some() || was == is, "sector at {at:#x} changed and is not listed");
        assert!(*said != Some(DiffKind::Zero) || is.iter().all(|byte| *byte == 0), "{at:#x} is not zeros");
    }
    let exact: Vec<DiffExtent> =
        diff.changed_bytes().expect("opens").collect::<Result<_, _>>().expect("reads");
    assert_in_order(&exact, new.len() as u64);
    let exact = by_sector(&exact, new.len() as u64);
    let unit = (diff.unit().size() / SECTOR) as usize;
    let starts: Vec<usize> = (0..exact.len()).step_by(unit).collect();
    for start in starts {
        let end = exact.len().min(start + unit);
        let bytes = start * SECTOR as usize..end * SECTOR as usize;
        let differs = old[bytes.clone()] != new[bytes.clone()];
        let listed = exact[start..end].iter().any(Option::is_some);
        assert_eq!(listed, differs, "unit at {:#x}, by its bytes", bytes.start);
    }
}

fn some_layers(random: &mut SmallRng, depth: usize) -> Vec<LayerShape> {
    let resized = random.random_ratio(1, 2);
    let size = random.random_range(200..3000) * SECTOR;
    let bits = random.random_range(9..=17);
    let mixed = random.random_ratio(1, 3);
    let mut layers: Vec<LayerShape> = (0..depth)
        .map(|_| {
            let bits = if mixed { random.random_range(9..=17) } else { bits };
            let size = if resized { random.random_range(200..3000) * SECTOR } else { size };
            let version = if random.random_ratio(1, 5) { 2 } else { 3 };
            let compressed = random.random_ratio(1, 3).then_some("zlib");
            let subclusters = version == 3 && bits >= 14 && random.random();
            LayerShape { version, compressed, subclusters, operations: 6, ..LayerShape::qcow2(bits, size) }
        })
        .collect();
    if random.random() {
        layers[0] = LayerShape::raw(random.random_range(1000..700_000));
    }
    layers
}

#[test]
fn any_two_layers_of_a_chain_differ_where_their_bytes_do() {
    for_seeds(12, |seed| {
        let mut random = random("any two", seed);
        let dir = scratch();
        let depth = random.random_range(2..=6);
        let shapes = some_layers(&mut random, depth);
        make(dir.path(), &shapes, &mut random);
        let path = |layer: usize| dir.path().join(format!("layer{layer}"));
        let contents: Vec<Vec<u8>> = (0..depth)
            .map(|layer| content(&path(layer), if shapes[layer].raw { "raw" } else { "qcow2" }))
            .collect();
        for old in 0..depth {
            for new in 0..depth {
                let diff = open(&path(old), &path(new), &DiffOptions::default());
                assert_covers(&diff, &contents[old], &contents[new]);
            }
        }
    });
}

/// Puts `count` layers on `below`, each with a few writes.
fn branch(dir: &Path, name: &str, below: &str, count: usize, random: &mut SmallRng) -> PathBuf {
    let mut below = below.to_owned();
    for number in 0..count {
        let path = dir.join(format!("{name}{number}"));
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", &below, "-F", "qcow2", path_str(&path)]);
        let commands: Vec<String> = (0..4)
            .map(|_| {
                let (at, len) = some_range(random, 4 << 20, 1 << 16);
                match random.random_range(0..4) {
                    0 => format!("write -q -z {at} {len}"),
                    _ => format!("write -q -P {} {at} {len}", random.random_range(1..256)),
                }
            })
            .collect();
        qemu_io(&path, &commands);
        below = format!("{name}{number}");
    }
    dir.join(below)
}

#[test]
fn branches_differ_from_their_common_layer_up() {
    for_seeds(4, |seed| {
        let mut random = random("branches", seed);
        let dir = scratch();
        let base = dir.path().join("base0");
        qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), "4M"]);
        qemu_io(&base, &["write -q -P 7 1M 1M".to_owned(), "write -q -z 3M 64k".to_owned()]);
        let trunk = branch(dir.path(), "trunk", "base0", 2, &mut random);
        let left = branch(dir.path(), "left", "trunk1", 3, &mut random);
        let right = branch(dir.path(), "right", "trunk1", 1, &mut random);
        let states = [trunk, left, right];
        let contents = states.each_ref().map(|path| content(path, "qcow2"));
        for (old, was) in states.iter().zip(&contents) {
            for (new, is) in states.iter().zip(&contents) {
                assert_covers(&open(old, new, &DiffOptions::default()), was, is);
            }
        }
    });
}

/// Regions without tables are skipped, and no region is forgotten.
#[test]
fn changes_far_apart_on_a_large_disk_are_all_found() {
    let dir = scratch();
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&old), "64T"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "old", "-F", "qcow2", path_str(&new)]);
    let places: Vec<u64> = (0..40u64).map(|number| (number * number * number) << 30).collect();
    let commands: Vec<String> = places.iter().map(|at| format!("write -q {at} 512")).collect();
    qemu_io(&new, &commands);
    let found = extents(&open(&old, &new, &DiffOptions::default()));
    let expected: Vec<(u64, u64)> = places.iter().map(|at| (*at, 1 << 16)).collect();
    let found: Vec<_> = found.iter().map(|extent| (extent.range.start.get(), extent.range.len)).collect();
    assert_eq!(found, expected);
}

fn small_pair(dir: &Path, old_writes: &[&str], new_writes: &[&str]) -> (PathBuf, PathBuf) {
    let (old, new) = (dir.join("old"), dir.join("new"));
    let owned = |writes: &[&str]| writes.iter().map(|write| (*write).to_owned()).collect::<Vec<_>>();
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&old), "1M"]);
    qemu_io(&old, &owned(old_writes));
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "old", "-F", "qcow2", path_str(&new)]);
    qemu_io(&new, &owned(new_writes));
    (old, new)
}

fn listed(diff: &Diff) -> Vec<(u64, u64, DiffKind)> {
    extents(diff).iter().map(|extent| (extent.range.start.get(), extent.range.len, extent.kind)).collect()
}

#[test]
fn zeros_over_zeros_are_a_change_of_allocation_only() {
    let dir = scratch();
    let (old, new) = small_pair(
        dir.path(),
        &["write -q -z 0 64k", "write -q 128k 64k"],
        &["write -q -z 0 192k", "write -q -z 512k 64k"],
    );
    assert_eq!(listed(&open(&old, &new, &DiffOptions::default())), [(128 << 10, 64 << 10, DiffKind::Zero)]);
    let all = DiffOptions { allocation: true, ..DiffOptions::default() };
    assert_eq!(
        listed(&open(&old, &new, &all)),
        [(0, 192 << 10, DiffKind::Zero), (512 << 10, 64 << 10, DiffKind::Zero)]
    );
}

#[test]
fn a_cluster_written_again_with_what_it_held_drops_out_by_bytes() {
    let dir = scratch();
    let (old, new) = small_pair(
        dir.path(),
        &["write -q -P 5 0 256k"],
        &["write -q -P 5 64k 64k", "write -q -P 6 192k 64k", "write -q -P 0 0 64k"],
    );
    let diff = open(&old, &new, &DiffOptions::default());
    assert_eq!(listed(&diff), [(0, 128 << 10, DiffKind::Data), (192 << 10, 64 << 10, DiffKind::Data)]);
    let changed: Vec<_> = diff.changed_bytes().unwrap().map(Result::unwrap).collect();
    let changed: Vec<_> = changed.iter().map(|e| (e.range.start.get(), e.range.len, e.kind)).collect();
    assert_eq!(changed, [(0, 64 << 10, DiffKind::Zero), (192 << 10, 64 << 10, DiffKind::Data)]);
}

#[test]
fn a_state_is_no_different_from_itself() {
    let dir = scratch();
    let (old, _) = small_pair(dir.path(), &["write -q 0 64k"], &[]);
    assert_eq!(listed(&open(&old, &old, &DiffOptions::default())), []);
}

#[test]
fn strangers_are_refused() {
    let dir = scratch();
    let (old, _) = small_pair(dir.path(), &[], &[]);
    let other = dir.path().join("other");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&other), "1M"]);
    let error = Diff::open(&old, &other, &DiffOptions::default(), &resources()).unwrap_err();
    assert!(matches!(error.fault(), Some(BackupFault::NothingInCommon { .. })), "{error}");
    assert!(error.to_string().contains("no layer in common"), "{error}");
}

#[test]
fn a_loop_is_refused() {
    let dir = scratch();
    let (old, new) = small_pair(dir.path(), &[], &[]);
    qemu_img(&["rebase", "-q", "-u", "-b", "new", "-F", "qcow2", path_str(&old)]);
    let third = dir.path().join("third");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&third), "1M"]);
    let error = Diff::open(&new, &third, &DiffOptions::default(), &resources()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Loop { .. }), "{error}");
}

#[test]
fn a_damaged_entry_counts_as_changed_and_a_damaged_table_is_an_error() {
    let dir = scratch();
    let (old, new) = small_pair(dir.path(), &["write -q 0 64k"], &["write -q 64k 64k"]);
    let mut bytes = std::fs::read(&new).unwrap();
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    bytes[l2 + 8..l2 + 16].copy_from_slice(&0x3f00_0000_0000_01feu64.to_be_bytes());
    std::fs::write(&new, &bytes).unwrap();
    let diff = open(&old, &new, &DiffOptions::default());
    assert_eq!(listed(&diff), [(64 << 10, 64 << 10, DiffKind::Data)]);
    bytes[l1..l1 + 8].copy_from_slice(&(1u64 << 50).to_be_bytes());
    std::fs::write(&new, &bytes).unwrap();
    let diff = open(&old, &new, &DiffOptions::default());
    let mut found = diff.extents();
    assert!(found.next().unwrap().is_err(), "a table past the end of the file");
    assert!(found.next().is_none(), "nothing after an error");
}
