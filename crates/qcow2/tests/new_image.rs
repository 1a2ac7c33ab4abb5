//! New images as stock tools see them: `qemu-img check` finds nothing, `qemu-img info` reads back what was
//! asked for, `qemu-io` can write to them.

use std::path::Path;
use std::process::Command;

use crate::common::{qemu_img_ok, write};
use serde_json::Value;
use vmstrata_qcow2::create::{CreateOptions, NewBacking, max_size, new_image};
use vmstrata_qcow2::{CompressionType, RefcountOrder};
use vmstrata_types::ClusterBits;

fn cluster_sizes() -> impl Iterator<Item = ClusterBits> {
    (ClusterBits::MIN.get()..=ClusterBits::MAX.get()).filter_map(ClusterBits::new)
}

fn orders() -> impl Iterator<Item = RefcountOrder> {
    (0..=RefcountOrder::MAX.order()).filter_map(RefcountOrder::new)
}

/// Makes the image, has stock tools check it, and compares what they say with what was asked.
fn make_and_check(dir: &Path, options: &CreateOptions) {
    write(&new_image(options).unwrap(), &dir.join("new"));
    qemu_img_ok(dir, &["check", "-q", "-f", "qcow2", "new"]);
    let info = qemu_img_ok(dir, &["info", "-f", "qcow2", "--output=json", "new"]);
    let info: Value = serde_json::from_str(&info).unwrap();
    let context = format!("{options:?}");
    assert_eq!(info["virtual-size"], options.size, "{context}");
    assert_eq!(info["cluster-size"], options.cluster_bits.size(), "{context}");
    let data = &info["format-specific"]["data"];
    assert_eq!(data["compat"], if options.version == 2 { "0.10" } else { "1.1" }, "{context}");
    let compression = if options.compression_type == CompressionType::Zstd { "zstd" } else { "zlib" };
    assert_eq!(data["compression-type"], compression, "{context}");
    if options.version == 3 {
        assert_eq!(data["refcount-bits"], options.refcount_order.width_bits(), "{context}");
        assert_eq!(data["lazy-refcounts"], options.lazy_refcounts, "{context}");
        assert_eq!(data["corrupt"], false, "{context}");
    }
    let backing = options.backing.as_ref();
    let name = backing.map(|backing| String::from_utf8_lossy(&backing.name).into_owned());
    assert_eq!(info["backing-filename"].as_str(), name.as_deref(), "{context}");
    let format = backing.and_then(|backing| backing.format.as_deref());
    assert_eq!(info["backing-filename-format"].as_str(), format, "{context}");
}

/// Has stock tools write across a cluster boundary, read it back, and check the image again.
fn stock_writes_to_it(dir: &Path) {
    let writes = ["write -P 7 1k 300k", "write -z 100k 64k", "read -P 7 1k 99k", "read -P 0 100k 64k"];
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.current_dir(dir).args(["-f", "qcow2"]);
    for command in writes {
        qemu_io.args(["-c", command]);
    }
    let output = qemu_io.arg("new").output().expect("qemu-io is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("failed"), "{text}");
    qemu_img_ok(dir, &["check", "-q", "-f", "qcow2", "new"]);
}

#[test]
fn every_cluster_size_and_refcount_width() {
    let dir = tempfile::tempdir().unwrap();
    for cluster_bits in cluster_sizes() {
        for refcount_order in orders() {
            let options = CreateOptions { cluster_bits, refcount_order, ..CreateOptions::new(1 << 20) };
            make_and_check(dir.path(), &options);
            stock_writes_to_it(dir.path());
        }
    }
}

/// L1 tables of many clusters, several refcount blocks, several clusters of refcount table.
#[test]
fn the_largest_disk_of_every_cluster_size() {
    let dir = tempfile::tempdir().unwrap();
    for cluster_bits in cluster_sizes() {
        // In larger clusters one refcount block holds them all, whatever the width.
        let small = cluster_bits.get() <= 12;
        for refcount_order in orders().filter(|&order| small || order == RefcountOrder::DEFAULT) {
            let size = max_size(cluster_bits);
            let options = CreateOptions { cluster_bits, refcount_order, ..CreateOptions::new(size) };
            make_and_check(dir.path(), &options);
            if small {
                stock_writes_to_it(dir.path());
            }
        }
    }
}

#[test]
fn the_largest_refcount_table_a_new_image_can_have() {
    let size = max_size(ClusterBits::MIN);
    let (cluster_bits, refcount_order) = (ClusterBits::MIN, RefcountOrder::MAX);
    let options = CreateOptions { cluster_bits, refcount_order, ..CreateOptions::new(size) };
    let header = new_image(&options).unwrap().header;
    // 65,536 clusters of L1 table, 64 refcounts in a block, 64 blocks in a cluster of the table.
    assert_eq!((header.l1_size, header.refcount_table_clusters), (4 << 20, 17));
}

#[test]
fn version_2_in_every_cluster_size() {
    let dir = tempfile::tempdir().unwrap();
    for cluster_bits in cluster_sizes() {
        make_and_check(
            dir.path(),
            &CreateOptions { version: 2, cluster_bits, ..CreateOptions::new(5 << 20) },
        );
    }
}

#[test]
fn every_other_option() {
    let dir = tempfile::tempdir().unwrap();
    qemu_img_ok(dir.path(), &["create", "-q", "-f", "qcow2", "base.qcow2", "3M"]);
    let backing = |format: Option<&str>| {
        Some(NewBacking { name: b"base.qcow2".to_vec(), format: format.map(str::to_owned) })
    };
    let plain = CreateOptions::new(3 << 20);
    let all = [
        CreateOptions { size: 0, ..plain.clone() },
        CreateOptions { size: 512, ..plain.clone() },
        CreateOptions { lazy_refcounts: true, ..plain.clone() },
        CreateOptions { compression_type: CompressionType::Zstd, ..plain.clone() },
        CreateOptions { feature_names: false, ..plain.clone() },
        CreateOptions { backing: backing(Some("qcow2")), ..plain.clone() },
        CreateOptions { backing: backing(Some("qcow2")), cluster_bits: ClusterBits::MIN, ..plain.clone() },
        CreateOptions { backing: backing(Some("qcow2")), version: 2, ..plain.clone() },
        CreateOptions { backing: backing(None), ..plain.clone() },
    ];
    for options in &all {
        make_and_check(dir.path(), options);
    }
}

/// Same options, same bytes: whoever knows stock images knows ours.
#[test]
fn the_first_cluster_is_what_stock_tools_write() {
    let dir = tempfile::tempdir().unwrap();
    qemu_img_ok(dir.path(), &["create", "-q", "-f", "qcow2", "base.qcow2", "3M"]);
    for cluster_bits in cluster_sizes() {
        for refcount_order in orders() {
            let with_backing = refcount_order.order() % 2 == 0;
            let zstd = cluster_bits.get() % 2 == 0;
            let mut options = CreateOptions { cluster_bits, refcount_order, ..CreateOptions::new(3 << 20) };
            let mut asked = format!("cluster_size={}", cluster_bits.size());
            asked += &format!(",refcount_bits={}", refcount_order.width_bits());
            if with_backing {
                let (name, format) = (b"base.qcow2".to_vec(), Some("qcow2".to_owned()));
                options.backing = Some(NewBacking { name, format });
                asked += ",backing_file=base.qcow2,backing_fmt=qcow2";
            }
            if zstd {
                options.compression_type = CompressionType::Zstd;
                asked += ",compression_type=zstd";
            }
            qemu_img_ok(dir.path(), &["create", "-q", "-f", "qcow2", "-o", &asked, "stock", "3M"]);
            write(&new_image(&options).unwrap(), &dir.path().join("new"));
            let [stock, new] = ["stock", "new"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
            let len = cluster_bits.size() as usize;
            // Where several refcount blocks are needed, stock tools put the later ones elsewhere.
            if new_image(&options).unwrap().parts[1].1.len() == len {
                assert!(stock[..len] == new[..len], "{asked}");
            }
        }
    }
}
