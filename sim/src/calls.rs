//! What the system calls of a simulated process do.
//!
//! Calls on files go to the kernel, on a file system in memory; around each, time passes and other tasks run. Everything that
//! changes a file or a name is noted, so that a power failure can take it back. Numbers and times of files are those of
//! [`Shared`]: the real ones differ from run to run. Locks on files are the kernel's own.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int};
use std::mem::MaybeUninit;
use std::path::Path;
use std::slice;

use crate::faults::FAULTS;
use crate::mount;
use crate::shared::{Inode, Kind, Node, Shared};
use crate::syscall::raw;
use crate::tasks::{EPOCH_NS, On, TASKS};

/// The device that all simulated files seem to be on.
const DEVICE: u64 = 0x77;
/// What is read of the host itself, and what stands in its place: a host with one process and one file system. Relative to
/// the directory that [`begin`] is told.
pub const REPLACED: [(&CStr, &str); 3] = [
    (c"/proc/sys/kernel/random/boot_id", "boot_id"),
    (c"/proc/self/mountinfo", "mountinfo"),
    (c"/proc", "proc"),
];
/// The text of `mountinfo`.
pub const MOUNTS: &str = "1 0 0:119 / / rw - tmpfs tmpfs rw\n";

/// Of the process, set when it begins.
struct Host {
    /// The file system with the simulated files.
    device: Cell<u64>,
    pid: Cell<u64>,
    /// Paths in the place of [`REPLACED`].
    replaced: Cell<Option<[&'static CStr; 3]>>,
    /// Whether calls go to the kernel.
    lets_pass: Cell<bool>,
}

// SAFETY: as `Tasks`, used by the running task alone.
unsafe impl Sync for Host {}

static HOST: Host =
    Host { device: Cell::new(0), pid: Cell::new(0), replaced: Cell::new(None), lets_pass: Cell::new(false) };

/// The files of a device are simulated from now on.
pub fn begin(device: u64, pid: u64, directory: &Path) {
    HOST.device.set(device);
    HOST.pid.set(pid);
    let path = |(_, name)| {
        let path = CString::new(directory.join(name).into_os_string().into_encoded_bytes());
        &*Box::leak(path.expect("a path").into_boxed_c_str())
    };
    HOST.replaced.set(Some(REPLACED.map(path)));
}

/// For the C library's own calls.
pub fn let_pass(lets: bool) {
    HOST.lets_pass.set(lets);
}

fn shared() -> Shared {
    TASKS.shared()
}

const fn error(number: c_int) -> isize {
    -(number as isize)
}

/// The call by which newer ones replaced this one, if so.
fn modern(number: i64, args: [usize; 6]) -> (i64, [usize; 6]) {
    let here = libc::AT_FDCWD as usize;
    let [a, b, c, ..] = args;
    match number {
        libc::SYS_open => (libc::SYS_openat, [here, a, b, c, 0, 0]),
        libc::SYS_mkdir => (libc::SYS_mkdirat, [here, a, b, 0, 0, 0]),
        libc::SYS_unlink => (libc::SYS_unlinkat, [here, a, 0, 0, 0, 0]),
        libc::SYS_rmdir => (libc::SYS_unlinkat, [here, a, libc::AT_REMOVEDIR as usize, 0, 0, 0]),
        libc::SYS_rename => (libc::SYS_renameat, [here, a, here, b, 0, 0]),
        libc::SYS_link => (libc::SYS_linkat, [here, a, here, b, 0, 0]),
        libc::SYS_symlink => (libc::SYS_symlinkat, [a, here, b, 0, 0, 0]),
        _ => (number, args),
    }
}

/// Carries a call out; the result is as the kernel's.
pub fn call(number: i64, args: [usize; 6]) -> isize {
    let (number, args) = modern(number, args);
    // SAFETY: what the caller asked the kernel for.
    let kernel = || unsafe { raw(number, args) };
    if HOST.lets_pass.get() {
        return kernel();
    }
    if let Some(result) = mount::call(number, args) {
        return result;
    }
    // The kernel's business, but for what is mounted.
    if matches!(number, libc::SYS_close | libc::SYS_getdents64 | libc::SYS_fadvise64) {
        return kernel();
    }
    // What they are asked says nothing of the run but addresses; that and when they are asked does.
    TASKS.note(Kind::Call, [number as u64, 0, 0, 0], 0, &[]);
    match number {
        libc::SYS_futex => futex(args),
        libc::SYS_sched_yield => {
            TASKS.sleep(0);
            0
        }
        libc::SYS_nanosleep => sleep(false, args[0]),
        libc::SYS_clock_nanosleep => sleep(args[1] as c_int == libc::TIMER_ABSTIME, args[2]),
        libc::SYS_poll | libc::SYS_ppoll => poll(number, args),
        libc::SYS_getpid => HOST.pid.get() as isize,
        libc::SYS_getrandom => fill_random(args),
        libc::SYS_sched_getaffinity => affinity(args),
        libc::SYS_io_uring_setup | libc::SYS_copy_file_range | libc::SYS_sendfile => error(libc::ENOSYS),
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => read(number, args),
        libc::SYS_write
        | libc::SYS_pwrite64
        | libc::SYS_writev
        | libc::SYS_pwritev
        | libc::SYS_pwritev2
        | libc::SYS_ftruncate
        | libc::SYS_fallocate => change(number, args),
        libc::SYS_fsync | libc::SYS_fdatasync => flush(number, args),
        libc::SYS_fcntl => {
            if args[1] as c_int == libc::F_OFD_SETLK {
                TASKS.pass();
            }
            kernel()
        }
        libc::SYS_openat => open(args),
        libc::SYS_fstat => shown(kernel(), args[1]),
        libc::SYS_newfstatat => shown(kernel(), args[2]),
        libc::SYS_statx => shown_long(kernel(), args[4]),
        libc::SYS_utimensat => set_times(args),
        libc::SYS_renameat | libc::SYS_renameat2 => rename(number, args),
        libc::SYS_linkat | libc::SYS_symlinkat | libc::SYS_mkdirat | libc::SYS_unlinkat => name(number, args),
        libc::SYS_clock_gettime => error(libc::EINVAL),
        libc::SYS_mincore => all_in_memory(args),
        libc::SYS_getrusage => {
            // SAFETY: the caller's memory. No page was ever waited for.
            unsafe { (args[1] as *mut libc::rusage).write_bytes(0, 1) };
            0
        }
        _ => TASKS.fail(&format!("system call {number} is not simulated")),
    }
}

fn futex([word, operation, value, time, _, mask]: [usize; 6]) -> isize {
    let command = operation as c_int & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    match command {
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => {
            // Others may change the word before the caller sleeps.
            TASKS.pass();
            // SAFETY: the caller's word.
            if unsafe { (word as *const u32).read_volatile() } != value as u32 {
                return error(libc::EAGAIN);
            }
            let until = (time != 0).then(|| match command {
                libc::FUTEX_WAIT => TASKS.now_ns.get() + ns_at(time),
                _ if operation as c_int & libc::FUTEX_CLOCK_REALTIME != 0 => {
                    ns_at(time).saturating_sub(EPOCH_NS)
                }
                _ => ns_at(time),
            });
            if TASKS.wait(On::Futex(word), until) { error(libc::ETIMEDOUT) } else { 0 }
        }
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
            let woken = TASKS.wake(On::Futex(word), value);
            TASKS.pass();
            woken as isize
        }
        _ => TASKS.fail(&format!("futex operation {operation} is not simulated, with mask {mask:x}")),
    }
}

/// The `struct timespec` at an address, in nanoseconds.
fn ns_at(address: usize) -> u64 {
    // SAFETY: the caller's argument.
    let time = unsafe { (address as *const libc::timespec).read() };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

fn sleep(is_absolute: bool, time: usize) -> isize {
    let until = if is_absolute { ns_at(time) } else { TASKS.now_ns.get() + ns_at(time) };
    TASKS.wait(On::Time, Some(until));
    0
}

fn poll(number: i64, args: [usize; 6]) -> isize {
    let timeout_ns = if number == libc::SYS_poll {
        u64::try_from(args[2] as c_int).ok().map(|ms| ms * 1_000_000)
    } else {
        (args[2] != 0).then(|| ns_at(args[2]))
    };
    let until = timeout_ns.map(|ns| TASKS.now_ns.get().saturating_add(ns));
    TASKS.pass();
    loop {
        // SAFETY: the caller's descriptors; it does not wait.
        let found = unsafe { raw(libc::SYS_poll, [args[0], args[1], 0, 0, 0, 0]) };
        if found != 0 || until.is_some_and(|until| until <= TASKS.now_ns.get()) {
            return found;
        }
        TASKS.wait(On::Descriptor, until);
    }
}

fn fill_random([at, len, ..]: [usize; 6]) -> isize {
    for place in 0..len {
        // SAFETY: the caller's buffer.
        unsafe { ((at + place) as *mut u8).write(TASKS.random.next() as u8) };
    }
    len as isize
}

/// Pages that the real host took back meanwhile would make runs differ.
fn all_in_memory([_, len, pages, ..]: [usize; 6]) -> isize {
    // SAFETY: the caller's buffer has a byte for each page.
    unsafe { (pages as *mut u8).write_bytes(1, len.div_ceil(4096)) };
    0
}

/// Four processors, whatever the real host has.
fn affinity([_, len, mask, ..]: [usize; 6]) -> isize {
    // SAFETY: the caller's buffer.
    unsafe { (mask as *mut u8).write_bytes(0, len) };
    // SAFETY: as above.
    unsafe { (mask as *mut u8).write(0b1111) };
    8
}

/// For how long a request to storage takes, or the way of its answer.
fn latency() -> u64 {
    let random = &TASKS.random;
    if random.one_in(50) { random.below(5_000_000) } else { 2_000 + random.below(60_000) }
}

/// What the kernel says of a file; `None` if it is none of a simulated device.
fn stat_of(stat: isize, found: &MaybeUninit<libc::stat>) -> Option<libc::stat> {
    // SAFETY: the kernel has filled it if it said so.
    (stat == 0).then(|| unsafe { found.assume_init() }).filter(|found| found.st_dev == HOST.device.get())
}

fn stat_fd(fd: usize) -> Option<libc::stat> {
    let mut found = MaybeUninit::uninit();
    // SAFETY: room for the result.
    let done = unsafe { raw(libc::SYS_fstat, [fd, found.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    stat_of(done, &found)
}

fn stat_at(directory: usize, path: &CStr, flags: c_int) -> Option<libc::stat> {
    let mut found = MaybeUninit::uninit();
    let args = [directory, path.as_ptr() as usize, found.as_mut_ptr() as usize, flags as usize, 0, 0];
    // SAFETY: a path, and room for the result.
    let done = unsafe { raw(libc::SYS_newfstatat, args) };
    stat_of(done, &found)
}

fn number_of(found: &libc::stat) -> usize {
    shared().number(found.st_ino, TASKS.now_ns.get())
}

fn is_kind(found: &libc::stat, kind: libc::mode_t) -> bool {
    found.st_mode & libc::S_IFMT == kind
}

/// The simulated file behind a descriptor.
fn file(fd: usize) -> Option<usize> {
    stat_fd(fd).filter(|found| is_kind(found, libc::S_IFREG)).map(|found| number_of(&found))
}

/// The file has changed now.
fn touch(number: usize) {
    let now = TASKS.now_ns.get();
    let inode = shared().inode(number);
    shared().set_inode(number, Inode { mtime_ns: now, ctime_ns: now, is_unsynced: 1, ..inode });
}

fn touch_names(number: usize) {
    let now = TASKS.now_ns.get();
    let inode = shared().inode(number);
    shared().set_inode(number, Inode { ctime_ns: now, ..inode });
}

fn read(number: i64, args: [usize; 6]) -> isize {
    // SAFETY: as the caller asked.
    let kernel = || unsafe { raw(number, args) };
    let is_asked_only = number == libc::SYS_preadv2 && args[5] as c_int & libc::RWF_NOWAIT != 0;
    let Some(inode) = file(args[0]) else {
        if number == libc::SYS_read {
            TASKS.pass();
        }
        return kernel();
    };
    if !is_asked_only {
        TASKS.sleep(latency());
        if let Some(failed) = FAULTS.fails(number, &[libc::EIO], || true) {
            return failed;
        }
    }
    let result = kernel();
    let at = if number == libc::SYS_read { 0 } else { args[3] as u64 };
    TASKS.note(Kind::Call, [number as u64, inode as u64, at, 0], result as i64, &[]);
    result
}

/// The memory that a write takes its bytes from.
fn parts(number: i64, args: [usize; 6]) -> Vec<libc::iovec> {
    if matches!(number, libc::SYS_write | libc::SYS_pwrite64) {
        return vec![libc::iovec { iov_base: args[1] as *mut _, iov_len: args[2] }];
    }
    // SAFETY: the caller's vectors.
    unsafe { slice::from_raw_parts(args[1] as *const libc::iovec, args[2]) }.to_vec()
}

fn len_of(number: i64, args: [usize; 6]) -> usize {
    parts(number, args).iter().map(|part| part.iov_len).sum()
}

/// The first bytes of a write's memory, `most` of them if it has so many.
fn written(number: i64, args: [usize; 6], most: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts(number, args) {
        let from = bytes.len();
        let take = part.iov_len.min(most - from);
        bytes.resize(from + take, 0);
        // SAFETY: the caller's memory, which a guest may write meanwhile: it is copied as such. The room was just made.
        unsafe { bytes.as_mut_ptr().add(from).copy_from(part.iov_base.cast(), take) };
    }
    bytes
}

/// Calls that change a file's bytes.
fn change(number: i64, mut args: [usize; 6]) -> isize {
    let Some(inode) = file(args[0]) else {
        // SAFETY: as the caller asked.
        let result = unsafe { raw(number, args) };
        if args[0] > 2 {
            TASKS.wake(On::Descriptor, usize::MAX);
            TASKS.pass();
        }
        return result;
    };
    TASKS.sleep(latency());
    if let Some(failed) = FAULTS.fails_change(number, &mut args) {
        return failed;
    }
    let at = match number {
        libc::SYS_write | libc::SYS_writev => place_of_next(args[0]),
        libc::SYS_ftruncate => args[1] as u64,
        libc::SYS_fallocate => args[2] as u64,
        _ => args[3] as u64,
    };
    if TASKS.change() {
        write_part(number, args, at);
        TASKS.die();
    }
    if !matches!(number, libc::SYS_ftruncate | libc::SYS_fallocate) {
        FAULTS.writes(inode, args[0], (at, len_of(number, args)));
    }
    // SAFETY: as the caller asked.
    let result = unsafe { raw(number, args) };
    let done = result as i64;
    let noted = match number {
        _ if result < 0 => return result,
        libc::SYS_ftruncate => TASKS.note(Kind::SetLen, [inode as u64, at, 0, 0], done, &[]),
        libc::SYS_fallocate => {
            let (kind, place) = match args[1] as c_int & libc::FALLOC_FL_PUNCH_HOLE {
                // Space for a range of zeros, perhaps past the end.
                0 => (Kind::SetLen, stat_fd(args[0]).map_or(0, |found| found.st_size as u64)),
                _ => (Kind::PunchHole, at),
            };
            TASKS.note(kind, [inode as u64, place, args[3] as u64, 0], done, &[])
        }
        _ => {
            let bytes = written(number, args, result as usize);
            TASKS.note(Kind::Write, [inode as u64, at, 0, 0], done, &[&bytes])
        }
    };
    touch(inode);
    answer(noted);
    result
}

/// Where a write begins that does not say so.
fn place_of_next(fd: usize) -> u64 {
    // SAFETY: no pointers.
    let flags = unsafe { raw(libc::SYS_fcntl, [fd, libc::F_GETFL as usize, 0, 0, 0, 0]) };
    if flags as c_int & libc::O_APPEND != 0 {
        return stat_fd(fd).map_or(0, |found| found.st_size as u64);
    }
    // SAFETY: no pointers.
    unsafe { raw(libc::SYS_lseek, [fd, 0, libc::SEEK_CUR as usize, 0, 0, 0]) as u64 }
}

/// A process that is killed in a write leaves its start.
fn write_part(number: i64, args: [usize; 6], at: u64) {
    if !matches!(number, libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_pwritev2) {
        return;
    }
    let bytes = written(number, args, usize::MAX);
    let len = TASKS.random.below(bytes.len() as u64 + 1) as usize / 512 * 512;
    let part = [args[0], bytes.as_ptr() as usize, len, at as usize, 0, 0];
    // SAFETY: of a buffer of our own.
    let done = unsafe { raw(libc::SYS_pwrite64, part) };
    if done == len as isize
        && let Some(inode) = file(args[0])
    {
        TASKS.note(Kind::Write, [inode as u64, at, 0, 0], len as i64, &[&bytes[..len]]);
        touch(inode);
    }
}

fn flush(call: i64, args: [usize; 6]) -> isize {
    let Some(found) = stat_fd(args[0]) else { return error(libc::EINVAL) };
    let number = number_of(&found);
    let begun = TASKS.note(Kind::Flush, [number as u64, 0, 0, 0], 0, &[]);
    if TASKS.change() {
        TASKS.die();
    }
    TASKS.sleep(4 * latency());
    if let Some(failed) = FAULTS.fails(call, &[libc::EIO], || true) {
        FAULTS.loses(number, args[0], found.st_size as u64);
        return failed;
    }
    FAULTS.flushed(number);
    let inode = shared().inode(number);
    shared().set_inode(number, Inode { is_unsynced: 0, ..inode });
    TASKS.note(Kind::Ended, [begun, 0, 0, 0], 0, &[]);
    TASKS.pass();
    0
}

/// A name that a call is about: the directory, and the name in it.
struct Named {
    directory: usize,
    name: Vec<u8>,
}

/// The path at an address.
fn path_at(address: usize) -> &'static CStr {
    // SAFETY: the caller's path; it is used while the call lasts.
    unsafe { CStr::from_ptr(address as *const _) }
}

impl Named {
    /// `None` for names that are not simulated.
    fn of(directory: usize, path: &CStr) -> Option<Self> {
        let bytes = path.to_bytes();
        let (parent, name) = match bytes.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => (&bytes[..slash], &bytes[slash + 1..]),
            None => (&b""[..], bytes),
        };
        let found = if !parent.is_empty() {
            let parent = CString::new(parent).expect("a part of a C string");
            stat_at(directory, &parent, 0)
        } else if directory as c_int == libc::AT_FDCWD {
            stat_at(directory, c".", 0)
        } else {
            stat_at(directory, c"", libc::AT_EMPTY_PATH)
        };
        Some(Self { directory: number_of(&found?), name: name.to_vec() })
    }

    /// Notes what the name leads to now, and another name of the directory that is gone by the same step.
    fn note(&self, found: Option<&Found>, gone: &[u8]) -> u64 {
        let (node, inode) = found.map_or((Node::Nothing, 0), |found| (found.node, found.inode));
        let target = found.map_or(&[][..], |found| &found.target);
        touch(self.directory);
        let args = [self.directory as u64, node as u64, inode as u64, 0];
        TASKS.note(Kind::Name, args, 0, &[&self.name, &[0], target, &[0], gone])
    }
}

/// What has a name.
struct Found {
    node: Node,
    inode: usize,
    /// Of a link.
    target: Vec<u8>,
}

impl Found {
    fn at(directory: usize, path: &CStr) -> Option<Self> {
        let found = stat_at(directory, path, libc::AT_SYMLINK_NOFOLLOW)?;
        let inode = number_of(&found);
        let mut target = Vec::new();
        let node = match found.st_mode & libc::S_IFMT {
            libc::S_IFREG => Node::File,
            libc::S_IFDIR => Node::Directory,
            _ => {
                target.resize(4096, 0);
                let (path, at) = (path.as_ptr() as usize, target.as_mut_ptr() as usize);
                // SAFETY: a path, and room for the result.
                let len = unsafe { raw(libc::SYS_readlinkat, [directory, path, at, target.len(), 0, 0]) };
                target.truncate(usize::try_from(len).ok()?);
                Node::Link
            }
        };
        Some(Self { node, inode, target })
    }
}

/// The way of an answer about a change that was noted.
fn answer(noted: u64) {
    if TASKS.change() {
        TASKS.die();
    }
    TASKS.sleep(latency());
    TASKS.note(Kind::Ended, [noted, 0, 0, 0], 0, &[]);
}

/// What the kernel tells of a descriptor, with the simulated inode.
fn fd_info(fd: &[u8]) -> isize {
    let fd = std::str::from_utf8(fd).ok().and_then(|fd| fd.parse().ok());
    let inode = fd.and_then(stat_fd).map_or(0, |found| number_of(&found));
    let text = format!("pos:\t0\nflags:\t0\nmnt_id:\t1\nino:\t{inode}\n");
    // SAFETY: a name.
    let made = unsafe { raw(libc::SYS_memfd_create, [c"fdinfo".as_ptr() as usize, 0, 0, 0, 0, 0]) };
    if made >= 0 {
        // SAFETY: bytes of our own.
        unsafe { raw(libc::SYS_pwrite64, [made as usize, text.as_ptr() as usize, text.len(), 0, 0, 0]) };
    }
    made
}

fn open(mut args: [usize; 6]) -> isize {
    let path = path_at(args[1]);
    if let Some(fd) = path.to_bytes().strip_prefix(b"/proc/self/fdinfo/") {
        return fd_info(fd);
    }
    if let Some(place) = REPLACED.iter().position(|(replaced, _)| *replaced == path) {
        args[1] = HOST.replaced.get().expect("set when the process began")[place].as_ptr() as usize;
    }
    let flags = args[2] as c_int;
    let is_unnamed = flags & libc::O_TMPFILE == libc::O_TMPFILE;
    let creates = !is_unnamed && flags & libc::O_CREAT != 0;
    TASKS.sleep(latency());
    let errors = if creates || is_unnamed { &[libc::EIO, libc::ENOSPC][..] } else { &[libc::EIO] };
    if let Some(failed) = FAULTS.fails(libc::SYS_openat, errors, || Named::of(args[0], path).is_some()) {
        return failed;
    }
    let named = creates.then(|| Named::of(args[0], path)).flatten();
    let was_there = named.is_some() && stat_at(args[0], path, 0).is_some();
    // SAFETY: as the caller asked.
    let result = unsafe { raw(libc::SYS_openat, args) };
    let Some(found) = usize::try_from(result).ok().and_then(stat_fd) else { return result };
    let number = number_of(&found);
    if let Some(named) = named.filter(|_| !was_there) {
        answer(named.note(Some(&Found { node: Node::File, inode: number, target: Vec::new() }), &[]));
    } else if flags & libc::O_TRUNC != 0 {
        touch(number);
        answer(TASKS.note(Kind::SetLen, [number as u64, 0, 0, 0], 0, &[]));
    } else {
        TASKS.note(Kind::Call, [libc::SYS_openat as u64, number as u64, args[2] as u64, 0], 0, &[]);
    }
    result
}

fn rename(number: i64, args: [usize; 6]) -> isize {
    let (from, to) = (path_at(args[1]), path_at(args[3]));
    TASKS.sleep(latency());
    let errors = [libc::EIO, libc::ENOSPC];
    if let Some(failed) = FAULTS.fails(number, &errors, || Named::of(args[0], from).is_some()) {
        return failed;
    }
    let moved = Found::at(args[0], from);
    // To another name of the same file: nothing happens.
    let is_same = Found::at(args[2], to)
        .is_some_and(|there| Some(there.inode) == moved.as_ref().map(|found| found.inode));
    let names = Named::of(args[0], from).zip(Named::of(args[2], to));
    // SAFETY: as the caller asked.
    let result = unsafe { raw(number, args) };
    if let (0, false, Some(moved), Some((old, new))) = (result, is_same, moved, names) {
        touch_names(moved.inode);
        if old.directory == new.directory {
            answer(new.note(Some(&moved), &old.name));
        } else {
            let added = new.note(Some(&moved), &[]);
            let gone = old.note(None, &[]);
            answer(added);
            answer(gone);
        }
    }
    result
}

/// Calls that change one name.
fn name(number: i64, args: [usize; 6]) -> isize {
    let (directory, path) = match number {
        libc::SYS_linkat => (args[2], path_at(args[3])),
        libc::SYS_symlinkat => (args[1], path_at(args[2])),
        _ => (args[0], path_at(args[1])),
    };
    TASKS.sleep(latency());
    if let Some(failed) =
        FAULTS.fails(number, &[libc::EIO, libc::ENOSPC], || Named::of(directory, path).is_some())
    {
        return failed;
    }
    let named = Named::of(directory, path);
    let before = Found::at(directory, path);
    // SAFETY: as the caller asked.
    let result = unsafe { raw(number, args) };
    if let Some(named) = named.filter(|_| result == 0) {
        let after = Found::at(directory, path);
        before.iter().chain(&after).for_each(|found| touch_names(found.inode));
        answer(named.note(after.as_ref(), &[]));
    }
    result
}

/// What the kernel told of a file, as it is in the simulation.
fn shown(result: isize, address: usize) -> isize {
    let found = address as *mut libc::stat;
    // SAFETY: the kernel has filled it if it said so.
    if result == 0 && unsafe { (*found).st_dev } == HOST.device.get() {
        // SAFETY: as above.
        let found = unsafe { &mut *found };
        let number = number_of(found);
        let inode = shared().inode(number);
        (found.st_dev, found.st_ino) = (DEVICE, number as u64);
        (found.st_mtime, found.st_mtime_nsec) = real_time(inode.mtime_ns);
        (found.st_ctime, found.st_ctime_nsec) = real_time(inode.ctime_ns);
        (found.st_atime, found.st_atime_nsec) = real_time(0);
    }
    result
}

fn shown_long(result: isize, address: usize) -> isize {
    let found = address as *mut libc::statx;
    if result != 0 {
        return result;
    }
    // SAFETY: the kernel has filled it.
    let found = unsafe { &mut *found };
    if libc::makedev(found.stx_dev_major, found.stx_dev_minor) == HOST.device.get() {
        let number = shared().number(found.stx_ino, TASKS.now_ns.get());
        let inode = shared().inode(number);
        (found.stx_dev_major, found.stx_dev_minor) = (libc::major(DEVICE), libc::minor(DEVICE));
        found.stx_ino = number as u64;
        for (time, ns) in [
            (&mut found.stx_mtime, inode.mtime_ns),
            (&mut found.stx_ctime, inode.ctime_ns),
            (&mut found.stx_atime, 0),
            (&mut found.stx_btime, 0),
        ] {
            let (seconds, nanoseconds) = real_time(ns);
            (time.tv_sec, time.tv_nsec) = (seconds, nanoseconds as u32);
        }
    }
    result
}

/// Seconds and nanoseconds since 1970.
fn real_time(ns: u64) -> (i64, i64) {
    let ns = ns + EPOCH_NS;
    ((ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64)
}

/// A file's time of change, which no file of the real host needs.
fn set_times([fd, path, times, ..]: [usize; 6]) -> isize {
    let Some(number) = (path == 0).then(|| file(fd)).flatten() else { return error(libc::ENOSYS) };
    TASKS.pass();
    if let Some(failed) = FAULTS.fails(libc::SYS_utimensat, &[libc::EIO], || true) {
        return failed;
    }
    // SAFETY: two times, or none for now.
    let wanted = (times != 0).then(|| unsafe { (times as *const [libc::timespec; 2]).read()[1] });
    let now = TASKS.now_ns.get();
    let mtime_ns = match wanted {
        Some(wanted) if wanted.tv_nsec == libc::UTIME_OMIT => return 0,
        Some(wanted) if wanted.tv_nsec != libc::UTIME_NOW => {
            (wanted.tv_sec as u64 * 1_000_000_000 + wanted.tv_nsec as u64).saturating_sub(EPOCH_NS)
        }
        _ => now,
    };
    let inode = shared().inode(number);
    shared().set_inode(number, Inode { mtime_ns, ctime_ns: now, is_unsynced: 1, ..inode });
    TASKS.note(Kind::Call, [libc::SYS_utimensat as u64, number as u64, mtime_ns, 0], 0, &[]);
    0
}
