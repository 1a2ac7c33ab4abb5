//! Layers whose bytes are elsewhere: reads wait for them without a thread, and others pass.

mod common;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use common::flat::write;
use common::io::Client;
use common::scratch;
use common::wait::wait_until;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{
    CreateOptions, Disk, Format, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
    create,
};
use vmstrata_store::{Fetch, Gate, LocalFile, Segment, Store, total_len};
use vmstrata_types::HostOffset;

const CHUNK: u64 = 64 << 10;
const CHUNKS: u64 = 1024;
const LEN: u64 = 4096;
const READ: vmstrata_disk::Op = vmstrata_disk::Op::Read;

type Then = Box<dyn FnOnce(io::Result<()>) + Send>;

/// What of the base is here, and who waits for the rest.
#[derive(Default)]
struct Elsewhere {
    here: Mutex<Vec<bool>>,
    waiting: Mutex<Vec<(u64, Then)>>,
    is_lost: Mutex<bool>,
}

impl std::fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elsewhere").finish_non_exhaustive()
    }
}

impl Elsewhere {
    fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    /// What is waited for comes, or is lost.
    fn answer(&self) {
        let is_lost = *self.is_lost.lock().unwrap();
        let waiting: Vec<_> = self.waiting.lock().unwrap().drain(..).collect();
        for (chunk, then) in waiting {
            self.here.lock().unwrap()[chunk as usize] |= !is_lost;
            then(if is_lost { Err(io::ErrorKind::NotConnected.into()) } else { Ok(()) });
        }
    }
}

impl Elsewhere {
    /// Answers whatever is asked for while `work` runs.
    fn answering<T>(&self, work: impl FnOnce() -> T) -> T {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_until("the work to end", || {
                    self.answer();
                    is_done.load(Ordering::SeqCst)
                });
            });
            let result = work();
            is_done.store(true, Ordering::SeqCst);
            result
        })
    }
}

#[derive(Debug)]
struct FarStore {
    file: Arc<dyn Store>,
    elsewhere: Arc<Elsewhere>,
}

impl Store for FarStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        assert!(self.is_here(at, total_len(segments) as u64), "a thread waits");
        self.file.read_segments(segments, at)
    }
    fn write_segments(&self, _: &[Segment<'_>], _: HostOffset) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn punch_hole(&self, _: HostOffset, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn fetch(&self) -> Option<&dyn Fetch> {
        Some(self)
    }
}

impl Fetch for FarStore {
    fn is_here(&self, at: HostOffset, _len: u64) -> bool {
        self.elsewhere.here.lock().unwrap()[(at.get() / CHUNK) as usize]
    }
    fn fetch(&self, at: HostOffset, _len: u64, then: Then) {
        if *self.elsewhere.is_lost.lock().unwrap() {
            return then(Err(io::ErrorKind::NotConnected.into()));
        }
        self.elsewhere.waiting.lock().unwrap().push((at.get() / CHUNK, then));
    }
    fn file(&self) -> &dyn LocalFile {
        self.file.local().expect("a local file")
    }
}

/// Puts the base elsewhere.
#[derive(Debug)]
struct Files(Arc<Elsewhere>);

impl Opener for Files {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = LocalFiles.open(path, role, gate)?;
        if path.extension().is_some_and(|extension| extension == "raw") {
            let store = FarStore { file: opened.store, elsewhere: Arc::clone(&self.0) };
            return Ok(Opened { store: Arc::new(store), ..opened });
        }
        Ok(opened)
    }

    fn may_be_absent(&self) -> bool {
        true
    }
}

fn byte_of(chunk: u64) -> u8 {
    (chunk % 251) as u8 + 1
}

/// A disk over a raw base, chunk after chunk of one byte each, of which nothing is here.
fn disk() -> (tempfile::TempDir, Arc<Elsewhere>, Arc<Disk>) {
    let dir = scratch();
    let (base, path) = (dir.path().join("base.raw"), dir.path().join("disk"));
    let bytes: Vec<u8> = (0..CHUNKS).flat_map(|chunk| vec![byte_of(chunk); CHUNK as usize]).collect();
    std::fs::write(&base, bytes).unwrap();
    create(&path, &CreateOptions { backing: Some((base, Format::Raw)), ..CreateOptions::default() }).unwrap();
    let elsewhere =
        Arc::new(Elsewhere { here: Mutex::new(vec![false; CHUNKS as usize]), ..Elsewhere::default() });
    let opener = Arc::new(Files(Arc::clone(&elsewhere)));
    let resources = Resources::with_opener(ResourceOptions::default(), opener);
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    (dir, elsewhere, disk)
}

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
