//! Makes the seeds anew, with stock tools: `cargo test -p vmstrata-fuzz-bodies --test make_seeds -- --ignored`.
//! What broke something once (`found-*`) stays.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use support::seeds::directory;

fn must(program: &str, arguments: &[&str]) {
    let output = Command::new("timeout").args(["60", program]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

fn put(body: &str, name: &str, bytes: &[u8]) {
    std::fs::create_dir_all(directory(body)).unwrap();
    std::fs::write(directory(body).join(name), bytes).unwrap();
}

#[test]
#[ignore = "writes to the source tree"]
fn images() {
    let dir = tempfile::tempdir().unwrap();
    let shapes = [
        ("v3", "cluster_size=512"),
        ("v2", "cluster_size=512,compat=0.10"),
        ("wide", "cluster_size=512,refcount_bits=64"),
        ("narrow", "cluster_size=512,refcount_bits=1"),
        ("lazy", "cluster_size=1k,lazy_refcounts=on"),
        ("zstd", "cluster_size=1k,compression_type=zstd"),
        ("backed", "cluster_size=512,backing_file=base,backing_fmt=raw"),
    ];
    std::fs::write(dir.path().join("base"), vec![0xba; 64 << 10]).unwrap();
    for (name, shape) in shapes {
        let path = dir.path().join(name);
        let text = path.to_str().unwrap();
        must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", shape, text, "64k"]);
        let io = |writes: &[&str]| {
            let commands: Vec<_> = writes.iter().flat_map(|write| ["-c", write]).collect();
            must("qemu-io", &[&["-f", "qcow2", text], &commands[..]].concat());
        };
        io(&["write -q -P 1 0 1k", "write -q -z 16k 4k", "write -q -P 2 40k 512"]);
        if name != "lazy" {
            io(&["write -q -c -P 3 32k 4k"]);
        }
        if !["v2", "narrow"].contains(&name) {
            must("qemu-img", &["bitmap", "-f", "qcow2", "--add", text, "b"]);
        }
        if name != "narrow" {
            must("qemu-img", &["snapshot", "-c", "s", text]);
            io(&["write -q -P 4 0 512"]);
        }
        let image = std::fs::read(&path).unwrap();
        put("image_open", name, &image);
        let cluster = 1usize << image[23];
        put("qcow2_header", name, &image[..cluster]);
        tables(name, &image, cluster);
    }
}

/// The image's tables, each behind the four bytes that say how to read it.
fn tables(name: &str, image: &[u8], cluster: usize) {
    let word = |at: usize| u64::from_be_bytes(*image[at..].first_chunk().unwrap()) as usize;
    let prefix = [image[7] - 2, image[23] - 9, if image[7] == 3 { image[99] } else { 4 }, image[63]];
    let mut roots = vec![("l1", word(40)), ("refcounts", word(48))];
    roots.push(("block", word(word(48))));
    roots.push(("l2", word(word(40)) & 0xff_ffff));
    if image[63] > 0 {
        roots.push(("snapshots", word(64)));
    }
    for (table, at) in roots {
        let end = (at + cluster.min(1024)).min(image.len());
        put("qcow2_tables", &format!("{name}-{table}"), &[&prefix[..], &image[at..end]].concat());
    }
}

/// What stock clients say to our own server, byte for byte.
#[test]
#[ignore = "writes to the source tree"]
fn nbd_clients() {
    use vmstrata_export::nbd::{Address, Export, Exports, Limits, Listener, Server, TlsMode};
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    must("qemu-img", &["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "1M"]);
    let resources = vmstrata_disk::Resources::new(vmstrata_disk::ResourceOptions::default());
    let disk = vmstrata_disk::Disk::open(&image, &vmstrata_disk::OpenOptions::default(), &resources).unwrap();
    let exports = Exports::new();
    exports.add(Export::new("disk", disk)).unwrap();
    let server = Server::new(exports, TlsMode::default(), Limits::default()).unwrap();
    let socket = dir.path().join("server");
    server.listen(Listener::bind(&Address::Unix(socket.clone())).unwrap()).unwrap();
    let relay = dir.path().join("relay");
    let uri = format!("nbd+unix:///disk?socket={}", relay.display());
    let list = format!("nbd+unix://?socket={}", relay.display());
    let clients: [(&str, &[&str]); 5] = [
        ("info", &["nbdinfo", &uri]),
        ("list", &["nbdinfo", "--list", &list]),
        ("map", &["nbdinfo", "--map", &uri]),
        ("read", &["qemu-io", "-r", "-f", "raw", "-c", "read 0 4k", "-c", "read 1020k 4k", &uri]),
        (
            "write",
            &[
                "qemu-io",
                "-f",
                "raw",
                "-c",
                "write -P 7 4k 512",
                "-c",
                "write -z 64k 8k",
                "-c",
                "discard 0 8k",
                "-c",
                "write -f -P 9 300k 512",
                "-c",
                "flush",
                &uri,
            ],
        ),
    ];
    for (name, command) in clients {
        for (number, talk) in record(&relay, &socket, command).iter().enumerate() {
            assert!(talk.len() < 16 << 10, "{name} says too much for a seed");
            put("nbd_client", &format!("{name}-{number}"), talk);
            messages(&format!("{name}-{number}"), talk);
        }
    }
    server.shutdown().unwrap();
}

/// Runs a client against a relay; what it said on each of its connections.
fn record(relay: &Path, server: &Path, command: &[&str]) -> Vec<Vec<u8>> {
    let _ = std::fs::remove_file(relay);
    let listener = UnixListener::bind(relay).unwrap();
    let talks: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let (server, all) = (server.to_owned(), Arc::clone(&talks));
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            all.lock().unwrap().push(Vec::new());
            let (client, upstream) = (client.unwrap(), UnixStream::connect(&server).unwrap());
            let (mut down, mut back) = (client.try_clone().unwrap(), upstream.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut back, &mut down));
            let all = Arc::clone(&all);
            std::thread::spawn(move || {
                forward(client, upstream, |bytes| all.lock().unwrap()[number].extend(bytes))
            });
        }
    });
    must(command[0], &command[1..]);
    std::mem::take(&mut *talks.lock().unwrap()).into_iter().filter(|talk| !talk.is_empty()).collect()
}

fn forward(mut from: UnixStream, mut to: UnixStream, heard: impl Fn(&[u8])) {
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        heard(&buffer[..len]);
        if to.write_all(&buffer[..len]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// The options and requests in a talk, and their data, each by itself.
fn messages(name: &str, talk: &[u8]) {
    let mut rest = &talk[4..];
    let mut number = 0;
    while rest.starts_with(b"IHAVEOPT") {
        let len = u32::from_be_bytes(*rest[12..].first_chunk().unwrap()) as usize;
        put("nbd_decode", &format!("{name}-option-{number}"), &rest[..16]);
        if len > 0 {
            put("nbd_decode", &format!("{name}-option-{number}-data"), &rest[16..16 + len]);
        }
        rest = &rest[16 + len..];
        number += 1;
    }
    if let Some(request) = rest.first_chunk::<28>() {
        put("nbd_decode", &format!("{name}-request"), request);
    }
}

/// Requests as a decent driver lays them out: descriptors at 0, the available ring at 256, the used one at 512.
#[test]
#[ignore = "writes to the source tree"]
fn guests() {
    const WRITE: u16 = 2;
    const NEXT: u16 = 1;
    let kinds =
        [("read", 0u32, 512u32, true), ("write", 1, 512, false), ("flush", 4, 0, false), ("id", 8, 20, true)];
    let ranges = [("discard", 11, 32, false), ("zeroes", 13, 16, false)];
    for (number, (name, kind, len, writable)) in kinds.into_iter().chain(ranges).enumerate() {
        let mut memory = vec![0u8; 2048];
        let mut descriptor = |index: usize, guest: u64, len: u32, flags: u16, next: u16| {
            let bytes =
                [&guest.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
            memory[16 * index..][..16].copy_from_slice(&bytes.concat());
        };
        descriptor(0, 1024, 16, NEXT, 1);
        descriptor(1, 1280, len, NEXT | if writable { WRITE } else { 0 }, 2);
        descriptor(2, 1056, 1, WRITE, 0);
        memory[258] = 1;
        memory[1024] = kind as u8;
        memory[1024 + 8] = 8;
        memory[1280 + 8] = 4;
        for (flags, suffix) in
            [(1 | 2, ""), (1 | 2 | 16 | 32, "-logged"), (8 | (4 * (number as u8 & 1)), "-plain")]
        {
            let mut input = vec![flags, 4, 0, 0];
            input.extend([0u16, 256, 512, 64].iter().flat_map(|word| word.to_le_bytes()));
            input.extend([0; 64]);
            input.extend((memory.len() as u16).to_le_bytes());
            input.extend(&memory);
            // A second request meanwhile, at the same head.
            input.extend([2, 1, 2, 2, 0]);
            put("vhost_request", &format!("{name}{suffix}"), &input);
        }
    }
}

#[test]
#[ignore = "writes to the source tree"]
fn indices() {
    let edits = |mode: u8, xor: u8, places: &[u32]| {
        let edit = |place: &u32| [&[xor][..], &place.to_le_bytes()[..3]].concat();
        [vec![mode], places.iter().flat_map(edit).collect()].concat()
    };
    let every = |pages: &[u32], offsets: &[u32]| -> Vec<u32> {
        pages.iter().flat_map(|page| offsets.iter().map(move |offset| page * 4096 + offset)).collect()
    };
    put("index", "whole", &[0]);
    put("index", "sealed", &[1]);
    put("index", "damage", &edits(0, 0x80, &every(&[1, 2, 3, 4], &[17])));
    // Layers, unit, size, place, area, pages of the table, pointers.
    put("index", "root", &edits(1, 1, &[40, 44, 49, 57, 64, 72, 88, 96, 112]));
    put("index", "pointers", &edits(1, 3, &every(&[1, 2, 3, 4], &[0, 6, 9, 16, 22, 25])));
    put("index", "words", &edits(1, 0x41, &every(&[1], &[1, 5, 6, 7, 8, 13, 14, 15, 56, 61, 62, 63])));
}

#[test]
#[ignore = "writes to the source tree"]
fn journals() {
    put("journal", "whole", &[0]);
    let mut torn = vec![0; 1 + 64 + 40];
    torn.push(1);
    put("journal", "torn", &torn);
    let record = |index: u64, old: u64, new: u64| [index, old, new].map(u64::to_le_bytes).concat();
    let data = |cluster: u64| 1 << 63 | cluster << 12;
    let made = [record(1, 0, data(9)), record(2, data(10), data(11)), record(1 << 63, 0, data(5))];
    put("journal", "made-up", &[&[1][..], &made.concat()].concat());
}

/// A device, and every sector of it that was read.
struct Recorder {
    file: std::fs::File,
    sectors: std::collections::BTreeMap<u32, [u8; 512]>,
}

impl vmstrata_memory::filesystem::ReadDevice for &mut Recorder {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Option<()> {
        use std::os::unix::fs::FileExt;
        for sector in offset / 512..(offset + into.len() as u64).div_ceil(512) {
            let mut bytes = [0; 512];
            self.file.read_exact_at(&mut bytes, sector * 512).ok()?;
            self.sectors.insert(u32::try_from(sector).unwrap(), bytes);
        }
        self.file.read_exact_at(into, offset).ok()
    }
}

/// What it takes to find the pages of two files, of which one is in many pieces. Needs a superuser, to mount XFS.
#[test]
#[ignore = "writes to the source tree"]
fn filesystems() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    use vmstrata_memory::introspect::FileSystem;
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    std::fs::create_dir_all(&tree).unwrap();
    std::fs::write(tree.join("whole"), vec![7; 100_000]).unwrap();
    let pieces = std::fs::File::create(tree.join("pieces")).unwrap();
    (0..100).for_each(|piece| pieces.write_all_at(&[9; 4096], piece * 5 * 4096).unwrap());
    let (from, to) = (tree.to_str().unwrap(), image.to_str().unwrap());
    let shapes: [(&str, &str, &[&str]); 4] = [
        ("ext4", "mkfs.ext4", &["-b", "4096"]),
        ("ext4-1k", "mkfs.ext4", &["-b", "1024"]),
        ("ext4-map", "mkfs.ext4", &["-b", "1024", "-O", "^extents,^64bit,^metadata_csum"]),
        ("xfs", "mkfs.xfs", &[]),
    ];
    for (name, mkfs, options) in shapes {
        let _ = std::fs::remove_file(&image);
        std::fs::File::create(&image).unwrap().set_len(320 << 20).unwrap();
        let mounted = dir.path().join("mounted");
        std::fs::create_dir_all(&mounted).unwrap();
        must(&format!("/usr/sbin/{mkfs}"), &[&["-q"], options, &[to]].concat());
        must("mount", &["-o", "loop", to, mounted.to_str().unwrap()]);
        must(
            "cp",
            &[
                "--sparse=always",
                &format!("{from}/whole"),
                &format!("{from}/pieces"),
                mounted.to_str().unwrap(),
            ],
        );
        let inodes = ["whole", "pieces"].map(|file| mounted.join(file).metadata().unwrap().ino());
        must("umount", &[mounted.to_str().unwrap()]);
        let mut recorder =
            Recorder { file: std::fs::File::open(&image).unwrap(), sectors: Default::default() };
        let system = if mkfs == "mkfs.ext4" { FileSystem::Ext4 } else { FileSystem::Xfs };
        let mut files = vmstrata_memory::filesystem::Files::open(system, &mut recorder).unwrap();
        for inode in inodes {
            assert!((0..64).filter(|page| files.find(inode, page * 5 * 4096).is_some()).count() >= 5);
        }
        drop(files);
        let mut input = vec![u8::from(system == FileSystem::Xfs)];
        input.extend([inodes[0], inodes[1], 0, 1].iter().flat_map(|&inode| (inode as u32).to_le_bytes()));
        input.extend(recorder.sectors.iter().flat_map(|(at, bytes)| [&at.to_le_bytes()[..], bytes].concat()));
        assert!(input.len() < 64 << 10, "{name}: {} bytes", input.len());
        put("filesystem", name, &input);
    }
}

/// Small machines that have not run, with one page of memory and one of firmware that are not zeros, as stock QEMU migrates them.
#[test]
#[ignore = "writes to the source tree"]
fn migrations() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (bios, memory, stream, commands) = (path("bios"), path("memory"), path("stream"), path("commands"));
    for (file, len) in [(&bios, 64 << 10), (&memory, 1 << 20)] {
        let mut bytes = vec![0; len];
        bytes[0x2000..0x3000].fill(7);
        bytes[0x2fff] = 8;
        std::fs::write(file, bytes).unwrap();
    }
    std::fs::write(&commands, format!("migrate \"exec:cat > {stream}\"\nquit\n")).unwrap();
    let object = format!("memory-backend-file,id=mem,size=1M,share=on,mem-path={memory}");
    for machine in ["isapc", "microvm"] {
        let qemu = format!(
            "qemu-system-x86_64 -nodefaults -display none -S -accel tcg -m 1 -object {object} -bios {bios} \
             -machine {machine},suppress-vmdesc=on,memory-backend=mem -monitor stdio < {commands}"
        );
        must("sh", &["-c", &qemu]);
        let bytes = std::fs::read(&stream).unwrap();
        assert!(bytes.len() < 64 << 10, "{machine}: {} bytes", bytes.len());
        put("migration_stream", machine, &bytes);
    }
}
