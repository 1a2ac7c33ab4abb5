//! Stock QEMU tools judge the generator: they find no error, and read exactly what the plan says.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use xtask::chain::{Base, Manifest, Plan, Spec, generate, verify};

fn plan(layers: u32, size: u64, cluster_size: u64) -> Plan {
    Plan { layers, size, cluster_size, fill: 0.8, overlap: 0.4, compress: 0.0, seed: 11 }
}

fn spec(plan: Plan) -> Spec {
    Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None }
}

fn qemu_img(args: &[&str]) -> Result<String> {
    let output = Command::new("qemu-img").args(args).output().context("qemu-img (package qemu-utils)")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img {args:?}: {}\n{text}{errors}", output.status);
    Ok(text)
}

fn path(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// Every layer checks clean, and the whole disk as stock tools read it is what the plan says.
fn stock_agrees(dir: &Path, manifest: &Manifest) -> Result<()> {
    for file in manifest.files.iter().filter(|file| file.ends_with("qcow2")) {
        qemu_img(&["check", "-q", path(&dir.join(file))])?;
    }
    let flat = dir.join("flat.raw");
    qemu_img(&["convert", "-O", "raw", path(&manifest.top(dir)), path(&flat)])?;
    let verified = verify::raw(manifest, &flat)?;
    ensure!(verified.data > 0, "a chain without data proves nothing");
    Ok(())
}

#[test]
fn chains_of_every_cluster_size_are_clean_and_read_right() {
    for (bits, size) in [(9, 700 << 10), (12, 3 << 20), (16, 20 << 20), (21, 64 << 20)] {
        let dir = tempfile::tempdir().unwrap();
        let manifest = generate(dir.path(), &spec(plan(5, size, 1 << bits))).unwrap();
        stock_agrees(dir.path(), &manifest).unwrap_or_else(|error| panic!("cluster bits {bits}: {error:#}"));
    }
}

#[test]
fn a_disk_that_ends_inside_a_cluster_is_read_to_its_last_sector() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = generate(dir.path(), &spec(plan(3, (5 << 20) + 512 * 7, 65_536))).unwrap();
    stock_agrees(dir.path(), &manifest).unwrap();
}

#[test]
fn compressed_clusters_are_clean_and_read_right() {
    for bits in [9, 12, 16] {
        let dir = tempfile::tempdir().unwrap();
        let chain = spec(Plan { compress: 0.5, ..plan(4, 8 << 20, 1 << bits) });
        let manifest = generate(dir.path(), &chain).unwrap();
        stock_agrees(dir.path(), &manifest).unwrap_or_else(|error| panic!("cluster bits {bits}: {error:#}"));
        if bits == 16 {
            let report = qemu_img(&["check", "--output=json", path(&manifest.top(dir.path()))]).unwrap();
            let compressed = report.lines().find(|line| line.contains("compressed-clusters")).unwrap();
            assert!(!compressed.contains(": 0"), "nothing was compressed: {report}");
        }
    }
}

#[test]
fn a_raw_base_and_headers_without_a_format_work() {
    let dir = tempfile::tempdir().unwrap();
    let chain = Spec { base: Base::Raw, ..spec(plan(4, 10 << 20, 65_536)) };
    let manifest = generate(dir.path(), &chain).unwrap();
    stock_agrees(dir.path(), &manifest).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let chain = Spec { backing_format: false, ..spec(plan(4, 10 << 20, 65_536)) };
    let manifest = generate(dir.path(), &chain).unwrap();
    stock_agrees(dir.path(), &manifest).unwrap();
}

#[test]
fn qemu_img_map_names_the_layers_of_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = generate(dir.path(), &spec(plan(6, 4 << 20, 65_536))).unwrap();
    let map = qemu_img(&["map", "--output=json", path(&manifest.top(dir.path()))]).unwrap();
    let extents: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    let mut named = vec![None; manifest.plan.clusters() as usize];
    for extent in extents.iter().filter(|extent| extent["data"] == true) {
        let number = |key: &str| extent[key].as_u64().unwrap();
        let first = number("start") / 65_536;
        let layer = 5 - number("depth") as u16;
        (first..first + number("length") / 65_536).for_each(|cluster| named[cluster as usize] = Some(layer));
    }
    assert_eq!(named, manifest.owners().collect::<Vec<_>>());
}

#[test]
fn an_image_spread_over_layers_reads_as_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("original.raw");
    let mut bytes = vec![0; 3 << 20];
    xtask::chain::pattern::fill(&mut bytes[1 << 20..], 0, xtask::chain::pattern::Writer::client(1), 3);
    std::fs::write(&raw, &bytes).unwrap();
    let chain = Spec { from_raw: Some(raw.clone()), ..spec(plan(7, 3 << 20, 4096)) };
    let manifest = generate(&dir.path().join("chain"), &chain).unwrap();
    stock_agrees(&dir.path().join("chain"), &manifest).unwrap();
    let top = manifest.top(&dir.path().join("chain"));
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", path(&raw), path(&top)]).unwrap();
}

#[test]
fn verification_finds_one_byte_of_another_layer() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = generate(dir.path(), &spec(plan(3, 2 << 20, 65_536))).unwrap();
    let flat = dir.path().join("flat.raw");
    qemu_img(&["convert", "-O", "raw", path(&manifest.top(dir.path())), path(&flat)]).unwrap();
    let mut bytes = std::fs::read(&flat).unwrap();
    bytes[1_234_567] ^= 1;
    let error = verify::stream(&manifest, &mut &bytes[..]).unwrap_err();
    assert!(error.to_string().contains("at guest offset 0x12d680"), "{error:#}");
    bytes[1_234_567] ^= 1;
    bytes.push(0);
    assert!(verify::stream(&manifest, &mut &bytes[..]).is_err(), "a longer disk was accepted");
}
