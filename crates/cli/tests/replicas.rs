//! What a host keeps of a base in a repository, which several disks of it stand on.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::support::http::ask;
use crate::support::nas::{Nas, publish};
use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool_ok};
use serde_json::Value;

const CHUNK: u64 = 256 << 10;

/// The only layer of a disk in a repository.
fn layer(server: &Server, desk: &str) -> Value {
    let list: Value = serde_json::from_str(&server.ask_ok(["replica", "list", desk, "--json"])).unwrap();
    let [layer] = &list["replicas"][0]["layers"].as_array().unwrap()[..] else { panic!("{list}") };
    layer.clone()
}

fn fetched(server: &Server) -> u64 {
    let shown = ask(&server.control(), "GET", "/v1/status", "").json();
    shown["tier_caches"][0]["fetched_chunks"].as_u64().unwrap()
}

fn kept(server: &Server) -> [u64; 2] {
    let layer = layer(server, "desk0");
    ["kept_bytes", "bytes"].map(|key| layer[key].as_u64().unwrap())
}

#[test]
fn a_base_comes_to_a_host_once_for_all_its_clones() {
    let nas = Nas::new();
    let server = nas.serve(&[]);
    nas.assert_as_base(&server, "desk0");
    let first = fetched(&server);
    assert!((8 * 4..=8 * 4 + 8).contains(&first), "{first} chunks for 8 MiB");
    for desk in ["desk1", "desk2"] {
        nas.assert_as_base(&server, desk);
    }
    assert_eq!(fetched(&server), first, "each chunk is fetched once");

    // What guests write is their own, and what is here is read without the NAS.
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 77 1k 100k", "-c", "flush", &server.uri("desk1")]);
    let [repository, away] = nas.repository();
    fs::rename(&repository, &away).unwrap();
    nas.assert_as_base(&server, "desk2");
    tool_ok(
        "qemu-io",
        ["-f", "raw", "-c", "read -P 77 1k 100k", "-c", "read -P 2 3M 1M", &server.uri("desk1")],
    );
    fs::rename(&away, &repository).unwrap();

    // Another process uses what is there.
    let args = nas.args(&[]);
    let server = Server::start_in(server.crash(), &args.iter().map(String::as_str).collect::<Vec<_>>());
    nas.assert_as_base(&server, "desk0");
    assert_eq!(fetched(&server), 0);
    assert!(server.stop().success());
    for desk in ["desk0", "desk1", "desk2"] {
        assert_clean(&nas.images.path(&format!("nas/{desk}.qcow2")));
    }
}

#[test]
fn a_replica_is_filled_pinned_scrubbed_and_dropped() {
    let nas = Nas::new();
    let server = nas.serve(&[]);
    let [here, bytes] = kept(&server);
    assert!(here < bytes / 4, "only what opening reads: {here} of {bytes}");
    let said = server.ask_ok(["replica", "fill", "desk0", "--limit", "1G", "--hours", "00:00-23:59"]);
    assert!(said.contains("all of its layers are here"), "{said}");
    assert_eq!(kept(&server), [bytes, bytes]);
    let before = fetched(&server);
    let again: Value = serde_json::from_str(&server.ask_ok(["replica", "fill", "desk1", "--json"])).unwrap();
    assert_eq!((&again["bytes"], &again["state"]), (&0.into(), &"done".into()));
    let wrong = server.ask_err(["replica", "fill", "desk0", "--hours", "22-6"]);
    assert!(wrong.contains("22:00-06:00"), "{wrong}");

    // A byte of the host's copy is changed behind its back.
    let said = server.ask_ok(["replica", "scrub", "desk0"]);
    assert!(said.contains("are what was published"), "{said}");
    assert_eq!(fetched(&server), before);
    let file = File::options().read(true).write(true).open(nas.kept()).unwrap();
    let (at, mut byte) = (bytes - CHUNK, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    server.ask_ok(["replica", "scrub", "desk2"]);
    assert_eq!(fetched(&server), before + 1);
    assert!(server.log().contains("other bytes than it was given"), "{}", server.log());
    let mut mended = [0];
    file.read_exact_at(&mut mended, at).unwrap();
    assert_eq!(mended, byte);

    let said = server.ask_ok(["replica", "pin", "desk0"]);
    assert!(said.contains("pinned") && said.contains("100 %"), "{said}");
    assert_eq!(layer(&server, "desk2")["pinned"], true, "the layer is that of all");
    let refused = server.ask_err(["replica", "drop", "desk1", "--yes"]);
    assert!(refused.contains("is pinned to this host"), "{refused}");
    server.ask_ok(["replica", "unpin", "desk1"]);
    let refused = server.ask_err(["replica", "drop", "desk1"]);
    assert!(refused.contains("add --yes") && refused.contains("MiB"), "{refused}");
    assert!(server.ask_ok(["replica", "drop", "desk1", "--yes"]).contains("given up"));
    assert_eq!(kept(&server), [0, bytes]);
    nas.assert_as_base(&server, "desk0");
    let missing = server.ask_err(["replica", "list", "nobody"]);
    assert!(missing.contains("its key replica=DIR"), "{missing}");
    assert!(server.stop().success());
}

#[test]
fn a_cache_without_room_for_a_base_refuses_to_keep_all_of_it() {
    let nas = Nas::new();
    let server = nas.serve(&["--tier-cache", "256M"]);
    for command in ["fill", "pin"] {
        let refused = server.ask_err(["replica", command, "desk0"]);
        assert!(refused.contains("--tier-cache"), "{refused}");
    }
    nas.assert_as_base(&server, "desk0");
    assert!(server.stop().success());
}

#[test]
fn a_version_has_what_another_image_has_otherwise() {
    let images = Images::new();
    fs::create_dir(images.path("nas")).unwrap();
    let [base, build, tier] = ["nas/golden.qcow2", "build.raw", "publisher"].map(|file| images.name(file));
    tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &base, "64M"]);
    tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 1 0 8M", "-c", "write -P 2 20M 8M", &base]);
    tool_ok("qemu-img", ["convert", "-O", "raw", &base, &build]);
    let publish = |version, more: &[&str]| {
        let args = ["base", "publish", &base, "--version", version, "--tier", &tier];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect::<Vec<_>>()
    };
    let refused = run_err(1, publish("v1", &["--from", &build]));
    assert!(refused.contains("without --from"), "{refused}");
    run_ok(publish("v1", &[]));
    let v1 = images.name("v1.raw");
    fs::copy(&build, &v1).unwrap();
    // Built anew: some blocks differ, one run is zeros now, and it is larger.
    tool_ok("qemu-img", ["resize", "-q", "-f", "raw", &build, "72M"]);
    for write in ["write -P 3 1M 1M", "write -P 4 21000k 4k", "write -z 24M 2M", "write -P 5 71M 64k"] {
        tool_ok("qemu-io", ["-f", "raw", "-c", write, &build]);
    }
    let said = run_json(publish("v2", &["--from", &build, "--json"]));
    assert_eq!(said["written_bytes"], (1 << 20) + 4096 + 65536);
    let refused = run_err(1, publish("v2", &["--from", &build]));
    assert!(refused.contains("already"), "{refused}");
    for (version, content) in [("v1", &v1), ("v2", &build)] {
        let clone = images.name(&format!("nas/{version}.qcow2"));
        run_ok(["snapshot", "clone", &format!("{base}@{version}"), "-o", &clone]);
        tool_ok("qemu-img", ["compare", "-F", "raw", &clone, content]);
    }
    let listed = run_json(["base", "list", &base, "--json"]);
    let [first, second] = &listed["versions"].as_array().unwrap()[..] else { panic!("{listed}") };
    assert_eq!((&first["version"], &second["version"]), (&"v1".into(), &"v2".into()));
    assert!(first["added_bytes"].as_u64() >= Some(16 << 20), "{listed}");
    assert!(second["added_bytes"].as_u64() < Some(3 << 20), "{listed}");
    assert!(first["disks"][0].as_str().unwrap().contains("nas/v1.qcow2"), "{listed}");
    assert!(run_ok(["base", "list", &base]).contains("v2"));

    let refused = run_err(1, ["base", "retire", &base, "--version", "v1"]);
    assert!(refused.contains("v1.qcow2") && refused.contains("add --yes"), "{refused}");
    run_ok(["base", "retire", &base, "--version", "v1", "--yes"]);
    let gone = run_err(1, ["snapshot", "clone", &format!("{base}@v1"), "-o", &images.name("more.qcow2")]);
    assert!(gone.contains("no snapshot 'v1'"), "{gone}");
    // What stands on it is not touched, also when the next version is published.
    run_ok(publish("v3", &[]));
    tool_ok("qemu-img", ["compare", "-F", "raw", &images.name("nas/v1.qcow2"), &v1]);
}

/// The layers in a repository.
fn layers(repository: &Path) -> BTreeSet<PathBuf> {
    let files = fs::read_dir(repository).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|suffix| suffix == "qcow2")).collect()
}

/// Changes the last byte of each whole chunk of a file, or changes it back: the header stays.
fn flip_chunks(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    for at in (CHUNK - 1..file.metadata().unwrap().len()).step_by(CHUNK as usize) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
}

/// Fills a disk's replica from an image; returns the bytes that were fetched, and those that the image had.
fn fill_from(server: &Server, desk: &str, image: &str) -> [u64; 2] {
    let said = server.ask_ok(["replica", "fill", desk, "--from", image, "--json"]);
    let job: Value = serde_json::from_str(&said).unwrap();
    ["bytes", "local_bytes"].map(|key| job[key].as_u64().unwrap_or_else(|| panic!("{job}")))
}

#[test]
fn an_equally_patched_image_spares_the_wire_a_new_version() {
    let nas = Nas::new();
    let server = nas.serve(&[]);
    server.ask_ok(["replica", "fill", "desk0"]);
    assert!(server.stop().success());
    let v1 = layers(&nas.repository()[0]);
    let patch = ["write -P 90 1M 2M", "write -P 91 30M 4M", "write -z 6M 1M", "write -P 92 45M 12k"];
    publish(&nas.images, "v2", &patch);
    // The host applies the same patch to an image of its own, on a raw one.
    let [raw, own, other] = ["model.raw", "own.qcow2", "other.qcow2"].map(|file| nas.images.name(file));
    tool_ok("qemu-img", ["convert", "-O", "raw", &nas.model, &raw]);
    tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw", &own]);
    for write in patch {
        tool_ok("qemu-io", ["-f", "qcow2", "-c", write, &own]);
    }
    tool_ok("qemu-img", ["convert", "-O", "qcow2", &own, &other]);
    tool_ok("qemu-io", ["-f", "qcow2", "-c", "write -P 3 31M 64k", &other]);
    let desk = nas.images.name("nas/desk3.qcow2");
    run_ok(["snapshot", "clone", &format!("{}@v2", nas.images.name("nas/golden.qcow2")), "-o", &desk]);

    // Of the new version, no chunk can be had from the NAS.
    let v2: Vec<PathBuf> = layers(&nas.repository()[0]).difference(&v1).cloned().collect();
    v2.iter().for_each(|layer| flip_chunks(layer));
    let spec = format!("path={desk},replica={},backing={}", nas.images.name("host"), nas.images.name("nas"));
    let server = nas.serve(&["--disk", &spec]);
    let assert_as_patched =
        || tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri("desk3"), &own]);
    let [bytes, local] = fill_from(&server, "desk3", &own);
    // Its tables, which lie packed beside it, may not have been here yet.
    assert!(bytes <= 1 << 20 && local >= 6 << 20, "{bytes} fetched, {local} taken");
    assert_eq!(fetched(&server), 0);
    assert_as_patched();

    // Where the image has something else, the NAS is asked.
    v2.iter().for_each(|layer| flip_chunks(layer));
    server.ask_ok(["replica", "drop", "desk3", "--yes"]);
    let said = server.ask_ok(["replica", "fill", "desk3", "--from", &other]);
    assert!(said.contains("fetched now") && said.contains(&format!("taken from {other}")), "{said}");
    assert!(fetched(&server) > 0);
    assert_as_patched();
    for (image, why) in [(desk.as_str(), "already served as 'desk3'"), ("none.qcow2", "none.qcow2")] {
        let refused = server.ask_err(["replica", "fill", "desk3", "--from", image]);
        assert!(refused.contains(why), "{refused}");
    }
    assert!(server.stop().success());
}

#[test]
fn a_base_that_was_made_anew_comes_from_the_layers_of_the_old_one() {
    let nas = Nas::new();
    // The same content, as a base of its own: one layer, in other clusters.
    let [anew, old] = ["nas/anew.qcow2", "nas/old.qcow2"].map(|file| nas.images.name(file));
    tool_ok("qemu-img", ["convert", "-O", "qcow2", "-o", "cluster_size=128k", &nas.model, &anew]);
    run_ok(["base", "publish", &anew, "--version", "v1", "--tier", &nas.images.name("publisher")]);
    let desk = nas.images.name("nas/desk3.qcow2");
    run_ok(["snapshot", "clone", &format!("{anew}@v1"), "-o", &desk]);
    run_ok(["snapshot", "clone", &format!("{}@v1", nas.images.name("nas/golden.qcow2")), "-o", &old]);
    let spec = format!("path={desk},replica={},backing={}", nas.images.name("host"), nas.images.name("nas"));
    let server = nas.serve(&["--disk", &spec]);
    server.ask_ok(["replica", "fill", "desk0"]);
    let before = fetched(&server);
    let [_, local] = fill_from(&server, "desk3", &old);
    assert!(local >= 7 << 20, "{local}");
    // Chunks with tables.
    assert!(fetched(&server) - before <= 3, "{} chunks", fetched(&server) - before);
    nas.assert_as_base(&server, "desk3");
    assert!(server.stop().success());
}
