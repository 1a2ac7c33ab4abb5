//! Images made by stock tools: what we parse is what was asked for, and re-encoding gives the same bytes.

use std::path::Path;

use crate::common::qemu_img_ok;
use vmstrata_qcow2::bitmap::{BitmapFlags, BitmapsExtension};
use vmstrata_qcow2::header::field;
use vmstrata_qcow2::{
    Autoclear, Compatible, CompressionType, Extensions, Header, Incompatible, RefcountOrder, snapshot,
};

/// A stock image, parsed.
struct Stock {
    bytes: Vec<u8>,
    header: Header,
    extensions: Extensions,
}

impl Stock {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap_or_else(|error| panic!("{error}"));
        let extensions = header.extensions(&bytes).unwrap_or_else(|error| panic!("{error}"));
        Self { bytes, header, extensions }
    }

    fn create(dir: &Path, options: &str, size: &str) -> Self {
        qemu_img_ok(dir, &["create", "-q", "-f", "qcow2", "-o", options, "image", size]);
        Self::read(&dir.join("image"))
    }

    fn name(&self) -> Option<&[u8]> {
        self.header.backing_name(&self.bytes).unwrap()
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Re-encodes the first cluster and compares.
    fn assert_same_bytes(&self, context: &str) {
        let again = self.header.encode(&self.extensions, self.name()).unwrap();
        let cluster = &self.bytes[..self.header.cluster_bits.size() as usize];
        assert!(again == cluster[..again.len()], "{context}");
        assert!(cluster[again.len()..].iter().all(|&byte| byte == 0), "{context}");
    }
}

#[test]
fn every_cluster_size_and_refcount_width_and_compression() {
    let dir = tempfile::tempdir().unwrap();
    for cluster_bits in 9..=21 {
        for order in 0..=6 {
            let compression = if (cluster_bits + order) % 2 == 0 { "zlib" } else { "zstd" };
            let (cluster_size, width) = (1 << cluster_bits, 1 << order);
            let asked =
                format!("cluster_size={cluster_size},refcount_bits={width},compression_type={compression}");
            let image = Stock::create(dir.path(), &asked, "10M");
            let header = &image.header;
            assert_eq!(header.cluster_bits.get(), cluster_bits, "{asked}");
            assert_eq!(header.refcount_order, RefcountOrder::new(order).unwrap(), "{asked}");
            assert_eq!((header.version, header.size, header.header_length), (3, 10 << 20, 112), "{asked}");
            assert_eq!(u64::from(header.l1_size), header.geometry().l1_entries(10 << 20), "{asked}");
            let zstd = header.compression_type == CompressionType::Zstd;
            assert_eq!(zstd, compression == "zstd", "{asked}");
            assert_eq!(header.incompatible.contains(Incompatible::COMPRESSION_TYPE), zstd, "{asked}");
            image.assert_same_bytes(&asked);
        }
    }
}

#[test]
fn version_2_in_every_cluster_size() {
    let dir = tempfile::tempdir().unwrap();
    for cluster_bits in 9..=21 {
        let asked = format!("compat=0.10,cluster_size={}", 1 << cluster_bits);
        let image = Stock::create(dir.path(), &asked, "10M");
        assert_eq!((image.header.version, image.header.header_length), (2, 72), "{asked}");
        assert_eq!(image.header.refcount_order, RefcountOrder::DEFAULT, "{asked}");
        assert_eq!(image.header.incompatible, Incompatible::empty(), "{asked}");
        image.assert_same_bytes(&asked);
    }
}

#[test]
fn backing_names_from_one_byte_to_the_longest() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b", "bb"] {
        qemu_img_ok(dir.path(), &["create", "-q", "-f", "raw", name, "1M"]);
    }
    for (len, version) in
        [(1, "0.10"), (1, "1.1"), (300, "0.10"), (1000, "1.1"), (1023, "0.10"), (1023, "1.1")]
    {
        let last = if len % 2 == 0 { "bb" } else { "b" };
        let name = "./".repeat((len - last.len()) / 2) + last;
        let asked = format!("compat={version},cluster_size=4096,backing_file={name},backing_fmt=raw");
        let image = Stock::create(dir.path(), &asked, "1M");
        assert_eq!(image.name(), Some(name.as_bytes()));
        assert_eq!(image.extensions.backing_format(), Some("raw"));
        image.assert_same_bytes(&asked);
    }
}

#[test]
fn an_empty_disk_and_lazy_refcounts() {
    let dir = tempfile::tempdir().unwrap();
    let image = Stock::create(dir.path(), "lazy_refcounts=on", "0");
    assert_eq!((image.header.size, image.header.l1_size), (0, 0));
    assert_eq!(image.header.compatible, Compatible::LAZY_REFCOUNTS);
    assert_eq!(image.name(), None);
    image.assert_same_bytes("empty");
}

#[test]
fn a_resized_image() {
    let dir = tempfile::tempdir().unwrap();
    Stock::create(dir.path(), "cluster_size=512", "1M");
    qemu_img_ok(dir.path(), &["resize", "-q", "image", "300M"]);
    let image = Stock::read(&dir.path().join("image"));
    assert_eq!(image.header.size, 300 << 20);
    image.assert_same_bytes("grown");
    qemu_img_ok(dir.path(), &["resize", "-q", "--shrink", "image", "2M"]);
    let image = Stock::read(&dir.path().join("image"));
    assert_eq!(image.header.size, 2 << 20);
    image.assert_same_bytes("shrunk");
}

#[test]
fn internal_snapshots() {
    for version in ["0.10", "1.1"] {
        let dir = tempfile::tempdir().unwrap();
        Stock::create(dir.path(), &format!("compat={version}"), "600M");
        for name in ["first", "a second one", "dritter \u{e4}"] {
            qemu_img_ok(dir.path(), &["snapshot", "-c", name, "image"]);
        }
        if version != "0.10" {
            // Stock tools do not resize version 2 images with snapshots.
            qemu_img_ok(dir.path(), &["resize", "-q", "image", "2G"]);
        }
        let image = Stock::read(&dir.path().join("image"));
        let table = &image.bytes[image.header.snapshots_offset.get() as usize..];
        let snapshots = snapshot::parse_table(table, &image.header, image.len()).unwrap();
        let names: Vec<_> = snapshots.iter().map(|found| (found.id.as_str(), found.name.as_str())).collect();
        assert_eq!(names, [("1", "first"), ("2", "a second one"), ("3", "dritter \u{e4}")]);
        for found in &snapshots {
            assert_eq!((found.disk_size, found.l1_size, found.vm_state_size), (600 << 20, 2, 0));
            assert!(found.date_sec > 1_600_000_000);
        }
        image.assert_same_bytes(version);
    }
}

#[test]
fn bitmaps() {
    let dir = tempfile::tempdir().unwrap();
    Stock::create(dir.path(), "cluster_size=4096", "64M");
    qemu_img_ok(dir.path(), &["bitmap", "--add", "-g", "65536", "image", "daily"]);
    qemu_img_ok(dir.path(), &["bitmap", "--add", "--disable", "-g", "512", "image", "weekly one"]);
    let image = Stock::read(&dir.path().join("image"));
    assert!(image.header.autoclear.contains(Autoclear::BITMAPS));
    let data = image.extensions.bitmaps().unwrap();
    let extension = BitmapsExtension::parse(data, 0, &image.header, image.len()).unwrap();
    let start = extension.directory_offset.get() as usize;
    let directory = &image.bytes[start..][..extension.directory_len as usize];
    let bitmaps = extension.parse_directory(directory, &image.header, image.len()).unwrap();
    let seen: Vec<_> =
        bitmaps.iter().map(|one| (one.name.as_str(), one.granularity_bits, one.flags)).collect();
    assert_eq!(seen, [("daily", 16, BitmapFlags::AUTO), ("weekly one", 9, BitmapFlags::empty())]);
    // 64 MiB in bits of 512 bytes: 16 KiB of bitmap, four clusters.
    assert_eq!(bitmaps[1].table_size, 4);
    image.assert_same_bytes("bitmaps");
}

/// Single fields are rewritten in place by their offset; stock tools must find them there.
#[test]
fn field_offsets_are_where_stock_tools_look() {
    let dir = tempfile::tempdir().unwrap();
    let mut image = Stock::create(dir.path(), "cluster_size=4096", "64M");
    let dirty = image.header.incompatible | Incompatible::CORRUPT;
    image.bytes[field::INCOMPATIBLE as usize..][..8].copy_from_slice(&dirty.bits().to_be_bytes());
    image.bytes[field::COMPATIBLE as usize..][..8].copy_from_slice(&1u64.to_be_bytes());
    image.bytes[field::SIZE as usize..][..8].copy_from_slice(&(32u64 << 20).to_be_bytes());
    std::fs::write(dir.path().join("image"), &image.bytes).unwrap();
    let info = qemu_img_ok(dir.path(), &["info", "--output=json", "image"]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["virtual-size"], 32 << 20);
    assert_eq!(info["format-specific"]["data"]["corrupt"], true);
    assert_eq!(info["format-specific"]["data"]["lazy-refcounts"], true);
    assert!(Stock::read(&dir.path().join("image")).header.incompatible.contains(Incompatible::CORRUPT));
}
