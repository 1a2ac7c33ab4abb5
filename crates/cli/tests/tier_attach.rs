//! `vmstrata tier attach` of disks in use, and of images without a server.

use std::fs;

use crate::support::guest::Guest;
use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_ok, tool_ok, vmstrata, wait_until};
use serde_json::{Value, json};

/// An image on a NAS, and a model of what its guest wrote.
struct Nas {
    images: Images,
    path: String,
    model: String,
}

impl Nas {
    fn new() -> Self {
        let images = Images::new();
        fs::create_dir(images.path("nas")).unwrap();
        let (path, model) = (images.name("nas/web.qcow2"), images.name("model.qcow2"));
        for image in [&path, &model] {
            tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", image, "64M"]);
        }
        Self { images, path, model }
    }

    fn serve(&self, keys: &str) -> Server {
        let (disk, nbd) =
            (format!("path={}{keys}", self.path), format!("unix:{},rw", self.images.name("nbd")));
        Server::start(&["--disk", &disk, "--nbd", &nbd])
    }

    fn tier(&self) -> String {
        self.images.name("host")
    }

    /// A request for a job that runs until it is stopped.
    fn attach_slowly(&self) -> Value {
        json!({ "kind": "tier_attach", "disk": "web", "tier": self.tier(), "bytes_per_second": 1 << 20 })
    }

    fn model(&self, command: &str) {
        tool_ok("qemu-io", ["-f", "qcow2", "-c", command, &self.model]);
    }

    /// Has the guest write, and the model as well.
    fn write(&self, guest: &mut Guest, what: &str) {
        guest.write(what);
        self.model(&format!("write {what}"));
    }

    fn assert_published(&self) {
        assert_clean(self.path.as_ref());
        tool_ok("qemu-img", ["compare", &self.path, &self.model]);
    }

    /// Its guest would find an older state.
    fn refuse_without_tier(&self) {
        let (disk, nbd) = (format!("path={}", self.path), format!("unix:{}", self.images.name("other")));
        let refused = run_err(1, ["serve", "--disk", &disk, "--nbd", &nbd]);
        assert!(refused.contains("serve it with its key tier=DIR"), "{refused}");
    }

    fn assert_reads(&self, server: &Server) {
        tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri("web"), &self.model]);
    }
}

#[test]
fn a_guest_goes_on_while_its_disk_becomes_a_tiered_one() {
    let nas = Nas::new();
    let server = nas.serve("");
    let mut guest = Guest::new(&server);
    nas.write(&mut guest, "-P 1 0 4M");
    let said =
        server.ask_ok(["tier", "attach", "web", "--tier", &nas.tier(), "--with", "window=600,epochs=1h"]);
    assert!(said.starts_with("attached: web: epoch 1"), "{said}");
    assert!(said.contains("durable on this host at once, and in the repository within 10 min"), "{said}");
    assert_clean(nas.path.as_ref());
    nas.write(&mut guest, "-P 2 2M 4M");
    server.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();
    nas.assert_reads(&server);
    server.ask_ok(["snapshot", "create", "web", "--name", "mon"]);
    nas.write(&mut guest, "-P 3 8M 1M");
    let refused = server.ask_err(["tier", "attach", "web", "--tier", &nas.tier()]);
    assert!(refused.contains("is tiered, which does not go with"), "{refused}");
    guest.end();
    server.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();
    assert!(server.stop().success());

    nas.refuse_without_tier();
    let server = nas.serve(&format!(",tier={}", nas.tier()));
    nas.assert_reads(&server);
    assert!(server.stop().success());
}

#[test]
fn a_server_that_is_killed_while_it_attaches_a_disk_is_followed_by_one_that_goes_on() {
    let nas = Nas::new();
    // So much that it is read for a while.
    nas.model("write -P 9 16M 16M");
    fs::copy(&nas.model, &nas.path).unwrap();
    let server = nas.serve("");
    let mut guest = Guest::new(&server);
    nas.write(&mut guest, "-P 1 0 1M");
    let asked = nas.attach_slowly();
    let post = |asked: &Value| ask(&server.control(), "POST", "/v1/jobs", &asked.to_string());
    assert_eq!(post(&asked).status, 201);
    nas.write(&mut guest, "-P 2 1M 1M");
    let shown = server.ask_ok(["tier", "status", "web"]);
    assert!(shown.contains("BEING ATTACHED"), "{shown}");
    for command in [&["tier", "sync", "web"][..], &["snapshot", "create", "web", "--name", "mon"]] {
        let refused = server.ask_err(command.iter().copied());
        assert!(refused.contains("is being attached"), "{refused}");
    }
    assert_eq!(post(&asked).status, 409, "one job does it");
    let runtime = server.crash();
    guest.kill();

    nas.refuse_without_tier();
    let (disk, nbd) =
        (format!("path={},tier={}", nas.path, nas.tier()), format!("unix:{},rw", nas.images.name("nbd")));
    let server = Server::start_in(runtime, &["--disk", &disk, "--nbd", &nbd]);
    nas.assert_reads(&server);
    server.ask_ok(["tier", "sync", "web"]);
    nas.assert_published();
    assert!(server.stop().success());
}

#[test]
fn a_job_that_was_cancelled_goes_on_when_it_is_asked_for_again() {
    let nas = Nas::new();
    nas.model("write -P 9 16M 16M");
    fs::copy(&nas.model, &nas.path).unwrap();
    let server = nas.serve("");
    let mut guest = Guest::new(&server);
    let asked = nas.attach_slowly();
    let job = ask(&server.control(), "POST", "/v1/jobs", &asked.to_string()).json()["id"].clone();
    server.ask_ok(["job", "cancel", &job.to_string()]);
    let state = || ask(&server.control(), "GET", &format!("/v1/jobs/{job}"), "").json()["state"].clone();
    wait_until("it has ended", || state() == "cancelled");
    nas.write(&mut guest, "-P 2 1M 1M");
    let said = server.ask_ok(["tier", "attach", "web", "--tier", &nas.tier()]);
    assert!(said.starts_with("attached: web: epoch 1"), "{said}");
    guest.end();
    server.ask_ok(["disk", "remove", "web"]);
    nas.assert_published();
    assert!(server.stop().success());
}

#[test]
fn an_image_that_nobody_uses_is_attached_without_a_server() {
    let nas = Nas::new();
    let control = nas.images.name("none");
    let attach = ["tier", "attach", &nas.path, "--tier", &nas.tier()];
    let said = vmstrata().args(attach).env("VMSTRATA_RUNTIME_DIR", &control).output().unwrap();
    assert!(said.status.success(), "{said:?}");
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("epoch 1") && said.contains("serve it: vmstrata serve --disk path="), "{said}");
    assert!(run_err(1, attach).contains("it is a tiered disk already"));
    assert!(run_ok(["tier", "pins", &nas.path]).contains("copy"));
    let wrong = run_err(64, ["tier", "attach", &nas.path, "--tier", &nas.tier(), "--with", "group=guest"]);
    assert!(wrong.contains("only keys that go with tier"), "{wrong}");
    let server = nas.serve(&format!(",tier={}", nas.tier()));
    nas.assert_reads(&server);
    assert!(server.stop().success());
}
