//! `vmstrata:diff:NAME`: what changed since a layer, for stock clients and for hostile ones.

use std::path::Path;

use crate::nbd_common::client::{ACK, Client, context_query, extents};
use crate::nbd_common::{Fixture, SIZE, Setup, Style, run, text};
use serde_json::Value;
use vmstrata_backup::{Diff, DiffKind, DiffOptions};
use vmstrata_disk::merge::{Direction, Merge, MergeOptions, ranges_of};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo};
use vmstrata_disk::{OpenOptions, ResourceOptions, Resources};
use vmstrata_export::nbd::protocol::CommandFlags;
use vmstrata_export::nbd::protocol::request::Command;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const LIST: u32 = 9;
const SET: u32 = 10;

/// What `nbdinfo` shows of a context: offset, length, type.
fn map(fixture: &Fixture, context: &str) -> Vec<(u64, u64, u64)> {
    let output = run("nbdinfo", &["--json", &format!("--map={context}"), &fixture.uri()]);
    let map: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    let extent = |item: &Value| (number(&item["offset"]), number(&item["length"]), number(&item["type"]));
    map.as_array().unwrap().iter().map(extent).collect()
}

#[test]
fn nbdinfo_maps_what_changed_since_each_layer() {
    let fixture = Fixture::chain();
    assert_eq!(
        map(&fixture, "vmstrata:diff:middle"),
        [
            (0, 2 * MIB, 0),
            (2 * MIB, 512 * KIB, 1),
            (2560 * KIB, 256 * KIB, 2),
            (2816 * KIB, 256 * KIB, 1),
            (3 * MIB, 5 * MIB, 0)
        ]
    );
    assert_eq!(map(&fixture, "vmstrata:diff:base")[..2], [(0, MIB, 0), (MIB, 1536 * KIB, 1)]);
}

/// What is listed as changed is what a diff of the files finds.
#[test]
fn the_map_is_that_of_a_diff_of_the_files() {
    let fixture = Fixture::chain_with(Setup { read_only: true, ..Setup::default() });
    let resources = Resources::new(ResourceOptions::default());
    for base in ["base", "middle"] {
        let options = DiffOptions { allocation: true, ..DiffOptions::default() };
        let diff = Diff::open(&fixture.path(base), &fixture.path("active"), &options, &resources).unwrap();
        let by_files: Vec<_> = diff
            .extents()
            .map(|extent| extent.unwrap())
            .map(|extent| {
                let kind = if extent.kind == DiffKind::Data { 1 } else { 2 };
                (extent.range.start.get(), extent.range.len, kind)
            })
            .collect();
        let mut by_nbd = map(&fixture, &format!("vmstrata:diff:{base}"));
        by_nbd.retain(|extent| extent.2 != 0);
        assert_eq!(by_nbd, by_files, "{base}");
    }
}

#[test]
fn a_write_shows_at_once() {
    let fixture = Fixture::chain();
    run("qemu-io", &["-f", "raw", "-c", "write 5M 64k", "-c", "write -z 0 64k", &fixture.uri()]);
    let changed = map(&fixture, "vmstrata:diff:middle");
    assert_eq!(changed[0], (0, 64 * KIB, 2));
    assert!(changed.contains(&(5 * MIB, 64 * KIB, 1)), "{changed:?}");
}

fn names(client: &mut Client, option: u32, queries: &[&str]) -> Vec<(u32, String)> {
    let replies = client.option(option, &context_query("disk", queries));
    assert_eq!(replies.last(), Some(&(ACK, vec![])));
    let contexts = replies.iter().filter(|(kind, _)| *kind == 4);
    let context = |data: &[u8]| {
        let id = u32::from_be_bytes(data[..4].try_into().unwrap());
        (id, String::from_utf8(data[4..].to_vec()).unwrap())
    };
    contexts.map(|(_, data)| context(data)).collect()
}

fn connect(fixture: &Fixture) -> Client {
    let mut client = Client::connect(&fixture.socket());
    client.set_style(Style::Extended);
    client
}

#[test]
fn layers_are_listed_to_those_who_ask_for_them() {
    let fixture = Fixture::chain();
    let mut client = connect(&fixture);
    let mut list = |queries: &[&str]| -> Vec<String> {
        names(&mut client, LIST, queries).into_iter().map(|(_, name)| name).collect()
    };
    assert_eq!(list(&["vmstrata:"]), ["vmstrata:layer"], "a long chain would be a long list");
    assert_eq!(list(&["vmstrata:diff:"]), ["vmstrata:diff:middle", "vmstrata:diff:base"], "newest first");
    assert_eq!(list(&["vmstrata:diff:base"]), ["vmstrata:diff:base"]);
    assert_eq!(list(&[]), ["base:allocation", "vmstrata:layer"]);
}

#[test]
fn a_long_chain_is_listed_within_limits() {
    let directory = tempfile::tempdir().unwrap();
    let file = |number: usize| directory.path().join(format!("layer{number}"));
    for number in 0..300 {
        let backing =
            (number > 0).then(|| (format!("layer{}", number - 1).into(), vmstrata_disk::Format::Qcow2));
        let options = vmstrata_disk::CreateOptions { size: Some(SIZE), backing, ..Default::default() };
        vmstrata_disk::create(&file(number), &options).unwrap();
    }
    let top = file(299);
    let fixture = Fixture::serve(directory, &top, Setup::default());
    let mut client = connect(&fixture);
    let listed = names(&mut client, LIST, &["vmstrata:diff:"]);
    assert_eq!(listed.len(), 256);
    assert_eq!(listed[0].1, "vmstrata:diff:layer298");
    assert_eq!(names(&mut client, SET, &["vmstrata:diff:layer0"]), [(3, "vmstrata:diff:layer0".to_owned())]);
    client.go("disk");
}

#[test]
fn names_that_are_no_layer_select_nothing() {
    let fixture = Fixture::chain();
    std::fs::write(fixture.path("outside"), [0; 512]).unwrap();
    let mut client = connect(&fixture);
    let base = text(&fixture.path("base")).to_owned();
    let long = "x".repeat(4000);
    for name in ["", "active", "outside", "../base", "./base", "base/", "BASE", "base\n", "*", &base, &long] {
        let query = format!("vmstrata:diff:{name}");
        for option in [LIST, SET] {
            if name.is_empty() && option == LIST {
                continue;
            }
            assert_eq!(names(&mut client, option, &[&query]), [], "{query:?}");
        }
    }
    let nul = client.option(SET, &context_query("disk", &["vmstrata:diff:base\0"]));
    assert_ne!(nul[0].0, ACK, "no string at all");
    let many: Vec<String> = (0..2000).map(|number| format!("vmstrata:diff:{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(names(&mut client, SET, &many), []);
}

#[test]
fn differences_can_be_selected_together_and_asked_for_apart() {
    let fixture = Fixture::chain();
    let mut client = connect(&fixture);
    let queries = ["vmstrata:diff:base", "base:allocation", "vmstrata:diff:middle", "vmstrata:diff:base"];
    let selected = names(&mut client, SET, &queries);
    let name = |id: u32, name: &str| (id, name.to_owned());
    let expected =
        [name(1, "base:allocation"), name(3, "vmstrata:diff:base"), name(4, "vmstrata:diff:middle")];
    assert_eq!(selected, expected, "each once, by number");
    client.go("disk");
    let chunks = client.call(Command::BlockStatus, CommandFlags::empty(), 0, SIZE).unwrap();
    let first: Vec<_> = chunks.iter().map(extents).map(|(id, items)| (id, items[0])).collect();
    assert_eq!(first, [(1, (2560 * KIB, 0)), (3, (MIB, 0)), (4, (2 * MIB, 0))]);
    let payload = [SIZE.to_be_bytes().to_vec(), 4u32.to_be_bytes().to_vec()].concat();
    let cookie =
        client.send_with(Command::BlockStatus, CommandFlags::PAYLOAD_LEN, 0, payload.len() as u64, &payload);
    let only: Vec<_> = client.reply(cookie).unwrap().iter().map(|chunk| extents(chunk).0).collect();
    assert_eq!(only, [4]);
}

#[test]
fn a_snapshot_is_known_by_its_name_too() {
    let directory = tempfile::tempdir().unwrap();
    let [mon, web] = ["web.mon.qcow2", "web.qcow2"].map(|name| directory.path().join(name));
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&mon), "1M"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "web.mon.qcow2", "-F", "qcow2", text(&web)]);
    run("qemu-io", &["-c", "write -q 64k 64k", text(&web)]);
    let fixture = Fixture::serve(directory, &web, Setup::default());
    let expected = [(0, 64 * KIB, 0), (64 * KIB, 64 * KIB, 1), (128 * KIB, 896 * KIB, 0)];
    for name in ["mon", "web.mon.qcow2"] {
        assert_eq!(map(&fixture, &format!("vmstrata:diff:{name}")), expected, "{name}");
    }
    let mut client = connect(&fixture);
    for name in ["tue", "x/mon", "mon.qcow2"] {
        assert_eq!(names(&mut client, SET, &[&format!("vmstrata:diff:{name}")]), [], "{name}");
    }
}

/// Whoever backs up by a difference must not be given that to another state than he asked for.
#[test]
fn a_snapshot_that_gets_the_name_of_a_deleted_one_is_another() {
    for direction in [Direction::Stream, Direction::Commit] {
        let directory = tempfile::tempdir().unwrap();
        let web = directory.path().join("web.qcow2");
        run("qemu-img", &["create", "-q", "-f", "qcow2", text(&web), "1M"]);
        let fixture = Fixture::serve(directory, &web, Setup::default());
        let mut taken_ns = 0;
        let mut take = |name: &str| {
            taken_ns += 1;
            let info = SnapshotInfo { name: name.to_owned(), taken_ns, ..SnapshotInfo::default() };
            fixture.disk.snapshot(&info).unwrap();
            fixture.disk.finalize().unwrap();
        };
        take("mon");
        take("tue");
        let mut client = connect(&fixture);
        assert_eq!(names(&mut client, SET, &["vmstrata:diff:mon", "vmstrata:diff:tue"]).len(), 2);
        client.go("disk");
        let mut ask = || client.call(Command::BlockStatus, CommandFlags::empty(), 0, MIB);
        assert_eq!(ask().unwrap().len(), 2);
        run("qemu-io", &["-f", "raw", "-c", "write 64k 64k", &fixture.uri()]);
        take("wed");
        let parts = ask().unwrap().iter().map(|chunk| extents(chunk).1.len()).collect::<Vec<_>>();
        assert_eq!(parts, [3, 3], "others that are taken change nothing");
        let ranges = ranges_of(&web, &["mon".to_owned()], &OpenOptions::default()).unwrap();
        let options = MergeOptions { direction, ..MergeOptions::default() };
        Merge::of_disk(&fixture.disk, ranges[0], &options).unwrap().run().unwrap();
        ask().unwrap_err();
        take("mon");
        ask().unwrap_err();
        let mut client = connect(&fixture);
        assert_eq!(names(&mut client, SET, &["vmstrata:diff:mon", "vmstrata:diff:tue"]).len(), 2);
        client.go("disk");
        let now = client.call(Command::BlockStatus, CommandFlags::empty(), 0, MIB).unwrap();
        assert_eq!(now.iter().map(|chunk| extents(chunk).1.len()).collect::<Vec<_>>(), [1, 3]);
    }
}

/// A disk that is served as it was, and one that was made on a snapshot of another: neither is called as the files below are.
#[test]
fn snapshots_are_known_by_their_names_on_clones_and_at_snapshots() {
    let directory = tempfile::tempdir().unwrap();
    let [web, clone] = ["web.qcow2", "clone.qcow2"].map(|name| directory.path().join(name));
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&web), "1M"]);
    for (at, name) in [("64k", "mon"), ("128k", "tue"), ("192k", "wed")] {
        run("qemu-io", &["-c", &format!("write -q {at} 64k"), text(&web)]);
        take(&web, name);
    }
    snapshot::clone(&web, "tue", &clone, &OpenOptions::default()).unwrap();
    run("qemu-io", &["-c", "write -q 512k 64k", text(&clone)]);
    take(&clone, "thu");
    let before = names_of_snapshots(directory.path(), "web.tue.qcow2");
    assert_eq!(before, ["web.mon.qcow2", "mon"]);
    let at_clone = names_of_snapshots(directory.path(), "clone.qcow2");
    assert_eq!(at_clone, ["clone.thu.qcow2", "thu", "web.tue.qcow2", "tue", "web.mon.qcow2", "mon"]);
    let changed = |disk: &str, base: &str| -> Vec<u64> {
        let fixture = serve_copy(directory.path(), disk);
        let found = map(&fixture, &format!("vmstrata:diff:{base}"));
        found.into_iter().filter(|extent| extent.2 == 1).map(|extent| extent.0 / KIB).collect()
    };
    assert_eq!(changed("web.tue.qcow2", "mon"), [128]);
    assert_eq!(changed("clone.qcow2", "tue"), [512]);
    assert_eq!(changed("clone.qcow2", "mon"), [128, 512]);
    assert_eq!(changed("clone.qcow2", "thu"), [0; 0]);
}

/// What is called as a snapshot's file is called, and is none, is known by its file's name only.
#[test]
fn a_base_that_is_named_like_a_snapshot_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let [golden, ci] = ["golden.v1.qcow2", "ci.qcow2"].map(|name| directory.path().join(name));
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&golden), "1M"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "golden.v1.qcow2", "-F", "qcow2", text(&ci)]);
    take(&ci, "s1");
    let fixture = serve_copy(directory.path(), "ci.qcow2");
    let mut client = connect(&fixture);
    for (name, is_known) in [("v1", false), ("golden.v1.qcow2", true), ("s1", true)] {
        let found = names(&mut client, SET, &[&format!("vmstrata:diff:{name}")]);
        assert_eq!(found.len(), usize::from(is_known), "{name}");
    }
}

fn take(disk: &Path, name: &str) {
    let info = SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() };
    let (open, prepare) = (OpenOptions::default(), PrepareOptions::default());
    let resources = Resources::new(ResourceOptions::default());
    snapshot::create(&[disk.to_owned()], &info, &open, &prepare, &resources).unwrap();
}

/// Serves a disk of a copy of the directory, read-only.
fn serve_copy(directory: &Path, disk: &str) -> Fixture {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
    }
    let disk = copy.path().join(disk);
    Fixture::serve(copy, &disk, Setup { read_only: true, ..Setup::default() })
}

/// What can be asked for of a disk, without what is before the names.
fn names_of_snapshots(directory: &Path, disk: &str) -> Vec<String> {
    let fixture = serve_copy(directory, disk);
    let listed = names(&mut connect(&fixture), LIST, &["vmstrata:diff:"]);
    listed.into_iter().map(|(_, name)| name.trim_start_matches("vmstrata:diff:").to_owned()).collect()
}
