//! `vmstrata merge` and `vmstrata flatten --onto` on chains that stock tools made, whose layers have no names.

use crate::support;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool_json, tool_ok, vmstrata};
use serde_json::json;

const LAYERS: usize = 10;

fn file(number: usize) -> String {
    format!("{number}.qcow2")
}

/// `0.qcow2` to `9.qcow2`: each has a cluster that all wrote, and one of its own.
fn stock_chain() -> Images {
    let images = Images::new();
    for number in 0..LAYERS {
        let below = file(number.saturating_sub(1));
        let backing: &[&str] = if number == 0 { &[] } else { &["-F", "qcow2", "-b", &below] };
        images.create(&file(number), &[backing, &["16M"]].concat());
        let (all, own) = (format!("write -P {} 0 64k", number + 1), format!("{}M 64k", number + 1));
        let own = format!("write -P {} {own}", number + 1);
        tool_ok("qemu-io", ["-c", &all, "-c", &own, &images.name(&file(number))]);
    }
    images
}

/// The chain that stock tools see from a layer down, as numbers.
fn chain(images: &Images, number: usize) -> Vec<usize> {
    let args = ["info", "-U", "--backing-chain", "--output=json", &images.name(&file(number))];
    let found = tool_json("qemu-img", args);
    let number = |layer: &serde_json::Value| {
        let name = Path::new(layer["filename"].as_str().unwrap()).file_stem().unwrap();
        name.to_str().unwrap().parse().unwrap()
    };
    found.as_array().unwrap().iter().map(number).collect()
}

/// Each of these layers reads as it did when it was made, and is a sound file.
fn assert_states(images: &Images, layers: impl IntoIterator<Item = usize>) {
    for number in layers {
        let mut args = vec!["-r".to_owned(), "-c".to_owned(), format!("read -P {} 0 64k", number + 1)];
        for own in 0..LAYERS {
            let pattern = if own <= number { own + 1 } else { 0 };
            args.extend(["-c".to_owned(), format!("read -P {pattern} {}M 64k", own + 1)]);
        }
        let said = tool_ok("qemu-io", args.iter().map(String::as_str).chain([&*images.name(&file(number))]));
        assert!(!said.contains("failed"), "{number}: {said}");
        assert_clean(&images.path(&file(number)));
    }
}

fn there(images: &Images) -> Vec<usize> {
    (0..LAYERS).filter(|&number| images.path(&file(number)).exists()).collect()
}

#[test]
fn layers_without_names_go_from_the_middle_of_a_stock_chain() {
    let images = stock_chain();
    let disk = images.name("9.qcow2");
    // Files that are no snapshots of the disk stay by default, and go on being the states that they were.
    let said = run_ok(["merge", &disk, "--layers", "4..2"]);
    assert!(said.contains("layers 2 to 4 dropped: 192 KiB copied, 0 files removed"), "{said}");
    assert_eq!(chain(&images, 9), [9, 8, 7, 6, 5, 1, 0]);
    assert_eq!(chain(&images, 4), [4, 3, 2, 1, 0]);
    assert_states(&images, 0..LAYERS);
    // Numbers are those of now. A file that another image stands on stays.
    let report =
        run_json(["merge", &disk, "--layers", "1", "--remove", "all", "--direction", "stream", "--json"]);
    assert_eq!(report["removed"], json!([]));
    assert!(report["kept"][0]["reason"].as_str().unwrap().contains("2.qcow2 stands on it"), "{report}");
    assert_eq!(chain(&images, 9), [9, 8, 7, 6, 5, 0]);
    // By files, in either order; `snapshots` removes none that is no snapshot.
    let (six, eight) = (images.name("6.qcow2"), images.name("8.qcow2"));
    let said = run_ok(["merge", &disk, "--from", &eight, "--to", &six, "--remove", "snapshots"]);
    assert!(said.contains("6.qcow2 stays: it is not a snapshot that was taken of this disk"), "{said}");
    assert_eq!(chain(&images, 9), [9, 5, 0]);
    assert_eq!(there(&images), Vec::from_iter(0..LAYERS));
    assert_states(&images, 0..LAYERS);
}

#[test]
fn dropped_layers_are_removed_if_asked_for_either_way() {
    for direction in ["stream", "commit"] {
        let images = stock_chain();
        let disk = images.name("9.qcow2");
        let args =
            ["merge", &disk, "--layers", "3..6", "--remove", "all", "--direction", direction, "--json"];
        let report = run_json(args);
        assert_eq!(report["kept"], json!([]), "{direction}: {report}");
        assert_eq!(there(&images), [0, 1, 2, 7, 8, 9], "{direction}");
        assert_eq!(chain(&images, 9), [9, 8, 7, 2, 1, 0], "{direction}");
        assert_states(&images, [0, 1, 2, 7, 8, 9]);
    }
}

#[test]
fn a_stock_chain_is_collapsed_onto_its_base() {
    let images = stock_chain();
    let (disk, base) = (images.name("9.qcow2"), images.name("0.qcow2"));
    let before = std::fs::read(&base).unwrap();
    let said = run_ok(["flatten", &disk, "--onto", &base, "--remove", "all"]);
    assert!(said.contains(&format!("flat onto {base}: 512 KiB copied, 8 files removed")), "{said}");
    assert_eq!((chain(&images, 9), there(&images)), (vec![9, 0], vec![0, 9]));
    assert_states(&images, [0, 9]);
    assert!(std::fs::read(&base).unwrap() == before, "the base is not written");
    let again = run_ok(["flatten", &disk, "--onto", &base]);
    assert!(again.contains("0 B copied"), "{again}");
    assert_eq!(chain(&images, 9), [9, 0]);
}

#[test]
fn many_files_that_stay_are_told_in_one_line() {
    let images = stock_chain();
    let said = run_ok(["flatten", &images.name("9.qcow2"), "--onto", &images.name("0.qcow2")]);
    let (newest, oldest) = (images.name("8.qcow2"), images.name("1.qcow2"));
    let line =
        format!("8 files stay, {newest} to {oldest}: it is not a snapshot that was taken of this disk\n");
    assert!(said.ends_with(&line) && said.lines().count() == 2, "{said}");
}

#[test]
fn layers_that_cannot_go_are_refused_before_anything_changes() {
    let images = stock_chain();
    let disk = images.name("9.qcow2");
    let refused = run_err(1, ["merge", &disk, "--layers", "4..9"]);
    assert!(refused.contains("layers 4 to 9 are not below that"), "{refused}");
    let other = images.create("other.qcow2", &["16M"]);
    for file in [&disk, other.to_str().unwrap()] {
        let refused = run_err(1, ["merge", &disk, "--from", file, "--to", &images.name("3.qcow2")]);
        assert!(refused.contains("it does not stand on"), "{refused}");
        let refused = run_err(1, ["flatten", &disk, "--onto", file]);
        assert!(refused.contains("`vmstrata info --chain` lists"), "{refused}");
    }
    // What another disk calls its snapshot goes by nobody else's command.
    let five = images.name("5.qcow2");
    run_ok(["snapshot", "create", &images.name("other.qcow2"), "--name", "mine"]);
    images.create("over.qcow2", &["-F", "qcow2", "-b", "other.qcow2"]);
    images.create("top.qcow2", &["-F", "qcow2", "-b", "over.qcow2"]);
    let refused = run_err(1, ["merge", &images.name("top.qcow2"), "--layers", "0"]);
    assert!(refused.contains("they belong to "), "{refused}");
    for args in [
        &["--layers", "a..b"][..],
        &["--layers", "1..2", "--from", &five, "--to", &five],
        &["--from", &five],
        &[],
    ] {
        run_err(64, [&["merge", &*disk], args].concat());
    }
    assert_eq!(chain(&images, 9), [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    assert_states(&images, 0..LAYERS);
}

fn serve(images: &Images) -> Server {
    let disk = format!("path={},name=web", images.name("9.qcow2"));
    Server::start(&["--disk", &disk, "--nbd", &format!("unix:{},rw", images.name("nbd.sock"))])
}

/// What the guest of the server sees and writes meanwhile.
fn guest(server: &Server, commands: &[&str]) {
    let uri = server.uri("web");
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let said = tool_ok("qemu-io", ["-f", "raw"].into_iter().chain(commands).chain([&*uri]));
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn layers_of_a_served_stock_chain_go_while_it_is_used() {
    let images = stock_chain();
    let server = serve(&images);
    let disk = images.name("9.qcow2");
    let refused = server.ask_err(["merge", &disk, "--layers", "3..4", "--direction", "commit"]);
    assert!(refused.contains("it is not a snapshot that was taken of this disk"), "{refused}");
    let said =
        server.ask_ok(["merge", &disk, "--layers", "3..4", "--direction", "commit", "--remove", "all"]);
    assert!(said.contains("layers 3 to 4 dropped: 192 KiB copied"), "{said}");
    assert_eq!(there(&images), [0, 1, 2, 5, 6, 7, 8, 9]);
    guest(&server, &["read -P 10 0 64k", "read -P 4 4M 64k", "read -P 5 5M 64k", "read -P 6 6M 64k"]);
    let said =
        server.ask_ok(["merge", &disk, "--layers", "3..4", "--remove", "all", "--direction", "stream"]);
    assert!(said.contains("layers 3 to 4 dropped: 256 KiB copied"), "{said}");
    assert_eq!(chain(&images, 9), [9, 8, 7, 2, 1, 0]);
    assert_eq!(there(&images), [0, 1, 2, 7, 8, 9]);
    guest(&server, &["read -P 10 0 64k", "read -P 4 4M 64k", "write -P 99 12M 64k"]);
    // A job of its own, too slow to end before the snapshot: what it is about is known by its files.
    let begun = vmstrata()
        .args(["job", "merge", "web", "--from", "1.qcow2", "--to", "2.qcow2", "--limit", "1", "--json"])
        .env("VMSTRATA_CONTROL", server.control())
        .current_dir(images.path("1.qcow2").parent().unwrap())
        .output()
        .unwrap();
    assert!(begun.status.success(), "{}", support::stderr(&begun));
    let begun: serde_json::Value = serde_json::from_slice(&begun.stdout).unwrap();
    assert_eq!((&begun["kind"], &begun["bytes_per_second"]), (&json!("merge"), &json!(1)));
    let id = begun["id"].to_string();
    server.ask_ok(["snapshot", "create", &disk, "--name", "meanwhile"]);
    server.ask_ok(["job", "limit", &id]);
    support::wait_until("the job", || {
        let listed: serde_json::Value =
            serde_json::from_str(&server.ask_ok(["job", "list", "--json"])).unwrap();
        let job = listed["jobs"].as_array().unwrap().iter().find(|job| job["id"] == begun["id"]).unwrap();
        assert_ne!(job["state"], "failed", "{job}");
        job["state"] == "done"
    });
    guest(&server, &["read -P 10 0 64k", "read -P 2 2M 64k", "read -P 99 12M 64k"]);
    assert!(server.stop().success());
    let listed = run_json(["info", &disk, "--chain", "--json"]);
    assert_eq!(listed["chain"]["layers"], json!(5), "9, the snapshot, 8, 7 and 0: {listed}");
    assert_eq!(there(&images), [0, 1, 2, 7, 8, 9], "by default files stay");
    assert_states(&images, [0, 1, 2, 7, 8]);
    assert_clean(&images.path("9.qcow2"));
}

#[test]
fn a_served_stock_chain_is_collapsed_onto_its_base() {
    let images = stock_chain();
    let server = serve(&images);
    let (disk, base) = (images.name("9.qcow2"), images.name("0.qcow2"));
    let said = server.ask_ok(["flatten", &disk, "--onto", &base, "--remove", "all"]);
    assert!(said.contains(&format!("flat onto {base}: 512 KiB copied")), "{said}");
    guest(&server, &["read -P 10 0 64k", "read -P 1 1M 64k", "read -P 5 5M 64k"]);
    assert!(server.ask_err(["flatten", &disk, "--onto", &disk]).contains("does not stand on"));
    assert!(server.stop().success());
    assert_eq!((chain(&images, 9), there(&images)), (vec![9, 0], vec![0, 9]));
    assert_states(&images, [0, 9]);
}
