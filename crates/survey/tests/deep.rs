//! Hidden clusters against a slow oracle: what `qemu-img map` says of each layer by itself, on arrays of sectors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::common::{Tree, patch, tool};
use serde_json::Value;
use vmstrata_survey::report::Layer;
use vmstrata_survey::{Report, SurveyOptions, survey};

const MIB: u64 = 1 << 20;

fn deep(tree: &Tree) -> Report {
    survey(&SurveyOptions { deep: true, ..tree.options() }).expect("the root is there")
}

fn layer<'a>(report: &'a Report, path: &Path) -> &'a Layer {
    report.layers.iter().find(|layer| Path::new(&layer.path) == path).expect("there")
}

/// Runs qemu-io on the layer alone.
fn write(path: &Path, commands: &[String]) {
    let image = format!("driver=qcow2,file.driver=file,file.filename={},backing=", path.display());
    let mut args = vec!["--image-opts".to_owned(), image];
    args.extend(commands.iter().flat_map(|command| ["-c".to_owned(), command.clone()]));
    tool("qemu-io", args);
}

/// What the layer says of itself: `(start, length, has clusters)` of each run that it answers for. Zeros written over
/// data keep their clusters, and then have an offset.
fn own(path: &Path) -> Vec<(u64, u64, bool)> {
    let image = format!("driver=qcow2,file.driver=file,file.filename={},backing=", path.display());
    let map: Vec<Value> =
        serde_json::from_str(&tool("qemu-img", ["map", "--output=json", "--image-opts", &image]))
            .expect("JSON");
    let answered = map.iter().filter(|run| run["present"] == true);
    answered
        .map(|run| {
            (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap(), run.get("offset").is_some())
        })
        .collect()
}

/// A layer, the one below it, and the size of its clusters.
struct Planned {
    path: PathBuf,
    below: Option<usize>,
    size: u64,
    cluster: u64,
}

/// Hidden bytes of every layer, sector by sector: a sector is seen by a disk until one of its layers answers for it.
fn oracle(layers: &[Planned]) -> HashMap<PathBuf, u64> {
    let sectors = |layer: &Planned| (layer.size / 512) as usize;
    let answers: Vec<Vec<bool>> = layers
        .iter()
        .map(|layer| {
            let mut answers = vec![false; sectors(layer)];
            for (start, len, _) in own(&layer.path) {
                answers[(start / 512) as usize..((start + len) / 512) as usize].fill(true);
            }
            answers
        })
        .collect();
    let mut seen: Vec<Vec<bool>> = layers.iter().map(|layer| vec![false; sectors(layer)]).collect();
    let is_top = |at: usize| layers.iter().all(|layer| layer.below != Some(at));
    for top in (0..layers.len()).filter(|&at| is_top(at)) {
        let mut looking = vec![true; sectors(&layers[top])];
        let mut next = Some(top);
        while let Some(at) = next {
            looking.resize(looking.len().min(sectors(&layers[at])), false);
            for (sector, looks) in looking.iter_mut().enumerate().filter(|(_, looks)| **looks) {
                seen[at][sector] = true;
                *looks = !answers[at][sector];
            }
            next = layers[at].below;
        }
    }
    let hidden = |at: usize| -> u64 {
        let cluster = (layers[at].cluster / 512) as usize;
        let data = own(&layers[at].path).into_iter().filter(|(_, _, clusters)| *clusters);
        let starts = data.flat_map(|(start, len, _)| (start / 512..(start + len) / 512).step_by(cluster));
        let unseen = starts.filter(|&start| {
            let end = (start as usize + cluster).min(seen[at].len());
            !seen[at][start as usize..end].contains(&true)
        });
        unseen.count() as u64 * layers[at].cluster
    };
    layers.iter().enumerate().map(|(at, layer)| (layer.path.clone(), hidden(at))).collect()
}

/// Numbers that look random, from Knuth's generator.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A tree of 12 layers, each on a random earlier one, with writes, zeros and mixed cluster sizes.
fn plant(tree: &Tree, dice: &mut Dice) -> Vec<Planned> {
    let mut layers: Vec<Planned> = Vec::new();
    for number in 0..12u64 {
        let below = (number > 0).then(|| (number - 1 - dice.below(number.min(3))) as usize);
        let cluster = [4096, 65536, 16384][dice.below(3) as usize];
        // Some grow, some shrink.
        let size = [8 * MIB, 10 * MIB, 6 * MIB][dice.below(3) as usize];
        let name = format!("{number:02}.qcow2");
        let options = format!("cluster_size={cluster}");
        let backing = below.map(|below: usize| format!("{below:02}.qcow2"));
        let mut args = vec!["-o", options.as_str()];
        if let Some(backing) = &backing {
            args.extend(["-u", "-b", backing.as_str(), "-F", "qcow2"]);
        }
        let size_text = size.to_string();
        args.push(&size_text);
        let path = tree.create(&name, &args);
        let commands: Vec<String> = (0..12)
            .map(|_| {
                let (at, len) = (dice.below(size / 65536), 1 + dice.below(4));
                let len = len.min(size / 65536 - at) * 64;
                let verb = if dice.below(5) == 0 { "write -q -z" } else { "write -q" };
                format!("{verb} {}k {len}k", at * 64)
            })
            .collect();
        write(&path, &commands);
        layers.push(Planned { path, below, size, cluster });
    }
    layers
}

#[test]
fn hidden_clusters_are_those_that_no_disk_sees() {
    let mut dice = Dice(1);
    let mut hidden_in_all = 0;
    for round in 0..6 {
        let tree = Tree::new();
        let layers = plant(&tree, &mut dice);
        let report = deep(&tree);
        for (path, hidden) in oracle(&layers) {
            assert_eq!(layer(&report, &path).hidden, Some(hidden), "round {round}: {}", path.display());
            hidden_in_all += hidden;
        }
        let sums: (u64, u64) = report
            .layers
            .iter()
            .fold((0, 0), |sum, layer| (sum.0 + layer.mapped.unwrap(), sum.1 + layer.hidden.unwrap()));
        let deep = report.deep.unwrap();
        assert_eq!((deep.mapped_bytes, deep.hidden_bytes), sums);
        assert_eq!((deep.layers_read, deep.layers_failed), (12, 0));
    }
    assert!(hidden_in_all > MIB, "the test hides something: {hidden_in_all}");
}

#[test]
fn what_one_disk_overwrote_and_another_sees_is_not_hidden() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    write(&base, &["write -q 0 4M".into()]);
    let [a, b] = ["a.qcow2", "b.qcow2"].map(|name| tree.overlay(name, "base.qcow2"));
    write(&a, &["write -q 0 4M".into()]);
    assert_eq!(layer(&deep(&tree), &base).hidden, Some(0));
    write(&b, &["write -q 1M 1M".into()]);
    assert_eq!(layer(&deep(&tree), &base).hidden, Some(MIB));
    assert_eq!(layer(&deep(&tree), &base).mapped, Some(4 * MIB));
    // Headers alone do not tell.
    assert_eq!(layer(&tree.survey(), &base).hidden, None);
}

/// As `du` counts: clusters that were allocated and never written take nothing.
#[test]
fn clusters_in_holes_of_their_file_give_nothing_back() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["-o", "preallocation=metadata", "64M"]);
    write(&base, &["write -q 1M 2M".into()]);
    write(&tree.overlay("top.qcow2", "base.qcow2"), &["write -q 0 16M".into()]);
    let report = deep(&tree);
    let found = layer(&report, &base);
    assert_eq!((found.mapped, found.hidden), (Some(2 * MIB), Some(2 * MIB)));
}

#[test]
fn a_cluster_that_an_internal_snapshot_keeps_gives_nothing_back() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    write(&base, &["write -q 0 2M".into()]);
    tool("qemu-img", ["snapshot", "-c", "kept", base.to_str().unwrap()]);
    let top = tree.overlay("top.qcow2", "base.qcow2");
    write(&top, &["write -q 0 2M".into()]);
    assert_eq!(layer(&deep(&tree), &base).hidden, Some(0));
}

#[test]
fn compressed_clusters_count_what_they_take() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    write(&base, &["write -q -c 0 64k".into(), "write -q -c 64k 64k".into()]);
    write(&tree.overlay("top.qcow2", "base.qcow2"), &["write -q 0 1M".into()]);
    let report = deep(&tree);
    let hidden = layer(&report, &base).hidden.unwrap();
    assert!(hidden > 0 && hidden < 64 << 10, "{hidden}");
}

#[test]
fn an_overlay_whose_tables_are_damaged_hides_nothing() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    write(&base, &["write -q 0 2M".into()]);
    let top = tree.overlay("top.qcow2", "base.qcow2");
    write(&top, &["write -q 0 2M".into()]);
    assert_eq!(layer(&deep(&tree), &base).hidden, Some(2 * MIB));
    let bytes = std::fs::read(&top).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    patch(&top, l1, &(0x7f << 56 | 1u64 << 40).to_be_bytes());
    let report = deep(&tree);
    assert_eq!(layer(&report, &base).hidden, Some(0));
    assert_eq!(layer(&report, &top).mapped, None);
    assert_eq!(report.deep.unwrap().layers_failed, 1);
}

/// Every L1 entry of a 2 TiB disk leads to one table: 4,096 times 8,192 entries, if anyone followed them all.
#[test]
fn one_table_under_many_names_is_read_once() {
    let tree = Tree::new();
    let path = tree.create("bomb.qcow2", &["2T"]);
    write(&path, &["write -q 0 512M".into()]);
    let bytes = std::fs::read(&path).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    let entry: [u8; 8] = bytes[l1..l1 + 8].try_into().unwrap();
    drop(bytes);
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&entry.repeat(4096), l1 as u64).unwrap();
    let started = std::time::Instant::now();
    let report = deep(&tree);
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    assert_eq!(layer(&report, &path).mapped, Some(512 * MIB));
}
