//! Desktops that are clones of one base, all on a NAS.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::guest::Guest;
use super::http::ask;
use super::server::Server;
use super::{Images, run_ok, tool_ok, wait_until};
use serde_json::json;

/// A base that was published once, and desktops that are clones of it, all on a NAS.
pub struct Nas {
    pub images: Images,
    /// What the base holds.
    pub model: String,
}

/// Publishes a version of the base, with what its guest writes.
pub fn publish(images: &Images, version: &str, writes: &[&str]) {
    let [base, tier] = ["nas/golden.qcow2", "publisher"].map(|file| images.name(file));
    let nbd = format!("unix:{},rw", images.name("publisher.sock"));
    let server = Server::start(&["--disk", &format!("path={base},tier={tier}"), "--nbd", &nbd]);
    for write in writes {
        tool_ok("qemu-io", ["-f", "raw", "-c", write, "-c", "flush", &server.uri("golden")]);
    }
    server.ask_ok(["snapshot", "create", "golden", "--name", version]);
    assert!(server.stop().success());
}

impl Nas {
    pub fn new() -> Self {
        let images = Images::new();
        fs::create_dir(images.path("nas")).unwrap();
        let [base, model] = ["nas/golden.qcow2", "model.qcow2"].map(|file| images.name(file));
        let writes: Vec<String> = (0..8)
            .flat_map(|mib| ["-c".to_owned(), format!("write -P {} {}M 1M", mib + 1, 3 * mib)])
            .collect();
        for image in [&base, &model] {
            tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", image, "64M"]);
            tool_ok(
                "qemu-io",
                ["-f", "qcow2"].into_iter().chain(writes.iter().map(String::as_str)).chain([&**image]),
            );
        }
        publish(&images, "v1", &[]);
        for desk in ["desk0", "desk1", "desk2"] {
            run_ok([
                "snapshot",
                "clone",
                &format!("{base}@v1"),
                "-o",
                &images.name(&format!("nas/{desk}.qcow2")),
            ]);
        }
        Self { images, model }
    }

    pub fn args(&self, more: &[&str]) -> Vec<String> {
        let (nas, host) = (self.images.name("nas"), self.images.name("host"));
        let disk =
            |desk| ["--disk".to_owned(), format!("path={nas}/{desk}.qcow2,replica={host},backing={nas}")];
        let nbd = ["--nbd".to_owned(), format!("unix:{},rw", self.images.name("host.sock"))];
        let disks = ["desk0", "desk1", "desk2"].into_iter().flat_map(disk);
        disks.chain(nbd).chain(more.iter().map(|arg| (*arg).to_owned())).collect()
    }

    pub fn serve(&self, more: &[&str]) -> Server {
        let args = self.args(more);
        Server::start(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub fn assert_as_base(&self, server: &Server, desk: &str) {
        tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri(desk), &self.model]);
    }

    /// The directory of the base's layers, and another name for it.
    pub fn repository(&self) -> [PathBuf; 2] {
        ["nas/golden.qcow2.tier", "nas/away"].map(|name| self.images.path(name))
    }

    /// The file that keeps the base on the host.
    pub fn kept(&self) -> PathBuf {
        let files = fs::read_dir(self.images.path("host/cache")).unwrap().map(|entry| entry.unwrap().path());
        let mut kept = files.filter(|file| file.extension().is_some_and(|suffix| suffix == "chunks"));
        kept.next().expect("one layer")
    }
}

/// Whether the first desktop reads as an image.
pub fn is_as(server: &Server, model: &str) {
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri("desk0"), model]);
}

/// Writes to the first desktop and to a model until `stop` is set, and reads each write back. Returns the number of writes.
pub fn write_until(stop: &AtomicBool, server: &Server, model: &str) -> u64 {
    let mut guest = Guest::of(server, "desk0");
    for number in 1.. {
        let place = format!("{}k 60k", (40 << 10) | (number % 16 * 64));
        guest.write(&format!("-P {} {place}", number % 200));
        tool_ok("qemu-io", ["-f", "qcow2", "-c", &format!("write -P {} {place}", number % 200), model]);
        let read = format!("read -P {} {place}", number % 200);
        let said =
            tool_ok("qemu-io", ["-f", "raw", "-c", &read, "-c", "read -P 90 1M 2M", &server.uri("desk0")]);
        assert!(!said.contains("failed"), "{said}");
        if stop.load(Ordering::Relaxed) {
            guest.end();
            return number;
        }
    }
    unreachable!("numbers do not end")
}

/// Begins a rebase of the first desktop that takes its time; returns the job's path once something is copied.
pub fn begin_slow_rebase(server: &Server, onto: &str) -> String {
    let asked = json!({ "kind": "rebase", "disk": "desk0", "onto": onto, "bytes_per_second": 65536 });
    let job = ask(&server.control(), "POST", "/v1/jobs", &asked.to_string()).json();
    let path = format!("/v1/jobs/{}", job["id"]);
    let bytes = || ask(&server.control(), "GET", &path, "").json()["bytes"].as_u64();
    wait_until("something is copied", || bytes() > Some(0));
    path
}
