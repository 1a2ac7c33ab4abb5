//! Images that lie about themselves, used: errors at worst, never a panic.

use crate::common;
use crate::common::flat::{assert_same, read, write};
use crate::common::stock::{path_str, qemu_img};
use crate::common::{open, open_read_only, scratch, stock};
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_types::HostOffset;

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

/// An L1 table that is too short for the disk: an error when it is opened, not a panic when it is used.
#[test]
fn an_l1_table_that_is_too_short_is_refused() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "2G"]);
    let good = std::fs::read(&path).unwrap();
    for entries in [0u32, 1, 3] {
        let mut bytes = good.clone();
        bytes[36..40].copy_from_slice(&entries.to_be_bytes());
        std::fs::write(&path, bytes).unwrap();
        for read_only in [false, true] {
            let options = OpenOptions { read_only, ..OpenOptions::default() };
            let opened = Disk::open(&path, &options, &Resources::new(ResourceOptions::default()));
            let error = opened.expect_err("too short").to_string();
            assert!(error.contains("l1_size") && error.contains("whole disk"), "{error}");
        }
    }
}

/// Refcounts that call the header, a table or everything free: nothing is written over, and the error says what to do.
#[test]
fn tables_that_count_as_free_are_not_written_over() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "64M"]);
    stock::qemu_io(&path, &["write -q -P 0x21 0 1M".to_owned()]);
    let good = std::fs::read(&path).unwrap();
    let word = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap()) as usize;
    let (l1, table) = (word(40), word(48));
    let (l2, block) = (word(l1) & 0x00ff_ffff_ffff_fe00, word(table));
    // Refcounts of 16 bits in clusters of 64 KiB: all of them, or of one cluster.
    let wrong = [block..block + 65536, block..block + 2, block + l2 / 32768..block + l2 / 32768 + 2];
    for wrong in
        wrong.into_iter().chain([l1, table, block].map(|at| block + at / 32768..block + at / 32768 + 2))
    {
        let mut bytes = good.clone();
        bytes[wrong].fill(0);
        std::fs::write(&path, bytes).unwrap();
        let disk = open(&path);
        let error = write(&disk, 32 << 20, &[0x42; 512]).unwrap_err().to_string();
        assert!(error.contains("check --repair=all"), "{error}");
        write(&disk, 0, &[0x43; 512]).expect("in place");
        assert_same(&read(&disk, 512, 1 << 19).unwrap(), &[0x21; 1 << 19], 512, "what was there");
        disk.close().unwrap();
        drop(disk);
        qemu_img(&["check", "-q", "-r", "all", path_str(&path)]);
        let mut content = vec![0x21; 1 << 20];
        content[..512].fill(0x43);
        assert_same(&stock::content(&path, "qcow2")[..1 << 20], &content, 0, "after the repair");
    }
}

/// Who uses the cluster gets an error that shows the entry and where it lies; all others read on.
#[test]
fn subclusters_that_cannot_be_are_an_error_for_their_user() {
    let dir = scratch();
    let path = dir.path().join("disk");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "extended_l2=on", path_str(&path), "1M"]);
    let commands = ["write -q -P 0x21 0 64k", "write -q -P 0x22 128k 64k", "write -q -c -P 0x23 192k 64k"];
    stock::qemu_io(&path, &commands.map(str::to_owned));
    let good = std::fs::read(&path).unwrap();
    let word = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap()) as usize;
    let table = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    let cases = [
        (0, 0x0000_0100_ffff_ffff, "both allocated and zero"),
        (1, 0x0000_0000_0000_0080, "without a host offset"),
        (3, 0x0000_0002_0000_0000, "a compressed cluster with subclusters"),
    ];
    for (cluster, states, wrong) in cases {
        let mut bytes = good.clone();
        let entry = table + cluster * 16;
        bytes[entry + 8..entry + 16].copy_from_slice(&u64::to_be_bytes(states));
        std::fs::write(&path, bytes).unwrap();
        let (at, name) = (cluster as u64 * 65536, format!("with subclusters {states:#018x}"));
        let assert_named = |error: vmstrata_disk::Error, what: &str| {
            let text = error.to_string();
            assert!(text.contains(wrong) && text.contains(&name), "{what}: {text}");
            assert_eq!(error.offset(), Some(HostOffset::new(entry as u64)), "{what}: {text}");
            assert_eq!(error.path(), Some(&*path), "{what}: {text}");
        };
        let disk = open_read_only(&path);
        assert_named(read(&disk, at, 512).unwrap_err(), "a frozen layer's reader");
        assert_same(&read(&disk, 128 << 10, 65536).unwrap(), &[0x22; 65536], 128 << 10, "its neighbour");
        drop(disk);
        let disk = open(&path);
        assert_named(read(&disk, at, 512).unwrap_err(), "the active layer's reader");
        assert_named(write(&disk, at, &[1; 512]).unwrap_err(), "a writer");
        assert_named(disk.discard(common::flat::range(at, 2048)).unwrap_err(), "who discards");
        disk.close().unwrap();
    }
}
