//! `vmstrata snapshot create` with a guest agent: asked for, configured, silent, and gone in the middle.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, stderr};
use serde_json::{Value, json};

/// An agent that does as it is told, but for commands that it hangs up at; and what it was told.
fn agent(images: &Images, name: &str, hangs_up_at: &'static str) -> (String, Arc<Mutex<Vec<String>>>) {
    let socket = images.name(name);
    let listener = UnixListener::bind(&socket).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = Arc::clone(&told);
    std::thread::spawn(move || {
        for stream in listener.incoming().map(Result::unwrap) {
            let mut answers = stream.try_clone().unwrap();
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                let text = line.strip_prefix(b"\xff").unwrap_or(&line);
                let command: Value = serde_json::from_slice(text).expect("JSON");
                let name = command["execute"].as_str().unwrap().trim_start_matches("guest-").to_owned();
                telling.lock().unwrap().push(name.clone());
                let synced = name == "sync-delimited";
                let value = if synced { command["arguments"]["id"].clone() } else { json!(1) };
                let delimiter: &[u8] = if synced { b"\xff" } else { b"" };
                if name == hangs_up_at {
                    break;
                }
                let answer = [delimiter, format!("{}\n", json!({ "return": value })).as_bytes()].concat();
                if answers.write_all(&answer).is_err() {
                    break;
                }
            }
        }
    });
    (socket, told)
}

fn count(told: &Mutex<Vec<String>>, command: &str) -> usize {
    told.lock().unwrap().iter().filter(|told| *told == command).count()
}

fn serve(images: &Images, disks: &[(&str, &str)]) -> Server {
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let specs: Vec<String> = disks
        .iter()
        .map(|(name, agent)| {
            images.create(name, &["4M"]);
            let agent = if agent.is_empty() { String::new() } else { format!(",agent={agent}") };
            format!("path={}{agent}", images.name(name))
        })
        .collect();
    let mut args: Vec<&str> = specs.iter().flat_map(|spec| ["--disk", spec]).collect();
    args.extend(["--nbd", &nbd]);
    Server::start(&args)
}

fn create(server: &Server, args: &[&str]) -> Value {
    let said = server.ask_ok([&["snapshot", "create", "--json"], args].concat());
    serde_json::from_str(&said).unwrap()
}

#[test]
fn disks_with_an_agent_are_quiesced_unless_told_otherwise_and_their_guest_once() {
    let images = Images::new();
    let (socket, told) = agent(&images, "agent.sock", "");
    let server = serve(&images, &[("root.qcow2", &socket), ("data.qcow2", &socket)]);
    let [root, data] = ["root.qcow2", "data.qcow2"].map(|name| images.name(name));
    let taken = create(&server, &[&root, &data, "--name", "v1", "--label", "a=b"]);
    assert_eq!((&taken["quiesced"], &taken["not_quiesced_because"]), (&json!(true), &Value::Null), "{taken}");
    assert_eq!(*told.lock().unwrap(), ["sync-delimited", "fsfreeze-freeze", "fsfreeze-thaw"]);
    let said = server.ask_ok(["snapshot", "create", &root, "--name", "v2"]);
    assert!(said.contains("(quiesced, writes held for"), "{said}");
    let never = create(&server, &[&root, "--name", "v3", "--quiesce", "never"]);
    assert_eq!((&never["quiesced"], count(&told, "fsfreeze-freeze")), (&json!(false), 2), "{never}");
    // What can be refused is refused before anybody stands still.
    let refused = server.ask_err(["snapshot", "create", &root, "--name", "v1"]);
    assert!(refused.contains("has a snapshot \"v1\" already"), "{refused}");
    for wrong in [&["--name", "v4", "--label", "quiesced=yes"][..], &["--name", "..x"]] {
        server
            .ask([&["snapshot", "create", &root], wrong].concat())
            .status
            .code()
            .filter(|code| *code != 0)
            .unwrap();
    }
    std::fs::write(images.path("root.v5.qcow2"), "in the way").unwrap();
    let refused = server.ask_err(["snapshot", "create", &root, "--name", "v5"]);
    assert!(refused.contains("root.v5.qcow2 exists already"), "{refused}");
    assert_eq!((count(&told, "fsfreeze-freeze"), count(&told, "fsfreeze-thaw")), (2, 2));
    assert!(server.stop().success());
    let listed = run_json(["snapshot", "list", &root, "--json"]);
    let labels: Vec<&Value> =
        listed["snapshots"].as_array().unwrap().iter().map(|row| &row["labels"]["quiesced"]).collect();
    assert_eq!(labels, ["false", "true", "true"]);
    assert_clean(&images.path("root.qcow2"));
}

#[test]
fn an_agent_asked_for_must_answer_and_a_configured_one_may_be_away() {
    let images = Images::new();
    let (good, told) = agent(&images, "good.sock", "");
    let (bad, _) = agent(&images, "bad.sock", "sync-delimited");
    let server = serve(&images, &[("web.qcow2", &bad), ("plain.qcow2", "")]);
    let [web, plain] = ["web.qcow2", "plain.qcow2"].map(|name| images.name(name));
    for args in [&["--agent", &bad][..], &["--quiesce", "always"]] {
        let refused = server.ask_err([&["snapshot", "create", &web, "--name", "no"], args].concat());
        assert!(refused.contains("bad.sock") && refused.contains("hung up"), "{refused}");
    }
    let taken = server.ask(["snapshot", "create", &web, "--name", "a"]);
    assert!(taken.status.success(), "{taken:?}");
    assert!(stderr(&taken).contains("warning: not quiesced: guest agent"), "{taken:?}");
    assert!(String::from_utf8_lossy(&taken.stdout).contains("(not quiesced, writes held"), "{taken:?}");
    let auto = create(&server, &[&web, "--name", "b", "--agent", &bad, "--quiesce", "auto"]);
    assert_eq!(auto["quiesced"], false, "{auto}");
    assert!(auto["not_quiesced_because"].as_str().unwrap().contains("hung up"), "{auto}");
    let other = create(&server, &[&web, &plain, "--name", "c", "--agent", &good]);
    assert_eq!((&other["quiesced"], count(&told, "fsfreeze-thaw")), (&json!(true), 1), "{other}");
    let none = server.ask_err(["snapshot", "create", &plain, "--name", "d", "--quiesce", "always"]);
    assert!(none.contains("'plain' has no guest agent"), "{none}");
    let nothing = create(&server, &[&plain, "--name", "e"]);
    assert_eq!((&nothing["quiesced"], &nothing["not_quiesced_because"]), (&json!(false), &Value::Null));
    assert!(server.stop().success());
    let offline = run_err(1, ["snapshot", "create", &web, "--agent", &good]);
    assert!(offline.contains("no server serves it"), "{offline}");
    let listed = run_json(["snapshot", "list", &plain, "--json"]);
    assert_eq!(listed["snapshots"][0]["labels"], json!({}), "{listed}");
}

#[test]
fn a_guest_that_does_not_thaw_is_shouted_about_and_its_snapshot_is_there() {
    let images = Images::new();
    let (socket, told) = agent(&images, "agent.sock", "fsfreeze-thaw");
    let server = serve(&images, &[("web.qcow2", &socket)]);
    let web = images.name("web.qcow2");
    let said = server.ask_err(["snapshot", "create", &web, "--name", "a"]);
    assert!(said.contains("the snapshot is taken, but the guest may stand still"), "{said}");
    assert!(count(&told, "fsfreeze-thaw") > 10, "it was tried for as long as there is patience");
    assert!(server.stop().success());
    assert_eq!(run_json(["snapshot", "list", &web, "--json"])["snapshots"][0]["name"], "a");
}
