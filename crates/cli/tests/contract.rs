//! The control socket's OpenAPI document is true: each operation is asked for, and every answer is checked against it. So is
//! each answer that the other tests of the control socket get.

use std::collections::BTreeSet;
use std::io::{Read, Write};

use crate::support::contract::{check, check_event, operations};
use crate::support::http::{Answer, ask, connect};
use crate::support::server::Server;
use crate::support::{Images, tool_ok, wait_until};
use serde_json::{Value, json};

/// What was asked for, and answered with success.
struct Client {
    server: Server,
    asked: BTreeSet<(String, String)>,
}

impl Client {
    fn ask(&mut self, method: &str, path: &str, body: &Value, status: u16) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = ask(&self.server.control(), method, path, &body);
        assert_eq!(answer.status, status, "{method} {path} {body}: {answer:?}");
        self.asked.extend(check(method, path, &body, &answer));
        answer
    }

    fn get(&mut self, path: &str) -> Answer {
        self.ask("GET", path, &Value::Null, 200)
    }
}

#[test]
fn every_operation_answers_as_the_document_says() {
    let images = Images::new();
    let (web, other) = (images.create("web.qcow2", &["16M"]), images.create("other.qcow2", &["16M"]));
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={},name=web", web.display()), "--nbd", &nbd]);
    tool_ok(
        "qemu-io",
        ["-f", "raw", "-c", "write -P 1 0 1M", "-c", "read 0 2M", "-c", "flush", &server.uri("web")],
    );
    let mut client = Client { server, asked: BTreeSet::new() };
    let mut events = connect(&client.server.control());
    events.write_all(b"GET /v1/events HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();

    client.ask("POST", "/v1/disks", &json!({ "path": other, "name": "other" }), 201);
    let export = json!({ "kind": "vhost_user", "disk": "other", "socket": images.name("other.sock") });
    let export = client.ask("POST", "/v1/exports", &export, 201).json();
    let second = format!("unix:{}", images.name("second.sock"));
    client.ask("POST", "/v1/exports", &json!({ "kind": "nbd", "address": second }), 201);
    for number in 1..=2 {
        let taken = json!({ "disks": ["web", "other"], "name": format!("s{number}"), "taken_ns": number, "labels": { "by": "ops" } });
        client.ask("POST", "/v1/snapshots", &taken, 201);
    }
    for path in [
        "/v1/status",
        "/v1/stats",
        "/v1/disks",
        "/v1/disks/web",
        "/v1/exports",
        "/v1/metrics",
        "/v1/openapi.json",
    ] {
        client.get(path);
    }
    client.ask("PUT", "/v1/disks/web/size", &json!({ "size_bytes": 32 << 20 }), 200);
    let limits = json!({ "iops_total": { "rate": 1000, "max": 2000, "max_length": 10 }, "bps_read": { "rate": 1 << 30 } });
    let limited = client.ask("PUT", "/v1/disks/web/limits", &limits, 200).json();
    assert_eq!((&limited, &client.get("/v1/disks/web").json()["limits"]), (&limits, &limits));
    client.ask(
        "POST",
        "/v1/disks/web/revert",
        &json!({ "snapshot": "s2", "keep": images.name("kept.qcow2") }),
        200,
    );
    jobs(&mut client);
    images.create("tiered.qcow2", &["16M"]);
    let tier = json!({ "path": images.name("tiered.qcow2"), "tier": images.name("tier"), "window": 600 });
    client.ask("POST", "/v1/disks", &tier, 201);
    let synced = client.ask("POST", "/v1/disks/tiered/tier/sync", &Value::Null, 200).json();
    assert_eq!(client.get("/v1/disks/tiered").json()["tier"]["epoch"], synced["epoch"]);
    client.ask("PUT", "/v1/disks/tiered/tier/hold", &json!({ "seconds": 600 }), 200);
    let uri = format!("nbd+unix:///tiered?socket={}", images.name("nbd.sock"));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 2 0 1M", &uri]);
    let later = json!({ "disks": ["tiered"], "name": "later", "publish_later": true });
    client.ask("POST", "/v1/snapshots", &later, 201);
    client.ask("DELETE", "/v1/disks/tiered/snapshots/later", &Value::Null, 204);
    client.ask("PUT", "/v1/disks/tiered/tier/hold", &json!({ "seconds": 0 }), 200);
    client.ask("PUT", "/v1/disks/tiered/replica", &json!({ "pinned": true }), 200);
    let pinned = client.get("/v1/replicas").json();
    assert_eq!(pinned["replicas"][0]["layers"][0]["pinned"], true, "{pinned}");
    client.ask("DELETE", "/v1/disks/tiered/replica", &Value::Null, 409);
    client.ask("PUT", "/v1/disks/tiered/replica", &json!({ "pinned": false }), 200);
    client.ask("DELETE", "/v1/disks/tiered/replica", &Value::Null, 200);
    handed_over(&mut client, &images);
    let rate = json!({ "bytes_a_second": 1 << 20 });
    for path in ["/v1/tier/rate", "/v1/move/rate"] {
        client.ask("PUT", path, &rate, 200);
        assert_eq!(client.get(path).json(), rate);
    }
    client.ask("GET", &format!("/v1/exports/{}", export["id"]), &Value::Null, 200);
    client.ask("DELETE", &format!("/v1/exports/{}", export["id"]), &Value::Null, 204);
    client.ask("DELETE", "/v1/disks/other", &Value::Null, 204);
    client.ask("POST", "/v1/shutdown", &Value::Null, 202);
    assert!(client.server.wait().success());

    let heard = heard(&mut events);
    heard.iter().for_each(check_event);
    assert!(heard.len() >= 10, "{heard:?}");
    // Its answer has no end that could be waited for as that of the others.
    client.asked.insert(("GET".into(), "/v1/events".into()));
    assert_eq!(client.asked, operations());
}

/// The tiered disk goes to another directory of the same host, as it would to another host.
fn handed_over(client: &mut Client, images: &Images) {
    let (path, tier) = (images.name("tiered.qcow2"), images.name("there"));
    client.ask(
        "POST",
        "/v1/disks",
        &json!({ "path": path, "name": "there", "tier": tier, "standby": true }),
        201,
    );
    let followed = client.ask("POST", "/v1/disks/there/tier/follow", &Value::Null, 200).json();
    assert_eq!(followed["state"], "standby");
    let size = json!({ "size_bytes": 32 << 20 });
    client.ask("PUT", "/v1/disks/there/size", &size, 409);
    let offer = "/v1/disks/tiered/tier/hand-over";
    let lost = client.ask("POST", offer, &Value::Null, 200).json();
    assert_eq!(client.ask("DELETE", offer, &Value::Null, 200).json()["state"], "publishing");
    let take = "/v1/disks/there/tier/take-over";
    client.ask("POST", take, &json!({ "head": lost["head"] }), 409);
    let offered = client.ask("POST", offer, &Value::Null, 200).json();
    assert_eq!(offered["state"], "handed_over");
    let taken = client.ask("POST", take, &json!({ "head": offered["head"] }), 200).json();
    assert_eq!((&taken["state"], &taken["epoch"]), (&json!("publishing"), &offered["epoch"]));
    client.ask("POST", take, &json!({}), 409);
    client.ask("DELETE", offer, &Value::Null, 503);
    client.ask("DELETE", "/v1/disks/tiered", &Value::Null, 204);
}

/// One of each kind, and all that can be done to one.
fn jobs(client: &mut Client) {
    let kinds = [
        json!({ "kind": "index_build", "disk": "web" }),
        json!({ "kind": "snapshot_delete", "disk": "other", "snapshots": ["s1"] }),
        json!({ "kind": "merge", "disk": "web", "first": { "number": 0 }, "last": { "number": 0 }, "drop_snapshots": true, "remove": "none" }),
        json!({ "kind": "flatten", "disk": "web", "drop_snapshots": true, "remove": "none" }),
    ];
    for kind in kinds {
        let id = client.ask("POST", "/v1/jobs", &kind, 201).json()["id"].clone();
        let path = format!("/v1/jobs/{id}");
        let limit = json!({ "action": "limit", "bytes_per_second": 1 << 30 });
        for change in [json!({ "action": "pause" }), limit, json!({ "action": "resume" })] {
            client.ask("POST", &path, &change, 200);
        }
        wait_until("the job", || client.get(&path).json()["state"] == "done");
        client.ask("POST", &path, &json!({ "action": "cancel" }), 200);
    }
    assert_eq!(client.get("/v1/jobs").json()["jobs"].as_array().unwrap().len(), 4);
}

/// The data of all events until the server ended.
fn heard(stream: &mut impl Read) -> Vec<Value> {
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}
