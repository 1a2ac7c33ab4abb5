//! A base whose bytes come when the test says so.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vmstrata_disk::{
    CreateOptions, Disk, Format, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
    create,
};
use vmstrata_store::{Fetch, Fetched, Gate, Hold, LocalFile, Segment, Store, total_len};
use vmstrata_types::HostOffset;

use super::scratch;
use super::wait::wait_until;

/// Bytes that come together.
pub const CHUNK: u64 = 64 << 10;
pub const CHUNKS: u64 = 1024;

type Then = Box<dyn FnOnce(io::Result<Fetched>) + Send>;

/// What of the base is here, and who waits for the rest.
#[derive(Default)]
pub struct Elsewhere {
    pub here: Mutex<Vec<bool>>,
    waiting: Mutex<Vec<(Range<usize>, Then)>>,
    pub is_lost: Mutex<bool>,
}

impl std::fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elsewhere").finish_non_exhaustive()
    }
}

impl Elsewhere {
    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    /// What is waited for comes, or is lost.
    pub fn answer(&self) {
        let is_lost = *self.is_lost.lock().unwrap();
        let waiting: Vec<_> = self.waiting.lock().unwrap().drain(..).collect();
        for (chunks, then) in waiting {
            self.here.lock().unwrap()[chunks].iter_mut().for_each(|here| *here |= !is_lost);
            then(if is_lost { Err(io::ErrorKind::NotConnected.into()) } else { Ok(Fetched::Here) });
        }
    }
}

impl Elsewhere {
    /// Answers whatever is asked for while `work` runs.
    pub fn answering<T>(&self, work: impl FnOnce() -> T) -> T {
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
        if self.hold(at, total_len(segments) as u64).is_none() {
            assert!(*self.elsewhere.is_lost.lock().unwrap(), "a thread waits");
            return Err(io::ErrorKind::NotConnected.into());
        }
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

fn chunks(at: HostOffset, len: u64) -> Range<usize> {
    (at.get() / CHUNK) as usize..(at.get() + len).div_ceil(CHUNK) as usize
}

impl Fetch for FarStore {
    fn hold(&self, at: HostOffset, len: u64) -> Option<Hold> {
        let is_here = self.elsewhere.here.lock().unwrap()[chunks(at, len)].iter().all(|here| *here);
        is_here.then(|| Arc::new(()) as Hold)
    }
    fn fetch(&self, at: HostOffset, len: u64, then: Then) {
        if *self.elsewhere.is_lost.lock().unwrap() {
            return then(Err(io::ErrorKind::NotConnected.into()));
        }
        self.elsewhere.waiting.lock().unwrap().push((chunks(at, len), then));
    }
    fn file(&self) -> &dyn LocalFile {
        self.file.local().expect("a local file")
    }
}

/// Puts the base elsewhere.
#[derive(Debug)]
pub struct Files(pub Arc<Elsewhere>);

impl Opener for Files {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = LocalFiles.open(path, role, gate)?;
        if path.file_stem().is_some_and(|stem| stem == "base") {
            let store = FarStore { file: opened.store, elsewhere: Arc::clone(&self.0) };
            return Ok(Opened { store: Arc::new(store), ..opened });
        }
        Ok(opened)
    }

    fn may_be_absent(&self) -> bool {
        true
    }
}

pub fn byte_of(chunk: u64) -> u8 {
    (chunk % 251) as u8 + 1
}

/// A disk over a raw base, chunk after chunk of one byte each, of which nothing is here.
pub fn disk() -> (tempfile::TempDir, Arc<Elsewhere>, Arc<Disk>) {
    let dir = scratch();
    let base = dir.path().join("base.raw");
    let bytes: Vec<u8> = (0..CHUNKS).flat_map(|chunk| vec![byte_of(chunk); CHUNK as usize]).collect();
    std::fs::write(&base, bytes).unwrap();
    disk_on(dir, base, Format::Raw, 0)
}

/// A disk over a base of which the first chunks are here.
pub fn disk_on(
    dir: tempfile::TempDir,
    base: PathBuf,
    format: Format,
    here: usize,
) -> (tempfile::TempDir, Arc<Elsewhere>, Arc<Disk>) {
    let path = dir.path().join("disk");
    create(&path, &CreateOptions { backing: Some((base, format)), ..CreateOptions::default() }).unwrap();
    let here = (0..2 * CHUNKS as usize).map(|chunk| chunk < here).collect();
    let elsewhere = Arc::new(Elsewhere { here: Mutex::new(here), ..Elsewhere::default() });
    let opener = Arc::new(Files(Arc::clone(&elsewhere)));
    let resources = Resources::with_opener(ResourceOptions::default(), opener);
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    (dir, elsewhere, disk)
}
