//! L1, L2 and refcount entries as stock tools write them: our decoders must find every cluster `qemu-img map`
//! reports, and count exactly the references that stock tools counted.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::common::qemu_img_ok;
use serde_json::Value;
use vmstrata_qcow2::bitmap::{self, BitmapsExtension};
use vmstrata_qcow2::{Header, L2Entry, RawEntry, SubclusterState, refcount, snapshot};
use vmstrata_types::{GuestOffset, HostOffset};

/// A stock image and the references to each of its clusters, as we count them.
struct Walk {
    bytes: Vec<u8>,
    header: Header,
    references: BTreeMap<HostOffset, u64>,
}

impl Walk {
    fn open(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
        Self { bytes, header, references: BTreeMap::new() }
    }

    fn entry(&self, table: HostOffset, index: usize) -> u64 {
        let at = table.get() as usize + index * 8;
        // Stock tools may leave the end of the last cluster unwritten.
        self.bytes.get(at..at + 8).map_or(0, |raw| u64::from_be_bytes(raw.try_into().unwrap()))
    }

    fn l2_entry(&self, table: HostOffset, index: usize) -> RawEntry {
        let format = self.header.entry_format();
        let at = table.get() as usize + index * format.entry_len();
        let bytes = self.bytes.get(at..at + format.entry_len()).unwrap_or_default();
        format.raw_entries(bytes).next().unwrap_or_default()
    }

    fn count(&mut self, start: HostOffset, len: u64) {
        let bits = self.header.cluster_bits;
        let mut cluster = start.align_down(bits);
        while cluster < start + len {
            *self.references.entry(cluster).or_default() += 1;
            cluster = cluster + bits.size();
        }
    }

    /// Visits every L2 entry reachable from an L1 table, counting the L2 tables on the way.
    fn visit(
        &mut self,
        l1: HostOffset,
        l1_size: u32,
        mut visit: impl FnMut(&mut Self, GuestOffset, L2Entry),
    ) {
        let (format, geometry) = (self.header.entry_format(), self.header.geometry());
        for l1_index in 0..l1_size as usize {
            let Some(table) = format.l1(self.entry(l1, l1_index)).unwrap().table else { continue };
            self.count(table, 1);
            for l2_index in 0..geometry.l2_entries() {
                let entry = format.l2(self.l2_entry(table, l2_index)).unwrap();
                visit(self, geometry.guest_offset(l1_index, l2_index), entry);
            }
        }
    }

    fn count_l1(&mut self, l1: HostOffset, l1_size: u32) {
        self.count(l1, u64::from(l1_size) * 8);
        self.visit(l1, l1_size, |walk, _, entry| match entry {
            L2Entry::Compressed { host, len } => walk.count(host, len),
            entry => entry.host().into_iter().for_each(|host| walk.count(host, 1)),
        });
    }

    fn count_snapshots(&mut self) {
        if self.header.snapshot_count == 0 {
            return;
        }
        let at = self.header.snapshots_offset;
        let len = self.bytes.len() as u64;
        let found = snapshot::parse_table(&self.bytes[at.get() as usize..], &self.header, len).unwrap();
        self.count(at, found.iter().map(|one| one.entry_len as u64).sum());
        for one in found {
            self.count_l1(one.l1_table_offset, one.l1_size);
        }
    }

    fn count_bitmaps(&mut self) {
        let (extensions, len) = (self.header.extensions(&self.bytes).unwrap(), self.bytes.len() as u64);
        let Some(data) = extensions.bitmaps() else { return };
        let extension = BitmapsExtension::parse(data, 0, &self.header, len).unwrap();
        let directory =
            &self.bytes[extension.directory_offset.get() as usize..][..extension.directory_len as usize];
        let bitmaps = extension.parse_directory(directory, &self.header, len).unwrap();
        self.count(extension.directory_offset, extension.directory_len);
        for one in bitmaps {
            self.count(one.table_offset, u64::from(one.table_size) * 8);
            for index in 0..one.table_size as usize {
                let raw = self.entry(one.table_offset, index);
                if let Some(data) = bitmap::decode_table_entry(raw, self.header.cluster_bits).unwrap() {
                    self.count(data, 1);
                }
            }
        }
    }

    /// Where each refcount block lies.
    fn blocks(&self) -> Vec<Option<HostOffset>> {
        let (table, bits) = (self.header.refcount_table_offset, self.header.cluster_bits);
        let entries = 0..self.header.refcount_table_entries();
        entries.map(|at| refcount::decode_table_entry(self.entry(table, at), bits).unwrap()).collect()
    }

    fn count_everything(&mut self) {
        let table_len = u64::from(self.header.refcount_table_clusters) * self.header.cluster_bits.size();
        self.count(HostOffset::ZERO, 1);
        self.count(self.header.refcount_table_offset, table_len);
        for block in self.blocks().into_iter().flatten() {
            self.count(block, 1);
        }
        self.count_l1(self.header.l1_table_offset, self.header.l1_size);
        self.count_snapshots();
        self.count_bitmaps();
    }

    /// Refcounts above zero, as stored.
    fn stored(&self) -> BTreeMap<HostOffset, u64> {
        let (order, bits) = (self.header.refcount_order, self.header.cluster_bits);
        let per_block = order.entries_per_block(bits);
        let mut stored = BTreeMap::new();
        for (at, block) in self.blocks().into_iter().enumerate() {
            let Some(block) = block else { continue };
            let block = &self.bytes[block.get() as usize..][..bits.size() as usize];
            for index in 0..per_block {
                let cluster = (at * per_block + index) as u64 * bits.size();
                match order.get(block, index) {
                    0 => {}
                    refcount => drop(stored.insert(HostOffset::new(cluster), refcount)),
                }
            }
        }
        stored
    }
}

fn qemu_io(dir: &Path, commands: &[&str]) {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.current_dir(dir).args(["-f", "qcow2"]);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    let output = qemu_io.arg("image").output().expect("qemu-io is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("failed"), "{text}");
}

/// An image with data, zero and compressed clusters, some of them shared with snapshots where the refcounts
/// are wide enough, and a bitmap. With subclusters, some are data, zeros and nothing in one cluster.
fn make(dir: &Path, cluster_bits: u32, order: u32, more: &str) {
    let (size, width) = (1u64 << cluster_bits, 1 << order);
    let asked = format!("cluster_size={size},refcount_bits={width},{more}");
    let total = (size * 64).to_string();
    qemu_img_ok(dir, &["create", "-q", "-f", "qcow2", "-o", &asked, "image", &total]);
    let at = |cluster: u64, op: &str, count: u64| format!("{op} {} {}", cluster * size, count * size);
    qemu_io(
        dir,
        &[
            &at(0, "write -P 1", 5),
            &at(7, "write -z -u", 3),
            &at(1, "write -z", 1),
            &at(12, "write -c -P 3", 1),
            &at(13, "write -c -P 4", 1),
            &at(14, "write -c -P 5", 1),
            &at(60, "write -P 6", 4),
        ],
    );
    if order >= 2 {
        qemu_img_ok(dir, &["snapshot", "-c", "one", "image"]);
        qemu_io(dir, &[&at(2, "write -P 7", 1), &at(13, "write -P 8", 1)]);
        qemu_img_ok(dir, &["snapshot", "-c", "two", "image"]);
    }
    if more.contains("extended_l2=on") {
        let unit = size / 32;
        let at = |cluster: u64, first: u64, op: &str, count: u64| {
            format!("{op} {} {}", cluster * size + first * unit, count * unit)
        };
        let zero = at(30, 9, "write -z -u", 3);
        qemu_io(
            dir,
            &[&at(30, 1, "write -P 10", 4), &zero, &at(31, 30, "write -P 11", 4), &at(40, 3, "write -z", 1)],
        );
    }
    qemu_img_ok(dir, &["bitmap", "--add", "-g", "512", "image", "changes"]);
    qemu_io(dir, &[&at(20, "write -P 9", 2)]);
}

#[test]
fn every_stored_refcount_is_the_number_of_references_we_find() {
    let dir = tempfile::tempdir().unwrap();
    for cluster_bits in [9, 12, 16, 18] {
        for order in 0..=6 {
            let mut more = format!("compression_type={}", if order % 2 == 0 { "zlib" } else { "zstd" });
            if cluster_bits >= 14 && order % 3 == 1 {
                more += ",extended_l2=on";
            }
            make(dir.path(), cluster_bits, order, &more);
            let mut walk = Walk::open(&dir.path().join("image"));
            walk.count_everything();
            assert_eq!(walk.references, walk.stored(), "cluster_bits {cluster_bits}, order {order}");
            // Compressed clusters share one from two bits on, snapshots from four.
            let most = *walk.references.values().max().unwrap();
            assert!(if order == 0 { most == 1 } else { most > 1 }, "order {order}: at most {most}");
        }
    }
}

/// What `qemu-img map` says of the clusters, one by one: offset of plain data, kind of the rest.
fn stock_map(dir: &Path, size: u64) -> Vec<(bool, bool, Option<u64>)> {
    let map: Value = serde_json::from_str(&qemu_img_ok(dir, &["map", "--output=json", "image"])).unwrap();
    let mut clusters = Vec::new();
    for extent in map.as_array().unwrap() {
        for at in 0..extent["length"].as_u64().unwrap() / size {
            let host = extent["offset"].as_u64().map(|offset| offset + at * size);
            clusters.push((extent["data"] == true, extent["zero"] == true, host));
        }
    }
    clusters
}

#[test]
fn every_l2_entry_says_what_stock_tools_say() {
    let dir = tempfile::tempdir().unwrap();
    for (cluster_bits, more) in [
        (9, "compat=1.1"),
        (13, "compat=1.1"),
        (16, "compat=1.1"),
        (21, "compat=1.1"),
        (14, "extended_l2=on"),
        (17, "extended_l2=on"),
        (21, "extended_l2=on"),
    ] {
        make(dir.path(), cluster_bits, 4, more);
        let parts = if more == "extended_l2=on" { 32 } else { 1 };
        let unit = (1 << cluster_bits) / parts;
        let stock = stock_map(dir.path(), unit);
        let mut walk = Walk::open(&dir.path().join("image"));
        let (l1, l1_size) = (walk.header.l1_table_offset, walk.header.l1_size);
        let (mut found, mut kinds) = (vec![(false, true, None); 64 * parts as usize], [0; 5]);
        walk.visit(l1, l1_size, |_, at, entry| {
            let first = (at.get() / unit) as usize;
            let Some(units) = found.get_mut(first..first + parts as usize) else { return };
            let kind = match entry {
                L2Entry::Unallocated => 0,
                L2Entry::Zero { .. } => 1,
                L2Entry::Data { .. } => 2,
                L2Entry::Compressed { .. } => 3,
                L2Entry::Subclusters { .. } => 4,
            };
            kinds[kind] += 1;
            for (number, said) in (0..).zip(units) {
                let at = |host: HostOffset| host.get() + number * unit;
                *said = match entry {
                    L2Entry::Unallocated => (false, true, None),
                    L2Entry::Zero { host, .. } => (false, true, host.map(at)),
                    L2Entry::Data { host, .. } => (true, false, Some(at(host))),
                    L2Entry::Compressed { .. } => (true, false, None),
                    L2Entry::Subclusters { host, states, .. } => match states.state(number as u32) {
                        SubclusterState::Allocated => (true, false, host.map(at)),
                        SubclusterState::Zero | SubclusterState::Unallocated => (false, true, host.map(at)),
                    },
                };
            }
        });
        assert_eq!(found, stock, "cluster_bits {cluster_bits}, {more}");
        let kinds = &kinds[..if parts > 1 { 5 } else { 4 }];
        assert!(kinds.iter().all(|&count| count > 0), "every kind of entry is there: {kinds:?}");
    }
}

/// Stock tools and we write the same bits for the same cluster.
#[test]
fn entries_encode_to_the_bits_stock_tools_wrote() {
    let dir = tempfile::tempdir().unwrap();
    for (cluster_bits, more) in [
        (9, "compression_type=zstd"),
        (10, "compression_type=zstd"),
        (16, "compression_type=zstd"),
        (21, "compression_type=zstd"),
        (14, "extended_l2=on"),
        (18, "extended_l2=on,compression_type=zstd"),
    ] {
        make(dir.path(), cluster_bits, 4, more);
        let walk = Walk::open(&dir.path().join("image"));
        let (format, l1) = (walk.header.entry_format(), walk.header.l1_table_offset);
        let mut seen = 0;
        for l1_index in 0..walk.header.l1_size as usize {
            let raw = walk.entry(l1, l1_index);
            let entry = format.l1(raw).unwrap();
            assert_eq!(format.encode_l1(entry), raw);
            let Some(table) = entry.table else { continue };
            for l2_index in 0..walk.header.geometry().l2_entries() {
                let raw = walk.l2_entry(table, l2_index);
                assert_eq!(format.encode_l2(format.l2(raw).unwrap()), raw, "{raw}");
                seen += usize::from(!raw.is_empty());
            }
        }
        assert!(seen >= 15, "{seen} entries");
    }
}
