//! An observer sees each request of a guest begin and end, and nothing else.

use std::sync::{Arc, Mutex};

use crate::common::flat::{range, write};
use crate::common::io::Client;
use crate::common::{open, scratch};
use vmstrata_disk::{CreateOptions, Disk, Error, IoObserver, Op, create};
use vmstrata_types::GuestRange;

type Seen = (Op, GuestRange);

/// What was seen to begin, and to end and how.
#[derive(Debug, Default)]
struct Log {
    begun: Mutex<Vec<Seen>>,
    ended: Mutex<Vec<(Seen, bool)>>,
}

impl IoObserver for Log {
    fn begin(&self, op: Op, range: GuestRange) {
        self.begun.lock().unwrap().push((op, range));
    }

    fn end(&self, op: Op, range: GuestRange, result: &Result<(), Error>) {
        self.ended.lock().unwrap().push(((op, range), result.is_ok()));
    }
}

impl Log {
    fn counts(&self) -> (usize, usize) {
        (self.begun.lock().unwrap().len(), self.ended.lock().unwrap().len())
    }
}

const SIZE: u64 = 1 << 20;
const LEN: u64 = 4096;

/// A disk whose first cluster is written, with a queue and an observer that comes after it.
fn observed() -> (tempfile::TempDir, Arc<Disk>, Client, Arc<Log>) {
    let dir = scratch();
    let path = dir.path().join("disk");
    create(&path, &CreateOptions { size: Some(SIZE), ..CreateOptions::default() }).unwrap();
    let disk = open(&path);
    write(&disk, 0, &[1; 65536]).unwrap();
    let client = Client::new(&disk, 8);
    let log = Arc::new(Log::default());
    disk.observe(Some(Arc::clone(&log) as Arc<dyn IoObserver>));
    (dir, disk, client, log)
}

#[test]
fn an_observer_sees_each_request_begin_and_end_once() {
    let (_dir, disk, mut client, log) = observed();
    let bytes = [2; LEN as usize];
    // In place, into a new cluster, by a worker; data, zeros, and where no disk is.
    for (op, at) in [
        (Op::Write { fua: false }, 0),
        (Op::Write { fua: false }, 1 << 17),
        (Op::Write { fua: true }, LEN),
        (Op::Read, 0),
        (Op::Read, SIZE - LEN),
        (Op::Read, SIZE),
        (Op::Flush, 0),
        (Op::Discard, 0),
        (Op::WriteZeroes { unmap: true, fua: false }, 0),
        (Op::Prefetch, 0),
    ] {
        let moved = matches!(op, Op::Write { .. }).then_some(&bytes[..]);
        client.push(op, at, LEN, moved);
        let seen = (op, range(at, LEN));
        assert_eq!(log.begun.lock().unwrap().last(), Some(&seen), "{op:?} at {at}");
        let is_ok = client.drain()[0].result.is_ok();
        assert_eq!(is_ok, at < SIZE);
        assert_eq!(log.ended.lock().unwrap().last(), Some(&(seen, is_ok)), "{op:?} at {at}");
    }
    assert_eq!(log.counts(), (10, 10));
    write(&disk, 0, &bytes).unwrap();
    disk.flush().unwrap();
    assert_eq!(log.counts(), (10, 10), "what the disk's owner does is no guest's request");
    drop(client);
    disk.close().unwrap();
}

#[test]
fn a_request_that_waits_for_the_disk_begins_once() {
    let (_dir, disk, mut client, log) = observed();
    disk.drain();
    client.push(Op::Write { fua: false }, 0, LEN, Some(&[2; LEN as usize]));
    client.submit();
    assert_eq!(log.counts(), (1, 0));
    disk.resume();
    assert!(client.drain()[0].result.is_ok());
    assert_eq!(log.counts(), (1, 1));
    drop(client);
    disk.close().unwrap();
}

#[test]
fn an_observer_comes_and_goes_while_a_queue_runs() {
    let (_dir, disk, mut client, log) = observed();
    // A flush is in flight until it is reaped.
    let mut flush = |disk: &Disk, observer: Option<&Arc<Log>>| {
        client.push(Op::Flush, 0, 0, None);
        disk.observe(observer.map(|log| Arc::clone(log) as Arc<dyn IoObserver>));
        client.drain();
    };
    flush(&disk, None);
    assert_eq!(log.counts(), (1, 0), "who has gone does not see the end");
    flush(&disk, Some(&log));
    flush(&disk, Some(&log));
    assert_eq!(log.counts(), (2, 2), "who has come sees the end of what was in flight");
}
