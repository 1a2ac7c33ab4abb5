//! A disk that cannot be read everywhere: errors name the place, and spare everything else.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::nbd_common::{Fixture, Setup, Style, run, text};
use vmstrata_export::nbd::protocol::CommandFlags as F;
use vmstrata_export::nbd::protocol::request::Command;

const EIO: u32 = 5;
const MIB: u64 = 1 << 20;
const DAMAGED: u64 = 5 * MIB;

/// A compressed image of 8 MiB of ones whose cluster at [`DAMAGED`] does not decompress.
fn make_damaged(directory: &Path) -> std::path::PathBuf {
    let [plain, image] = ["plain", "damaged"].map(|name| directory.join(name));
    run("qemu-img", &["create", "-q", "-f", "raw", text(&plain), "8M"]);
    run("qemu-io", &["-f", "raw", "-c", "write -q -P 1 0 8M", text(&plain)]);
    run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&plain), text(&image)]);
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let word = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let host_offset = (1 << 54) - 1;
    let l2_table = word(word(40)) & host_offset & !511;
    let entry = word(l2_table + DAMAGED / 65536 * 8);
    assert_eq!(entry >> 62, 1, "a compressed cluster");
    // No block of deflate begins like this.
    file.write_all_at(&[0xff; 32], entry & host_offset).unwrap();
    image
}

#[test]
fn a_damaged_cluster_fails_alone_and_at_its_offset() {
    let directory = tempfile::tempdir().unwrap();
    let image = make_damaged(directory.path());
    let fixture = Fixture::serve(directory, &image, Setup { read_only: true, ..Setup::default() });
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let mut client = fixture.client(style);
        assert_eq!(client.read(DAMAGED, 4096), Err(EIO), "{style:?}");
        assert_eq!(client.read(DAMAGED + 65536, 4096).unwrap(), [1; 4096], "its neighbour");
        assert_eq!(client.read(0, 8 * MIB), Err(EIO));
        assert_eq!(client.read(0, 4 * MIB).unwrap(), [1; 4 << 20]);
    }
    let mut client = fixture.client(Style::Structured);
    let cookie = client.send(Command::Read, F::empty(), 0, 8 * MIB);
    let (mut good, mut bad, mut is_done) = (0, Vec::new(), false);
    while !is_done {
        let chunk = client.chunk();
        assert_eq!(chunk.cookie, cookie);
        is_done = chunk.is_done;
        match chunk.kind {
            1 => good += chunk.payload.len() as u64 - 8,
            0x8002 => bad.push(u64::from_be_bytes(chunk.payload[6..].try_into().unwrap())),
            other => panic!("chunk type {other:#x}"),
        }
    }
    assert_eq!(bad, [DAMAGED], "the piece that begins there");
    assert_eq!(good, 8 * MIB - MIB / 2, "all other pieces");
    assert_eq!(client.call(Command::Read, F::DF, DAMAGED - 512, 1024).unwrap_err(), EIO);
    assert_eq!(client.read(0, 1).unwrap(), [1]);
}
