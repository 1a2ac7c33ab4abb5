//! Memory that outlives a simulated process: what it did, and what its files are.
//!
//! The simulator maps it before it forks. The process appends an [`Event`] for each step; after its death the simulator reads
//! them, so what was done is known whatever killed it. All numbers in it come from the seed: two runs of a seed leave the same
//! bytes.

use std::ptr::NonNull;
use std::slice;

/// What an event tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// A system call that changes nothing: its number, and up to three arguments.
    Call,
    /// Bytes written to a file: inode, offset.
    Write,
    /// A hole in a file: inode, offset, length.
    PunchHole,
    /// A file's new length: inode, length.
    SetLen,
    /// A flush of a file, or of a directory's names, has begun: inode.
    Flush,
    /// A name of a directory leads to something else now: directory, [`Node`] and its inode; the name, the target of a link, and
    /// another name that is gone by the same step, with zero bytes between them.
    Name,
    /// An earlier event has ended well: its number.
    Ended,
    /// What guests do: see [`crate::history::Deed`].
    Guest,
    /// A host sent a message: its number, from, to; its text.
    Sent,
    /// A message does not arrive: as above.
    Lost,
    /// A host took a message: as above.
    Received,
    /// Two hosts cannot reach each other: their numbers, until when.
    Partition,
    /// What a dead NAS would have left is judged: its hash.
    Crashed,
    /// The process ended as the seed said.
    Died,
    /// Something is wrong: the text.
    Failed,
    /// A text for people.
    Told,
}

/// What a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Node {
    Nothing,
    File,
    Directory,
    Link,
}

/// One step.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Event {
    pub kind: Kind,
    pub task: u32,
    pub time_ns: u64,
    pub args: [u64; 4],
    pub result: i64,
    pub data_len: u64,
}

/// A file or directory of the simulated host. Its number is its place in the table; 0 is none.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Inode {
    /// Its number on the real host.
    pub real: u64,
    pub mtime_ns: u64,
    pub ctime_ns: u64,
    /// Whether a power failure may lose its times.
    pub is_unsynced: u64,
}

const INODES_MAX: usize = 4096;
const LOG_MAX: usize = 1 << 30;

#[repr(C)]
struct Area {
    log_len: usize,
    events: u64,
    inodes_used: usize,
    inodes: [Inode; INODES_MAX],
}

/// See the module documentation. One process at a time uses it, and in that one task at a time.
#[derive(Clone, Copy, Debug)]
pub struct Shared(NonNull<Area>);

// SAFETY: only the task that runs uses it, and tasks hand over with a futex.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// An empty one.
    ///
    /// # Panics
    /// When the host has no memory.
    pub fn new() -> Self {
        let len = size_of::<Area>() + LOG_MAX;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever there is room.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED, "no memory for the log");
        let shared = Self(NonNull::new(at.cast()).expect("mapped"));
        // SAFETY: mapped, and used by nobody else. Number 0 stays unused.
        unsafe { (*shared.area()).inodes_used = 1 };
        shared
    }

    fn area(&self) -> *mut Area {
        self.0.as_ptr()
    }

    fn log(&self) -> *mut u8 {
        // SAFETY: the log follows the area in the mapping.
        unsafe { self.area().add(1).cast() }
    }

    /// Appends an event and returns its number.
    pub fn append(&self, event: &Event, data: &[&[u8]]) -> u64 {
        let data_len: usize = data.iter().map(|part| part.len()).sum();
        let event = Event { data_len: data_len as u64, ..*event };
        let area = self.area();
        // SAFETY: the area is mapped, and nobody else uses it now; the length is checked before bytes are copied.
        unsafe {
            let mut at = (*area).log_len;
            let end = at + size_of::<Event>() + data_len.next_multiple_of(8);
            assert!(end <= LOG_MAX, "the log is full");
            self.log().add(at).cast::<Event>().write(event);
            at += size_of::<Event>();
            for part in data {
                self.log().add(at).copy_from_nonoverlapping(part.as_ptr(), part.len());
                at += part.len();
            }
            self.log().add(at).write_bytes(0, end - at);
            (*area).log_len = end;
            (*area).events += 1;
            (*area).events
        }
    }

    /// The bytes of the log.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: so much was written, and the process that wrote it is dead.
        unsafe { slice::from_raw_parts(self.log(), (*self.area()).log_len) }
    }

    /// All events with their numbers and their data.
    pub fn events(&self) -> impl Iterator<Item = (u64, Event, &[u8])> {
        let (bytes, mut at, mut number) = (self.bytes(), 0, 0);
        std::iter::from_fn(move || {
            let head = bytes.get(at..at + size_of::<Event>())?;
            // SAFETY: `append` wrote an event there, aligned to eight bytes.
            let event = unsafe { head.as_ptr().cast::<Event>().read() };
            let from = at + size_of::<Event>();
            let len = event.data_len as usize;
            at = from + len.next_multiple_of(8);
            number += 1;
            Some((number, event, &bytes[from..from + len]))
        })
    }

    /// Forgets the events.
    pub fn clear_log(&self) {
        // SAFETY: the area is mapped, and nobody else uses it now.
        unsafe { ((*self.area()).log_len, (*self.area()).events) = (0, 0) };
    }

    /// Every number in use.
    pub fn inodes(&self) -> std::ops::Range<usize> {
        // SAFETY: as above.
        1..unsafe { (*self.area()).inodes_used }
    }

    pub fn inode(&self, number: usize) -> Inode {
        assert!(self.inodes().contains(&number));
        // SAFETY: as above, within the table.
        unsafe { (*self.area()).inodes[number] }
    }

    pub fn set_inode(&self, number: usize, inode: Inode) {
        assert!(self.inodes().contains(&number));
        // SAFETY: as above.
        unsafe { (*self.area()).inodes[number] = inode };
    }

    /// The number of the file that the real host calls `real`.
    pub fn find(&self, real: u64) -> Option<usize> {
        self.inodes().rev().find(|&number| self.inode(number).real == real)
    }

    /// As [`Shared::find`]; a file that is not known yet gets the next number.
    pub fn number(&self, real: u64, now_ns: u64) -> usize {
        self.find(real).unwrap_or_else(|| {
            let number = self.inodes().end;
            assert!(number < INODES_MAX, "too many files");
            // SAFETY: as above.
            unsafe { (*self.area()).inodes_used = number + 1 };
            self.set_inode(number, Inode { real, mtime_ns: now_ns, ctime_ns: now_ns, is_unsynced: 1 });
            number
        })
    }
}
