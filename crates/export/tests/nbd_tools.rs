//! Stock clients against the server: nbdinfo, nbdcopy, nbdsh, qemu-img, qemu-io.

use crate::nbd_common::{Fixture, SIZE, Setup, chain_content, run, text, try_run};
use serde_json::Value;
use vmstrata_export::nbd::{Address, Listener};

fn json(program: &str, arguments: &[&str]) -> Value {
    serde_json::from_slice(&run(program, arguments).stdout).unwrap()
}

#[test]
fn nbdinfo_shows_what_the_export_can_do() {
    let fixture = Fixture::chain();
    let info = json("nbdinfo", &["--json", &fixture.uri()]);
    assert_eq!((&info["protocol"], &info["structured"]), (&"newstyle-fixed".into(), &true.into()));
    let export = &info["exports"][0];
    assert_eq!(export["export-name"], "disk");
    assert_eq!(export["description"], "a chain of layers");
    assert_eq!(export["export-size"], SIZE);
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation", "vmstrata:layer"]));
    for ability in [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        assert_eq!(export[ability], true, "{ability}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(
        (&export["block_size_minimum"], &export["block_size_maximum"]),
        (&1.into(), &(32 << 20).into())
    );
    let list = json("nbdinfo", &["--json", "--list", &fixture.uri()]);
    assert_eq!(list["exports"][0]["export-name"], "disk");
}

#[test]
fn nbdinfo_maps_show_allocation_and_layers() {
    let fixture = Fixture::chain();
    let map = |argument: &str| -> Vec<(u64, u64, u64)> {
        let map = json("nbdinfo", &["--json", argument, &fixture.uri()]);
        let number = |value: &Value| value.as_u64().unwrap();
        let extent = |item: &Value| (number(&item["offset"]), number(&item["length"]), number(&item["type"]));
        map.as_array().unwrap().iter().map(extent).collect()
    };
    let (k, m) = (1 << 10, 1 << 20);
    assert_eq!(
        map("--map"),
        [(0, 2560 * k, 0), (2560 * k, 256 * k, 3), (2816 * k, 256 * k, 0), (3 * m, 5 * m, 3)]
    );
    assert_eq!(
        map("--map=vmstrata:layer"),
        [(0, m, 0), (m, m, 1), (2 * m, m, 2), (3 * m, 5 * m, 0xffff_ffff)]
    );
}

#[test]
fn nbdcopy_reads_and_writes_the_whole_disk() {
    let fixture = Fixture::chain();
    let copy = fixture.path("copy");
    run("nbdcopy", &[&fixture.uri(), text(&copy)]);
    assert!(std::fs::read(&copy).unwrap() == chain_content());
    let target = Fixture::empty(SIZE);
    run("nbdcopy", &[text(&copy), &target.uri()]);
    run("nbdcopy", &["--flush", &fixture.uri(), &target.uri()]);
    let directory = target.stop();
    let image = directory.path().join("empty.qcow2");
    run("qemu-img", &["check", "-q", text(&image)]);
    run("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", text(&copy), text(&image)]);
}

#[test]
fn nbdcopy_takes_every_combination_of_its_options() {
    let fixture = Fixture::chain();
    for options in [
        &["--synchronous"][..],
        &["--connections=1", "--requests=1"],
        &["--request-size=4096", "--no-extents"],
        &["--allocated", "--request-size=33554432"],
    ] {
        let copy = fixture.path("copy");
        run("nbdcopy", &[options, &[&fixture.uri(), text(&copy)]].concat());
        assert!(std::fs::read(&copy).unwrap() == chain_content(), "{options:?}");
        std::fs::remove_file(copy).unwrap();
    }
}

#[test]
fn qemu_img_sees_the_same_disk_as_through_the_files() {
    let fixture = Fixture::chain_with(Setup { read_only: true, ..Setup::default() });
    let active = fixture.path("active");
    run("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", &fixture.uri(), text(&active)]);
    let converted = fixture.path("converted");
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &fixture.uri(), text(&converted)]);
    run("qemu-img", &["compare", "-q", text(&converted), text(&active)]);
    let zeros = |map: Value| -> Vec<(u64, bool)> {
        let extents = map.as_array().unwrap().iter();
        extents.map(|item| (item["start"].as_u64().unwrap(), item["zero"].as_bool().unwrap())).collect()
    };
    let by_nbd = zeros(json("qemu-img", &["map", "--output=json", "-f", "raw", &fixture.uri()]));
    assert_eq!(by_nbd, [(0, false), (2560 << 10, true), (2816 << 10, false), (3 << 20, true)]);
    let refused = try_run("qemu-io", &["-f", "raw", "-c", "write 0 512", &fixture.uri()]);
    assert!(!refused.status.success(), "the export is read-only");
}

#[test]
fn qemu_io_reads_back_what_it_writes() {
    let fixture = Fixture::chain();
    let commands = [
        "write -P 0x41 1000 5000",
        "write -f -P 0x42 1M 300k",
        "write -z -u 2M 192k",
        "write -z 10000 20000",
        "aio_write -P 0x43 4M 2M",
        "aio_write -P 0x44 6M 2M",
        "aio_flush",
        "flush",
        "read -P 0x41 1000 5000",
        "read -P 0x42 1M 300k",
        "read -P 0 2M 192k",
        "read -P 0 10000 20000",
        "read -P 0x43 4M 2M",
        "read -P 0x44 6M 2M",
        "discard 4M 1M",
        "read -P 0x11 512k 64k",
    ];
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    let uri = fixture.uri();
    arguments.push(&uri);
    let output = run("qemu-io", &arguments);
    let said = String::from_utf8_lossy(&output.stdout).to_lowercase();
    assert!(!said.contains("fail") && !said.contains("error"), "{said}");
    let expected = run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&fixture.path("flat"))]);
    assert!(expected.status.success());
    let directory = fixture.stop();
    let path = |name: &str| directory.path().join(name);
    run("qemu-img", &["check", "-q", text(&path("active"))]);
    run(
        "qemu-img",
        &["compare", "-q", "-f", "raw", "-F", "qcow2", text(&path("flat")), text(&path("active"))],
    );
}

#[test]
fn libnbd_uses_every_command_with_its_flags() {
    let fixture = Fixture::chain();
    let script = r#"
h.add_meta_context("base:allocation")
h.add_meta_context("vmstrata:layer")
h.connect_uri(uri)
assert h.get_structured_replies_negotiated() and h.can_meta_context("vmstrata:layer")
h.set_strict_mode(0)

h.pwrite(b"x" * 70000, 3 << 20, nbd.CMD_FLAG_FUA)
assert h.pread(70000, 3 << 20) == b"x" * 70000
assert h.pread(1 << 20, 1 << 20, nbd.CMD_FLAG_DF) == b"\x22" * (1 << 20)
h.zero(65536, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
h.zero(65536, 1 << 20, nbd.CMD_FLAG_NO_HOLE)
h.trim(65536, 2 << 20, nbd.CMD_FLAG_FUA)
h.cache(8 << 20, 0)
h.flush()
assert h.pread(65536, 0) == bytearray(65536)

def fails(errno, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errno == errno, (error.errno, errno)
    else:
        raise AssertionError(errno)
fails("ENOTSUP", h.zero, 100, 1, nbd.CMD_FLAG_FAST_ZERO)
fails("EINVAL", h.pread, 512, 8 << 20)
fails("ENOSPC", h.pwrite, b"x", 8 << 20)
fails("EINVAL", h.trim, 512, 8 << 20)
fails("EINVAL", h.cache, 512, 0, 1 << 12)

chunks = []
def chunk(data, offset, status, error):
    chunks.append((offset, len(data), status))
h.pread_structured(2 << 20, 4 << 20, chunk)
assert chunks == [(4 << 20, 2 << 20, nbd.READ_HOLE)], chunks

found = {}
def extent(context, offset, entries, error):
    found[context] = entries
h.block_status(3 << 20, 5 << 20, extent)
assert found == {"base:allocation": [3 << 20, 3], "vmstrata:layer": [3 << 20, 0xffffffff]}, found
h.block_status(1 << 20, 5 << 20, extent, nbd.CMD_FLAG_REQ_ONE)
assert found["vmstrata:layer"] == [1 << 20, 0xffffffff], found
h.shutdown()
"#;
    let script = format!("uri = {:?}\n{script}", fixture.uri());
    run("nbdsh", &["-c", &script]);
}

#[test]
fn several_connections_share_one_disk() {
    let fixture = Fixture::chain();
    let script = format!(
        r#"
uri = {:?}
others = [nbd.NBD() for _ in range(4)]
for other in others:
    other.connect_uri(uri)
h.connect_uri(uri)
assert h.can_multi_conn()
for round in range(50):
    writer = others[round % 4]
    writer.pwrite(bytes([round]) * 5000, round * 100000)
    assert h.pread(5000, round * 100000) == bytes([round]) * 5000
h.flush()
"#,
        fixture.uri()
    );
    run("nbdsh", &["-c", &script]);
}

#[test]
fn tcp_serves_like_a_unix_socket() {
    let mut fixture = Fixture::chain();
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let Address::Tcp { port, .. } = *listener.address() else { panic!("{:?}", listener.address()) };
    fixture.server.as_mut().unwrap().listen(listener).unwrap();
    let uri = format!("nbd://127.0.0.1:{port}/disk");
    let copy = fixture.path("copy");
    run("nbdcopy", &[&uri, text(&copy)]);
    assert!(std::fs::read(&copy).unwrap() == chain_content());
    run("nbdcopy", &[text(&copy), &uri]);
    run("qemu-img", &["compare", "-q", "-f", "raw", "-F", "raw", &uri, text(&copy)]);
}

#[test]
fn a_raw_disk_of_odd_size_is_padded_to_a_sector_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("odd.raw");
    let mut content: Vec<u8> = (0..1_000_001u32).map(|at| (at / 4096) as u8).collect();
    std::fs::write(&path, &content).unwrap();
    let fixture = Fixture::serve(directory, &path, Setup { read_only: true, ..Setup::default() });
    let info = json("nbdinfo", &["--json", &fixture.uri()]);
    assert_eq!(info["exports"][0]["export-size"], 1_000_448);
    content.resize(1_000_448, 0);
    let copy = fixture.path("copy");
    run("nbdcopy", &[&fixture.uri(), text(&copy)]);
    assert!(std::fs::read(&copy).unwrap() == content);
}
