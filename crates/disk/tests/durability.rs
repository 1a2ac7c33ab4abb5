//! Flushes of a disk whose bytes are to be elsewhere, too, wait for that without a thread.

use std::io;
use std::sync::Arc;

use crate::common::io::{Client, Done};
use crate::common::{open, scratch};
use parking_lot::Mutex;
use vmstrata_disk::{CreateOptions, Disk, Durability, Op, Pace, WhenDurable, create};

const LEN: u64 = 4096;
const DATA: [u8; LEN as usize] = [7; LEN as usize];
const WRITE: Op = Op::Write { fua: false };

/// Keeps who waits, or lets all through.
#[derive(Default)]
struct Elsewhere {
    waiting: Mutex<Vec<WhenDurable>>,
}

impl std::fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Elsewhere")
    }
}

impl Durability for Elsewhere {
    fn hold(&self, then: WhenDurable) -> Option<WhenDurable> {
        self.waiting.lock().push(then);
        None
    }
}

impl Elsewhere {
    fn waiting(&self) -> usize {
        self.waiting.lock().len()
    }

    fn answer(&self, with: impl Fn() -> io::Result<()>) {
        std::mem::take(&mut *self.waiting.lock()).into_iter().for_each(|then| then(with()));
    }
}

fn disk() -> (tempfile::TempDir, Arc<Disk>, Arc<Elsewhere>) {
    let dir = scratch();
    let path = dir.path().join("disk");
    create(&path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
    let (disk, elsewhere) = (open(&path), Arc::new(Elsewhere::default()));
    disk.hold_flushes(Some(Arc::clone(&elsewhere) as Arc<dyn Durability>));
    (dir, disk, elsewhere)
}

fn tokens(done: &[Done]) -> Vec<u64> {
    assert!(done.iter().all(|done| done.result.is_ok()));
    done.iter().map(|done| done.token).collect()
}

#[test]
fn what_is_durable_waits_and_all_else_does_not() {
    let (_dir, disk, elsewhere) = disk();
    let mut client = Client::new(&disk, 16);
    let held = [
        client.push(Op::Write { fua: true }, 0, LEN, Some(&DATA)),
        client.push(Op::WriteZeroes { unmap: false, fua: true }, LEN, LEN, None),
        client.push(Op::Flush, 0, 0, None),
    ];
    let mut early = tokens(&client.run_until(|| elsewhere.waiting() == held.len()));
    let write = client.push(WRITE, 2 * LEN, LEN, Some(&DATA));
    while !early.contains(&write) {
        early.extend(tokens(&client.wait()));
    }
    assert_eq!(early, [write]);
    // Nothing of the disk is held: its layers may change, and all requests may be waited for.
    disk.drain();
    disk.resume();
    elsewhere.answer(|| Ok(()));
    let mut done = tokens(&client.drain());
    done.sort_unstable();
    assert_eq!(done, held);
}

#[test]
fn what_cannot_be_durable_elsewhere_fails() {
    let (_dir, disk, elsewhere) = disk();
    let mut client = Client::new(&disk, 16);
    client.push(Op::Flush, 0, 0, None);
    client.run_until(|| elsewhere.waiting() == 1);
    elsewhere.answer(|| Err(io::Error::other("another host took it")));
    let told = client.drain()[0].result.as_ref().unwrap_err().to_string();
    assert!(told.contains("publish what was flushed") && told.contains("another host took it"), "{told}");
}

#[test]
fn a_queue_that_ends_leaves_what_waits_unanswered() {
    let (_dir, disk, elsewhere) = disk();
    let mut client = Client::new(&disk, 16);
    client.push(Op::Flush, 0, 0, None);
    client.run_until(|| elsewhere.waiting() == 1);
    drop(client);
    elsewhere.answer(|| Ok(()));
}

#[test]
fn writes_that_are_stopped_go_on_with_another_pace() {
    let (_dir, disk, _) = disk();
    disk.hold_flushes(None);
    disk.pace(Pace::Stopped);
    let mut client = Client::new(&disk, 16);
    let write = client.push(WRITE, 0, LEN, Some(&DATA));
    let read = client.push(Op::Read, 0, LEN, None);
    assert_eq!(tokens(&client.wait()), [read]);
    assert_eq!(client.at_others(), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| disk.pace(Pace::BytesPerSecond(1 << 30)));
        assert_eq!(tokens(&client.drain()), [write]);
    });
}
