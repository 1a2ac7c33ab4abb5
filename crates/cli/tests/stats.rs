//! What a server counts, against what its clients did.

use crate::support;
use std::fs::File;
use std::io::{Read as _, Write as _};

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, tool_ok};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

/// A chain of three layers, 16 clusters each: 0..16 from the base, 16..32 from the middle, 32..48 from the active layer.
fn start(images: &Images) -> Server {
    images.create("base.qcow2", &["64M"]);
    images.write_layer("base.qcow2", &["write -P 1 0 1M"]);
    images.create("middle.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    images.write_layer("middle.qcow2", &["write -P 2 1M 1M"]);
    let top = images.create("top.qcow2", &["-b", "middle.qcow2", "-F", "qcow2"]);
    images.write_layer("top.qcow2", &["write -P 3 2M 1M"]);
    let disk = format!("path={},name=web", top.display());
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    Server::start(&["--disk", &disk, "--nbd", &nbd])
}

fn stats(server: &Server) -> Value {
    ask(&server.control(), "GET", "/v1/disks/web", "").json()["stats"].clone()
}

fn io(server: &Server, commands: &[&str]) {
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    tool_ok("qemu-io", ["-f", "raw"].into_iter().chain(commands).chain([server.uri("web").as_str()]));
}

/// Bytes read from the layers whose depths begin with `from`.
fn depth(stats: &Value, from: u64) -> u64 {
    let found = stats["read_depths"].as_array().unwrap().iter().find(|depth| depth["from"] == from);
    found.map_or(0, |depth| depth["bytes"].as_u64().unwrap())
}

fn zeros(stats: &Value) -> u64 {
    stats["read_zero_bytes"].as_u64().unwrap()
}

#[test]
fn requests_and_bytes_are_those_of_the_clients() {
    let images = Images::new();
    let server = start(&images);
    let before = stats(&server);
    io(
        &server,
        &["read 0 64k", "read 64k 64k", "write 2M 4k", "flush", "write -z 2560k 64k", "discard 2624k 64k"],
    );
    let after = stats(&server);
    let grew = |path: [&str; 2]| {
        after[path[0]][path[1]].as_u64().unwrap() - before[path[0]][path[1]].as_u64().unwrap()
    };
    // A client looks at the disk's first bytes too, and flushes when it goes.
    assert!(grew(["read", "bytes"]) >= 2 << 16 && grew(["read", "requests"]) >= 2, "{after}");
    assert_eq!((grew(["write", "requests"]), grew(["write", "bytes"])), (1, 4096));
    assert_eq!((grew(["write_zeroes", "requests"]), grew(["write_zeroes", "bytes"])), (1, 65536));
    assert_eq!((grew(["discard", "requests"]), grew(["discard", "bytes"])), (1, 65536));
    assert!(grew(["flush", "requests"]) >= 1);
    for kind in ["read", "write", "flush", "discard", "write_zeroes", "prefetch"] {
        assert_eq!(grew([kind, "errors"]), 0, "{kind}");
    }
    let timed: u64 = after["other_latency"]["buckets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|bucket| bucket["count"].as_u64().unwrap())
        .sum();
    let others = ["flush", "discard", "write_zeroes", "prefetch"]
        .map(|kind| after[kind]["requests"].as_u64().unwrap());
    assert_eq!(timed, others.iter().sum::<u64>(), "all of them are timed");
    assert!(server.stop().success());
}

#[test]
fn bytes_are_counted_by_how_deep_they_were_read() {
    let images = Images::new();
    let server = start(&images);
    // The ring reads at first; then what is in memory is copied.
    let mut before = stats(&server);
    for _ in 0..3 {
        io(&server, &["read 64k 64k", "read 1M 128k", "read 2M 256k", "read 3M 32k"]);
        let after = stats(&server);
        let grew = |from| depth(&after, from) - depth(&before, from);
        // A client looks at the disk's first sector too, which is in the base.
        assert!((65536..65536 + 65536).contains(&grew(2)), "{after}");
        assert_eq!((grew(1), grew(0)), (128 << 10, 256 << 10), "{before} {after}");
        assert_eq!(zeros(&after) - zeros(&before), 32 << 10, "longer ones are not read, but told as holes");
        before = after;
    }
    assert!(server.stop().success());
}

#[test]
fn compressed_bytes_are_counted_as_what_they_are_read_as() {
    let images = Images::new();
    images.create("plain.qcow2", &["1M"]);
    images.write_layer("plain.qcow2", &["write -P 1 0 512k"]);
    let (plain, packed) = (images.name("plain.qcow2"), images.name("packed.qcow2"));
    tool_ok("qemu-img", ["convert", "-c", "-O", "qcow2", &plain, &packed]);
    let top = images.create("top.qcow2", &["-b", "packed.qcow2", "-F", "qcow2"]);
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={},name=web", top.display()), "--nbd", &nbd]);
    let before = stats(&server);
    io(&server, &["read -P 1 64k 256k"]);
    let after = stats(&server);
    assert!(after["read"]["at_workers"].as_u64().unwrap() > 0, "whoever may block unpacks: {after}");
    assert!((depth(&after, 1) - depth(&before, 1)) >= 256 << 10, "{before} {after}");
    assert!(server.stop().success());
}

#[test]
fn lookups_are_counted_by_whether_memory_answered_them() {
    let images = Images::new();
    let server = start(&images);
    io(&server, &["read 0 4k", "read 1M 4k"]);
    let before = stats(&server);
    let of = |stats: &Value, name: &str| stats[name].as_u64().unwrap();
    assert!(of(&before, "metadata_misses") >= 1, "nothing was in memory at first: {before}");
    io(&server, &["read 0 4k", "read 1M 4k"]);
    let after = stats(&server);
    assert!(of(&after, "metadata_hits") >= of(&before, "metadata_hits") + 2, "{before} {after}");
    assert_eq!(of(&after, "metadata_misses"), of(&before, "metadata_misses"));
    let status: Value = serde_json::from_str(&server.ask_ok(["status", "--json"])).unwrap();
    assert_eq!(status["disks"][0]["metadata_misses"], after["metadata_misses"], "{status}");
    assert!(server.ask_ok(["status"]).contains("HITS"));
    let metrics = ask(&server.control(), "GET", "/v1/metrics", "").body;
    let line = format!(
        r#"vmstrata_disk_metadata_lookups_total{{disk="web",result="hit"}} {}"#,
        of(&after, "metadata_hits")
    );
    assert!(metrics.contains(&line), "{metrics}");
    assert!(server.stop().success());
}

#[test]
fn top_shows_a_disk_at_work() {
    let images = Images::new();
    let server = start(&images);
    let uri = server.uri("web");
    let bench = ["bench", "-f", "raw", "-c", "10000000", "-d", "8", "-s", "4k", "-S", "4k", &uri];
    let mut reader = std::process::Command::new("qemu-img")
        .args(bench)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let said = server.ask(["top", "--once", "--json", "--interval", "0.5"]);
    let text = server.ask_ok(["top", "--once", "--interval", "0.1"]);
    let _ = reader.kill();
    reader.wait().unwrap();
    let disks: Value = serde_json::from_slice(&said.stdout).unwrap();
    assert!(disks[0]["reads_per_second"].as_f64().unwrap() > 100.0, "{disks}");
    assert!(disks[0]["read_p50_us"].as_f64().unwrap() > 0.0, "{disks}");
    assert_eq!((&disks[0]["name"], &disks[0]["layers"]), (&"web".into(), &3.into()));
    assert!(text.contains("DISK  LAYERS  READ/s") && text.contains("web        3"), "{text}");
    assert!(server.stop().success());
}

#[test]
fn top_fits_its_window_shows_no_keys_and_ends_with_q() {
    let images = Images::new();
    let server = start(&images);
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).and_then(|()| unlockpt(&master)).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let window = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    tcsetwinsize(&window, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let echoes = || tcgetattr(&window).unwrap().local_modes.contains(LocalModes::ECHO);
    assert!(echoes());
    let mut top = support::vmstrata()
        .args(["top", "--interval", "0.1"])
        .env("VMSTRATA_CONTROL", server.control())
        .stdin(window.try_clone().unwrap())
        .stdout(window.try_clone().unwrap())
        .spawn()
        .unwrap();
    let mut screen = File::from(master);
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains("web ") {
        let mut bytes = [0; 4096];
        let read = screen.read(&mut bytes).unwrap();
        shown.extend_from_slice(&bytes[..read]);
    }
    assert!(!echoes());
    let shown = String::from_utf8_lossy(&shown).replace("\u{1b}[K", "");
    let headline = shown.lines().find(|line| line.contains("DISK")).unwrap().trim_end();
    assert!(headline.chars().count() <= 80 && headline.contains("ERRORS"), "{headline}");
    assert!(!headline.contains("HITS"), "what matters least goes first: {headline}");
    screen.write_all(b"xq").unwrap();
    assert!(top.wait().unwrap().success());
    assert!(echoes(), "the terminal has its mode back");
    assert!(server.stop().success());
}

#[test]
fn metrics_have_histograms_that_add_up() {
    let images = Images::new();
    let server = start(&images);
    io(&server, &["read 0 4M", "flush", "flush"]);
    let metrics = ask(&server.control(), "GET", "/v1/metrics", "").body;
    let value = |name: &str| {
        let line = metrics
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name}\n{metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let bucket = r#"vmstrata_disk_latency_seconds_bucket{le="+Inf",disk="web",kind="other"}"#;
    let count = r#"vmstrata_disk_latency_seconds_count{disk="web",kind="other"}"#;
    assert_eq!(value(bucket), value(count));
    assert!(
        value(count) >= 2.0 && value(r#"vmstrata_disk_latency_seconds_sum{disk="web",kind="other"}"#) > 0.0
    );
    assert!(value(r#"vmstrata_disk_request_bytes_total{disk="web",kind="read"}"#) >= f64::from(3 << 20));
    assert!(server.stop().success());
}

#[test]
fn metrics_pass_promtool() {
    // A package of Prometheus's: `scripts/test` fetches it.
    if std::process::Command::new("promtool").arg("--version").output().is_err() {
        return eprintln!("skipped: promtool is not installed");
    }
    let images = Images::new();
    let server = start(&images);
    tool_ok("qemu-io", ["-f", "raw", "-r", "-c", "read 0 1M", &server.uri("web")]);
    let metrics = images.path("metrics");
    std::fs::write(&metrics, ask(&server.control(), "GET", "/v1/metrics", "").body).unwrap();
    let checked = std::process::Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(std::fs::File::open(&metrics).unwrap())
        .output()
        .unwrap();
    assert!(checked.status.success(), "{checked:?}");
    assert!(server.stop().success());
}
