//! Images as tools lay them out, odd and damaged: what stock QEMU says and reads, beside what vmstrata says and reads. Each
//! difference is a decision, and its reason stands in the table.

use std::fs;
use std::path::Path;

use crate::support::{Images, run, stderr, tool, tool_json, tool_ok};
use serde_json::Value;
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_store::Segment;
use vmstrata_types::GuestOffset;

const CLUSTER: usize = 4096;
const COPIED: u64 = 1 << 63;
/// Where the header of the images ends, and its extensions begin.
const EXTENSIONS: usize = 112;

/// An image over a raw base: two L2 tables, of which the second is not there; data, zeros, compressed and base clusters.
struct Image {
    bytes: Vec<u8>,
}

impl Image {
    fn be64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    fn put(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    fn l1(&self) -> usize {
        self.be64(40) as usize
    }

    fn l2(&self) -> usize {
        (self.be64(self.l1()) & 0x00ff_ffff_ffff_fe00) as usize
    }

    /// Changes the entries of the first L2 table that `chosen` names.
    fn change_l2(&mut self, chosen: impl Fn(u64) -> bool, change: impl Fn(u64) -> u64) {
        let table = self.l2();
        for at in (table..table + CLUSTER).step_by(8) {
            let raw = self.be64(at);
            if chosen(raw) {
                self.put(at, change(raw));
            }
        }
    }

    /// Gives it these extensions, and this backing name.
    fn name(&mut self, extensions: &[(u32, &[u8])], name: &[u8]) {
        let mut head = Vec::new();
        for (magic, data) in extensions {
            head.extend_from_slice(&magic.to_be_bytes());
            head.extend_from_slice(&(data.len() as u32).to_be_bytes());
            head.extend_from_slice(data);
            head.resize(head.len().next_multiple_of(8), 0);
        }
        head.resize(head.len() + 8, 0);
        let at = EXTENSIONS + head.len();
        head.extend_from_slice(name);
        self.bytes[EXTENSIONS..CLUSTER].fill(0);
        self.bytes[EXTENSIONS..EXTENSIONS + head.len()].copy_from_slice(&head);
        self.put(8, at as u64);
        self.bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    }
}

const FORMAT: u32 = 0xe279_2aca;

/// What vmstrata makes of a layout.
enum Expected {
    /// The same as QEMU: length, bytes, and what a check finds.
    Same,
    /// An error that says this, where QEMU reads on.
    Refused(&'static str),
}

struct Layout {
    name: &'static str,
    make: fn(&mut Image, &Path),
    expected: Expected,
}

use Expected::{Refused, Same};

const LAYOUTS: &[Layout] = &[
    Layout { name: "as-made", make: |_, _| (), expected: Same },
    Layout {
        name: "copied-flag-without-an-offset",
        make: |image, _| {
            image.change_l2(|raw| raw == 0, |_| COPIED);
        },
        expected: Same,
    },
    Layout {
        name: "copied-flag-without-an-l2-table",
        make: |image, _| image.put(image.l1() + 8, COPIED),
        expected: Same,
    },
    Layout {
        name: "copied-flag-of-a-zero-cluster-without-an-offset",
        make: |image, _| image.change_l2(|raw| raw == 0, |_| COPIED | 1),
        expected: Same,
    },
    Layout {
        name: "copied-flag-on-compressed-clusters",
        make: |image, _| image.change_l2(|raw| raw >> 62 & 1 == 1, |raw| raw | COPIED),
        expected: Same,
    },
    Layout {
        name: "a-format-twice",
        make: |image, _| image.name(&[(FORMAT, b"qcow2"), (FORMAT, b"raw")], b"base.raw"),
        expected: Same,
    },
    Layout {
        name: "an-empty-format",
        make: |image, _| image.name(&[(FORMAT, b"")], b"base.raw"),
        expected: Same,
    },
    Layout {
        name: "a-format-that-ends-with-a-zero-byte",
        make: |image, _| image.name(&[(FORMAT, b"raw\0")], b"base.raw"),
        expected: Same,
    },
    Layout {
        name: "an-unknown-extension",
        make: |image, _| image.name(&[(0x1234_5678, b"?"), (FORMAT, b"raw")], b"base.raw"),
        expected: Same,
    },
    Layout {
        name: "a-size-of-no-whole-sectors",
        make: |image, _| image.put(24, image.be64(24) - 24),
        expected: Same,
    },
    Layout {
        name: "a-json-description",
        make: |image, dir| {
            let base = dir.join("base.raw");
            let name = format!(r#"json:{{"driver":"raw","file":{{"driver":"file","filename":{base:?}}}}}"#);
            image.name(&[], name.as_bytes());
        },
        expected: Same,
    },
    Layout {
        name: "a-flat-json-description-of-the-format-in-the-header",
        make: |image, dir| {
            let name = format!(r#"json:{{"file.driver":"file","file.filename":{:?}}}"#, dir.join("base.raw"));
            image.name(&[(FORMAT, b"raw")], name.as_bytes());
        },
        expected: Same,
    },
    Layout {
        name: "a-json-description-of-the-rest-of-a-file",
        make: |image, dir| {
            let base = dir.join("base.raw");
            let name = format!(r#"json:{{"driver":"raw","offset":65537,"file":{{"filename":{base:?}}}}}"#);
            image.name(&[], name.as_bytes());
        },
        expected: Same,
    },
    Layout {
        name: "a-flat-json-description-of-a-part-of-a-file",
        make: |image, dir| {
            let base = dir.join("base.raw");
            let name = format!(
                r#"json:{{"driver":"raw","offset":"65536","size":1048576,"file.filename":{base:?},"file.driver":"file"}}"#
            );
            image.name(&[(FORMAT, b"raw")], name.as_bytes());
        },
        expected: Same,
    },
    Layout {
        name: "a-json-description-of-an-image-in-a-part-of-a-file",
        make: |image, dir| {
            let (base, whole) = (dir.join("inner.qcow2"), dir.join("outer.raw"));
            let inner = fs::read(base).expect("an image");
            fs::write(&whole, [&[0; 512][..], &inner].concat()).expect("a file");
            let file =
                format!(r#"{{"driver":"raw","offset":512,"file":{{"driver":"file","filename":{whole:?}}}}}"#);
            image.name(&[], format!(r#"json:{{"driver":"qcow2","file":{file}}}"#).as_bytes());
        },
        // Its tables and its backing file would have to be found by more than a path; the error says how to make a file of it.
        expected: Refused("qemu-img convert"),
    },
    Layout {
        name: "an-l1-table-past-the-end",
        make: |image, _| {
            // A table of its own, counted but never written.
            let end = image.bytes.len().next_multiple_of(CLUSTER) + 3 * CLUSTER;
            image.put(40, end as u64);
        },
        expected: Same,
    },
    Layout {
        name: "a-last-table-that-is-not-whole",
        make: |image, _| {
            let (from, to) = (image.l2(), image.bytes.len().next_multiple_of(CLUSTER));
            let table = image.bytes[from..from + CLUSTER].to_vec();
            let used = table.iter().rposition(|&byte| byte != 0).expect("entries") + 1;
            image.bytes.resize(to, 0);
            image.bytes.extend_from_slice(&table[..used.next_multiple_of(8)]);
            image.put(image.l1(), to as u64 | COPIED);
        },
        expected: Same,
    },
    Layout {
        name: "an-l2-table-past-the-end",
        make: |image, _| image.put(image.l1() + 8, 1 << 30),
        // QEMU reads zeros, or the base, in the place of what the file had.
        expected: Refused("the file was cut short"),
    },
    Layout {
        name: "a-data-cluster-past-the-end",
        make: |image, _| image.change_l2(|raw| raw >> 62 == 2, |raw| raw | 1 << 30),
        // QEMU reads zeros in the place of what the file had.
        expected: Refused("the file was cut short"),
    },
    Layout {
        name: "reserved-bits",
        make: |image, _| image.change_l2(|raw| raw >> 62 == 2, |raw| raw | 1 << 57),
        // A later format may give them a meaning; QEMU passes over them.
        expected: Refused("damaged"),
    },
];

fn make(images: &Images) -> Image {
    let base: Vec<u8> = (0..4 << 20).map(|at| (at / 512 % 251) as u8).collect();
    fs::write(images.path("base.raw"), base).expect("a base");
    let args = ["-o", "cluster_size=4k,backing_file=base.raw,backing_fmt=raw", "4M"];
    images.create("plain.qcow2", &args);
    images.create("inner.qcow2", &["4M"]);
    images.write_layer("inner.qcow2", &["write -P 5 0 64k"]);
    images.write_layer("plain.qcow2", &["write -P 7 8k 20k", "write -z 64k 8k", "write -c -P 9 128k 4k"]);
    Image { bytes: fs::read(images.path("plain.qcow2")).expect("an image") }
}

/// Length and bytes as a guest gets them.
fn read(path: &Path) -> Result<(u64, Vec<u8>), String> {
    let read = || -> vmstrata_disk::Result<(u64, Vec<u8>)> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let disk = Disk::open(path, &options, &Resources::new(ResourceOptions::default()))?;
        let mut bytes = vec![0; disk.size() as usize];
        disk.read(GuestOffset::ZERO, &[Segment::from_mut(&mut bytes)])?;
        Ok((disk.size(), bytes))
    };
    read().map_err(|error| error.to_string())
}

#[test]
fn every_layout_is_what_it_is_to_stock_qemu_or_differs_by_decision() {
    let images = Images::new();
    let plain = make(&images);
    for Layout { name, make, expected } in LAYOUTS {
        let path = images.path(&format!("{name}.qcow2"));
        let mut image = Image { bytes: plain.bytes.clone() };
        make(&mut image, &images.path(""));
        fs::write(&path, &image.bytes).expect("an image");
        let (text, raw) = (path.to_str().expect("text"), images.name("want.raw"));
        let said: Value = tool_json("qemu-img", ["info", "--output=json", text]);
        tool_ok("qemu-img", ["convert", "-O", "raw", text, &raw]);
        let checked = tool("qemu-img", ["check", text]).status.code();
        let ours = run(["check", text]);
        let found = read(&path);
        if let Refused(why) = expected {
            let error = found.expect_err(name);
            assert!(error.contains(why), "{name}: {error}");
            continue;
        }
        let (size, bytes) = found.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(Some(size), said["virtual-size"].as_u64(), "{name}");
        assert!(bytes == fs::read(&raw).expect("what QEMU reads"), "{name}: other bytes than QEMU's");
        assert_eq!(ours.status.code(), checked, "{name}: {}", stderr(&ours));
    }
}
