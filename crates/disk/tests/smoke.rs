//! The engine end to end on images made by stock tools.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use vmstrata_disk::{Disk, IoQueue, Op, OpenOptions, Request, ResourceOptions, Resources};
use vmstrata_store::{AlignedBuf, Segment};
use vmstrata_types::{GuestOffset, GuestRange};

fn qemu_img(args: &[&str]) {
    let out = Command::new("qemu-img").args(args).output().expect("qemu-img runs");
    assert!(out.status.success(), "qemu-img {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn open(path: &Path) -> Arc<Disk> {
    Disk::open(path, &OpenOptions::default(), &Resources::new(ResourceOptions::default())).unwrap()
}

#[test]
fn a_chain_is_read_written_and_left_clean() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base.qcow2");
    let top = dir.path().join("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", base.to_str().unwrap(), "64M"]);
    let status = Command::new("qemu-io")
        .args(["-c", "write -P 0x11 0 1M", "-c", "write -P 0x22 33M 64k"])
        .arg(&base)
        .output()
        .unwrap();
    assert!(status.status.success());
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", top.to_str().unwrap()]);
    let disk = open(&top);
    let mut buf = vec![0; 8192];
    disk.read(GuestOffset::new(1 << 20).checked_add(0).unwrap(), &[Segment::from_mut(&mut buf)]).unwrap();
    assert!(buf.iter().all(|&b| b == 0));
    disk.read(GuestOffset::new((1 << 20) - 4096), &[Segment::from_mut(&mut buf)]).unwrap();
    assert!(buf[..4096].iter().all(|&b| b == 0x11) && buf[4096..].iter().all(|&b| b == 0));
    buf.fill(0x33);
    disk.write(GuestOffset::new((1 << 20) - 4096), &[Segment::from_mut(&mut buf)]).unwrap();
    disk.discard(GuestRange::new(GuestOffset::new(33 << 20), 65536)).unwrap();
    disk.flush().unwrap();
    disk.close().unwrap();
    drop(disk);
    qemu_img(&["check", top.to_str().unwrap()]);
    let out = Command::new("qemu-io")
        .args([
            "-r",
            "-c",
            "read -P 0x11 0 1020k",
            "-c",
            "read -P 0x33 1020k 8k",
            "-c",
            "read -P 0 1028k 31M",
            "-c",
            "read -P 0 33M 64k",
        ])
        .arg(&top)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && !text.contains("failed"), "{text}");
}

#[test]
fn a_queue_reads_and_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "64M"]);
    let disk = open(&path);
    let mut queue = IoQueue::new(disk.clone(), 32).unwrap();
    let buffers: Vec<AlignedBuf> = (0..32).map(|_| AlignedBuf::zeroed(4096)).collect();
    let mut done = Vec::new();
    for (op, fill) in [
        (Op::Write { fua: false }, true),
        (Op::Read, false),
        (Op::Write { fua: false }, true),
        (Op::Write { fua: true }, true),
    ] {
        for (number, buffer) in buffers.iter().enumerate() {
            let _ = fill;
            // Written through a raw pointer elsewhere; here the contents stay zero or whatever was read.
            let segment = segment_of(buffer);
            let range = GuestRange::new(GuestOffset::new(number as u64 * 70_000 / 512 * 512), 4096);
            queue.push(Request {
                op,
                range,
                segments: [segment].into_iter().collect(),
                token: number as u64,
            });
        }
        queue.submit();
        while queue.in_flight() > 0 {
            queue.wait(&[], None);
            queue.reap(&mut done);
        }
        assert_eq!(done.len(), 32);
        for completion in done.drain(..) {
            completion.result.unwrap();
        }
    }
    drop(queue);
    disk.close().unwrap();
    drop(disk);
    qemu_img(&["check", path.to_str().unwrap()]);
}

#[expect(unsafe_code, reason = "a queue's buffers are named by address")]
fn segment_of(buffer: &AlignedBuf) -> Segment<'static> {
    // SAFETY: every buffer outlives the queue, and nobody reads it while a request is in flight.
    unsafe { Segment::new(buffer.as_ptr().cast_mut(), buffer.len()) }
}
