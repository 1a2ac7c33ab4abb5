//! Layers whose bytes are elsewhere: requests wait for them without a thread, and others pass.

use crate::common;
use crate::common::elsewhere::{CHUNK, CHUNKS, Elsewhere, byte_of, disk, disk_on};
use crate::common::flat::{read, write};
use crate::common::io::Client;
use crate::common::stock::{path_str, qemu_img};
use crate::common::wait::wait_until;
use crate::common::{random, scratch};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Format, Op};

const LEN: u64 = 4096;
const READ: Op = Op::Read;

#[test]
fn hundreds_wait_without_a_thread_and_others_pass() {
    let (_dir, elsewhere, disk) = disk();
    let last = CHUNKS - 1;
    write(&disk, last * CHUNK, &vec![0xee; CHUNK as usize]).unwrap();
    let mut client = Client::new(&disk, 1024);
    let waiting: Vec<u64> = (0..600).map(|chunk| client.push(READ, chunk * CHUNK + LEN, LEN, None)).collect();
    client.submit();
    // Workers find the first ones, as the map is not in memory yet.
    wait_until("all to be asked for", || elsewhere.waiting() == 600);
    let passes = client.push(READ, last * CHUNK, LEN, None);
    let done = client.wait();
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [passes]);
    assert!(done[0].bytes.iter().all(|&byte| byte == 0xee));
    assert_eq!(client.in_flight(), 600);
    // Nothing of what waits is in the disk: its layers may change, and it may stand still.
    disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
    disk.drain();
    elsewhere.answer();
    disk.resume();
    let mut done = client.drain();
    done.sort_by_key(|done| done.token);
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), waiting);
    for (chunk, done) in (0..).zip(&done) {
        assert!(
            done.result.is_ok() && done.bytes.iter().all(|&byte| byte == byte_of(chunk)),
            "chunk {chunk}"
        );
    }
}

#[test]
fn a_read_over_several_chunks_waits_for_all_of_them() {
    let (_dir, elsewhere, disk) = disk();
    write(&disk, CHUNK, &vec![0xee; CHUNK as usize]).unwrap();
    let mut client = Client::new(&disk, 8);
    client.push(READ, 0, 3 * CHUNK, None);
    let done = elsewhere.answering(|| client.drain());
    let expected: Vec<u8> =
        [byte_of(0), 0xee, byte_of(2)].into_iter().flat_map(|byte| vec![byte; CHUNK as usize]).collect();
    assert!(done[0].result.is_ok() && done[0].bytes[..] == expected[..]);
}

#[test]
fn what_cannot_be_had_is_an_error_that_names_the_layer() {
    let (_dir, elsewhere, disk) = disk();
    let mut client = Client::new(&disk, 8);
    client.push(READ, 0, LEN, None);
    client.submit();
    wait_until("it to be asked for", || elsewhere.waiting() == 1);
    *elsewhere.is_lost.lock().unwrap() = true;
    elsewhere.answer();
    let error = client.drain()[0].result.as_ref().unwrap_err().to_string();
    assert!(error.contains("base.raw"), "{error}");
    *elsewhere.is_lost.lock().unwrap() = false;
    client.push(READ, 0, LEN, None);
    let done = elsewhere.answering(|| client.drain());
    assert!(done[0].result.is_ok(), "it is asked for again");
}

/// Pushes many requests that need absent bytes; asserts that all wait without a thread, and that one that needs none, and a worker,
/// passes. Returns what the queue has once all has come.
fn wait_together(
    client: &mut Client,
    elsewhere: &Elsewhere,
    push: impl Fn(&mut Client, u64) -> u64,
) -> Vec<common::io::Done> {
    for number in 0..COUNT {
        push(client, number);
    }
    client.submit();
    wait_until("all to be asked for", || elsewhere.waiting() >= COUNT as usize);
    let passes = client.push(Op::Discard, (CHUNKS - 1) * CHUNK, CHUNK, None);
    let done = client.wait();
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [passes]);
    assert!(done[0].result.is_ok() && client.in_flight() == COUNT as usize);
    let mut done = elsewhere.answering(|| client.drain());
    done.sort_by_key(|done| done.token);
    assert_eq!(done.len(), COUNT as usize);
    done
}

const COUNT: u64 = 520;

#[test]
fn reads_of_compressed_clusters_wait_without_a_thread() {
    let dir = scratch();
    let (raw, base) = (dir.path().join("whole"), dir.path().join("base.qcow2"));
    let mut random = random("absent", 0);
    let mut bytes = vec![0; (CHUNKS * CHUNK) as usize];
    // What does not get smaller fills most of a chunk, so that each cluster lies in chunks of its own, about.
    for cluster in bytes.chunks_mut(CHUNK as usize).take(COUNT as usize) {
        random.fill(&mut cluster[..48 << 10]);
    }
    std::fs::write(&raw, &bytes).unwrap();
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&base)]);
    // The header and the tables.
    let (_dir, elsewhere, disk) = disk_on(dir, base, Format::Qcow2, 6);
    let mut client = Client::new(&disk, 1024);
    // Those in the chunks with tables are read at once.
    let first = 8;
    let push = |client: &mut Client, number| {
        client.push(READ, (first + number % (COUNT - first)) * CHUNK, LEN, None)
    };
    let done = wait_together(&mut client, &elsewhere, push);
    for (number, done) in (0..).zip(&done) {
        let at = ((first + number % (COUNT - first)) * CHUNK) as usize;
        assert!(done.result.is_ok() && done.bytes[..] == bytes[at..][..LEN as usize], "read {number}");
    }
}

#[test]
fn writes_that_copy_up_wait_without_a_thread() {
    let (_dir, elsewhere, disk) = disk();
    let mut client = Client::new(&disk, 1024);
    let push = |client: &mut Client, number: u64| {
        client.push(Op::Write { fua: false }, number * CHUNK + 512, 512, Some(&[0xee; 512]))
    };
    assert!(wait_together(&mut client, &elsewhere, push).iter().all(|done| done.result.is_ok()));
    for number in 0..COUNT {
        let found = read(&disk, number * CHUNK, 2048).unwrap();
        let old = [byte_of(number); 512];
        assert!(found == [old, [0xee; 512], old, old].concat(), "chunk {number}");
    }
}
