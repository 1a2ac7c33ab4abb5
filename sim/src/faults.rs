//! Storage that fails now and then, for the tasks that a run names.
//!
//! A call that fails changes nothing; a write may be short. A flush that fails promises nothing, and some of what those tasks wrote
//! since the last one is lost: kernels drop what they could not write, and report success the next time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::c_int;

use crate::shared::Kind;
use crate::syscall::raw;
use crate::tasks::{TASKS, TASKS_MAX};

/// Bytes that are lost together.
const PIECE: u64 = 512;

/// What a piece of a file held before it was written.
struct Dirty {
    inode: usize,
    at: u64,
    before: Vec<u8>,
}

/// See the module documentation.
pub struct Faults {
    /// Of each task: one call in so many fails; 0 for none.
    one_in: [Cell<u64>; TASKS_MAX],
    made: Cell<u64>,
    /// What a flush that fails may lose.
    dirty: RefCell<Vec<Dirty>>,
    /// Files that other tasks have written, which lose nothing.
    others: RefCell<BTreeSet<usize>>,
}

// SAFETY: as `Tasks`, used by the running task alone.
unsafe impl Sync for Faults {}

pub static FAULTS: Faults = Faults {
    one_in: [const { Cell::new(0) }; TASKS_MAX],
    made: Cell::new(0),
    dirty: RefCell::new(Vec::new()),
    others: RefCell::new(BTreeSet::new()),
};

impl Faults {
    /// Of the running task's calls, and of those of tasks that it starts, one in so many fails.
    pub fn begin(&self, one_in: u64) {
        self.one_in[TASKS.running()].set(one_in);
    }

    /// No call fails any more.
    pub fn end(&self) {
        self.one_in.iter().for_each(|one_in| one_in.set(0));
    }

    /// How many calls have failed.
    pub fn made(&self) -> u64 {
        self.made.get()
    }

    /// The running task starts this one.
    pub fn inherit(&self, task: usize) {
        self.one_in[task].set(self.one_in[TASKS.running()].get());
    }

    fn is_on(&self) -> bool {
        self.one_in[TASKS.running()].get() > 0
    }

    fn draw(&self) -> bool {
        let one_in = self.one_in[TASKS.running()].get();
        let draws = one_in > 0 && TASKS.random.one_in(one_in);
        self.made.set(self.made.get() + u64::from(draws));
        draws
    }

    /// What the call returns if it fails: one of these errors. `is_ours` says whether it is about simulated files.
    pub fn fails(&self, number: i64, errors: &[c_int], is_ours: impl FnOnce() -> bool) -> Option<isize> {
        if !self.is_on() || !is_ours() || !self.draw() {
            return None;
        }
        let error = *TASKS.random.pick(errors);
        TASKS.note(Kind::Call, [number as u64, 0, 0, 0], -i64::from(error), &[]);
        Some(-(error as isize))
    }

    /// The same of a call that changes a file's bytes, which may also write less than it was asked to.
    pub fn fails_change(&self, number: i64, args: &mut [usize; 6]) -> Option<isize> {
        const SHORT: c_int = 0;
        let failed = self.fails(number, &[libc::EIO, libc::ENOSPC, SHORT], || true)?;
        if failed != SHORT as isize {
            return Some(failed);
        }
        if matches!(number, libc::SYS_write | libc::SYS_pwrite64) && args[2] > 1 {
            args[2] /= 2;
        }
        None
    }

    /// The running task is about to write these bytes of a file.
    pub fn writes(&self, inode: usize, fd: usize, (at, len): (u64, usize)) {
        if !self.is_on() {
            self.others.borrow_mut().insert(inode);
            return self.flushed(inode);
        }
        if self.others.borrow().contains(&inode) {
            return;
        }
        with_file(fd, |file| {
            let mut dirty = self.dirty.borrow_mut();
            for piece in at / PIECE..(at + len as u64).div_ceil(PIECE) {
                let at = piece * PIECE;
                if dirty.iter().any(|known| (known.inode, known.at) == (inode, at)) {
                    continue;
                }
                let mut before = vec![0; PIECE as usize];
                let args = [file, before.as_mut_ptr() as usize, PIECE as usize, at as usize, 0, 0];
                // SAFETY: room for the bytes. What lies past the end is zeros.
                unsafe { raw(libc::SYS_pread64, args) };
                dirty.push(Dirty { inode, at, before });
            }
        });
    }

    /// What the file holds is on stable storage.
    pub fn flushed(&self, inode: usize) {
        self.dirty.borrow_mut().retain(|dirty| dirty.inode != inode);
    }

    /// A flush of the file has failed, which has this length.
    pub fn loses(&self, inode: usize, fd: usize, len: u64) {
        let (lost, rest): (Vec<Dirty>, Vec<Dirty>) =
            self.dirty.take().into_iter().partition(|dirty| dirty.inode == inode);
        self.dirty.replace(rest);
        with_file(fd, |file| {
            for Dirty { at, before, .. } in lost {
                if at >= len || TASKS.random.one_in(2) {
                    continue;
                }
                let bytes = &before[..PIECE.min(len - at) as usize];
                let args = [file, bytes.as_ptr() as usize, bytes.len(), at as usize, 0, 0];
                // SAFETY: bytes of our own.
                unsafe { raw(libc::SYS_pwrite64, args) };
                let noted = TASKS.note(Kind::Write, [inode as u64, at, 0, 0], bytes.len() as i64, &[bytes]);
                TASKS.note(Kind::Ended, [noted, 0, 0, 0], 0, &[]);
            }
        });
    }
}

/// Opens the file behind a descriptor anew, for the simulator's own reads and writes.
fn with_file(fd: usize, work: impl FnOnce(usize)) {
    let path = format!("/proc/self/fd/{fd}\0");
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, libc::O_RDWR as usize, 0, 0, 0];
    // SAFETY: a path that ends with a zero byte.
    if let Ok(file) = usize::try_from(unsafe { raw(libc::SYS_openat, args) }) {
        work(file);
        // SAFETY: opened above.
        unsafe { raw(libc::SYS_close, [file, 0, 0, 0, 0, 0]) };
    }
}
