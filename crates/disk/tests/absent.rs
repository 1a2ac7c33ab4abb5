//! Layers whose bytes are elsewhere: reads wait for them without a thread, and others pass.

mod common;

use common::elsewhere::{CHUNK, CHUNKS, byte_of, disk};
use common::flat::write;
use common::io::Client;
use common::wait::wait_until;
use vmstrata_disk::snapshot::SnapshotInfo;

const LEN: u64 = 4096;
const READ: vmstrata_disk::Op = vmstrata_disk::Op::Read;

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
