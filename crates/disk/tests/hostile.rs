//! Images that lie about themselves, used: errors at worst, never a panic.

mod common;

use common::flat::{assert_same, read, write};
use common::stock::{path_str, qemu_img};
use common::{open, scratch};

/// Moves the refcount table of a new image to a cluster that no refcount block counts.
#[test]
fn a_refcount_table_that_is_not_counted_can_still_be_moved() {
    let dir = scratch();
    let path = dir.path().join("disk");
    let options = "cluster_size=512,refcount_bits=64";
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, path_str(&path), "4M"]);
    let mut bytes = std::fs::read(&path).unwrap();
    let table = u64::from_be_bytes(bytes[48..56].try_into().unwrap()) as usize;
    let far = 3 << 20;
    let copy = bytes[table..table + 512].to_vec();
    bytes.resize(far, 0);
    bytes.extend(copy);
    bytes[48..56].copy_from_slice(&(far as u64).to_be_bytes());
    std::fs::write(&path, bytes).unwrap();
    let disk = open(&path);
    let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 9) as u8).collect();
    write(&disk, 0, &content).unwrap();
    disk.flush().unwrap();
    assert_same(&read(&disk, 0, content.len()).unwrap(), &content, 0, "after the table moved");
    disk.close().unwrap();
}
