//! Takes a process's system calls away from the kernel.
//!
//! ```text
//!   the product: std, parking_lot, rustix ── system call ──► seccomp filter ──► SIGSYS ──► calls::call ──► result
//!                clock_gettime, pthread_create, pthread_join ──► the functions of that name in here ─┘
//! ```
//!
//! The product is not changed for it, and knows nothing of it: locks, channels, threads, clocks and files all end in system calls,
//! however they were made. The filter lets pass what is made at one address, in [`crate::syscall`]. The clock needs no system call, and
//! threads are made inside the C library: those three functions are replaced by the linker. What allocates may hand over to
//! another task, so that tasks change places where there is no system call, too.
//!
//! Invariant: [`inside`], the running task makes no system calls but through [`crate::syscall`].

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;

use crate::faults::FAULTS;
use crate::tasks::{EPOCH_NS, TASKS};
use crate::{calls, syscall};

/// What the running task is in. As [`crate::tasks::Tasks`], used by that alone.
struct Here {
    /// Whether this process is simulated.
    is_simulated: Cell<bool>,
    /// Whether the running task runs a part of the simulator.
    is_inside: Cell<bool>,
    /// Allocations until the next at which the task may hand over.
    allocations_left: Cell<u64>,
    /// The key whose destructor ends tasks.
    ends: Cell<libc::pthread_key_t>,
}

// SAFETY: the running task alone uses it.
unsafe impl Sync for Here {}

static HERE: Here = Here {
    is_simulated: Cell::new(false),
    is_inside: Cell::new(false),
    allocations_left: Cell::new(0),
    ends: Cell::new(0),
};

/// Allocations from one hand-over to the next, at most.
const ALLOCATIONS_MAX: u64 = 60;

/// Runs a part of the simulator in a task. Other tasks may run meanwhile.
pub fn inside<T>(run: impl FnOnce() -> T) -> T {
    let was_inside = HERE.is_inside.replace(true);
    let result = run();
    HERE.is_inside.set(was_inside);
    result
}

/// The calls that [`calls::call`] answers.
const TRAPPED: [i64; 50] = [
    libc::SYS_close,
    libc::SYS_getdents64,
    libc::SYS_fadvise64,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_sched_getaffinity,
    libc::SYS_io_uring_setup,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_writev,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fcntl,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rmdir,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_utimensat,
    libc::SYS_mincore,
    libc::SYS_getrusage,
];

/// From now on this process is simulated: its system calls are answered by [`calls`].
///
/// # Panics
/// On a kernel without seccomp.
pub fn begin() {
    HERE.is_simulated.set(true);
    // Calls of malloc's own, in threads that the simulator does not know yet or any more, cannot be answered: how many processors there are
    // it asks for one arena too many, and before it gives memory back, how much may be promised.
    for option in [libc::M_ARENA_TEST, libc::M_TRIM_THRESHOLD] {
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::mallopt(option, i32::MAX) }, 1);
    }
    // SAFETY: room for the key.
    assert_eq!(unsafe { libc::pthread_key_create(HERE.ends.as_ptr(), Some(end_task)) }, 0);
    // SAFETY: plain data, for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = trapped as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the type that SA_SIGINFO asks for.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSYS, &action, ptr::null_mut()) }, 0);
    let mut filter = filter();
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program is valid until the call returns, by when the kernel has its own.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &program) };
    assert_eq!(set, 0, "this kernel has no seccomp filters");
}

/// Lets calls from [`syscall::address`] pass, and those that are not trapped.
fn filter() -> Vec<libc::sock_filter> {
    /// Offsets in `struct seccomp_data`.
    const NUMBER: u32 = 0;
    const ADDRESS: u32 = 8;
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let unless = |k, skip| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: skip,
        k,
    };
    let answer = |action| statement(libc::BPF_RET | libc::BPF_K, action);
    let address = syscall::address();
    let mut filter = vec![
        load(ADDRESS),
        unless(address as u32, 3),
        load(ADDRESS + 4),
        unless((address >> 32) as u32, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        load(NUMBER),
    ];
    for number in TRAPPED {
        filter.extend([unless(number as u32, 1), answer(libc::SECCOMP_RET_TRAP)]);
    }
    filter.push(answer(libc::SECCOMP_RET_ALLOW));
    filter
}

/// The handler of SIGSYS: carries the call out, and puts the result where the kernel would.
extern "C" fn trapped(_signal: c_int, _info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands over the registers of the interrupted thread.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let get = |register: c_int| registers[register as usize] as usize;
    let number = get(libc::REG_RAX) as i64;
    let args =
        [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9].map(get);
    let result = inside(|| calls::call(number, args));
    registers[libc::REG_RAX as usize] = result as i64;
}

/// Lets another task run now and then when one allocates.
pub struct Allocator;

impl Allocator {
    fn count(&self) {
        if !HERE.is_simulated.get() || HERE.is_inside.get() {
            return;
        }
        match HERE.allocations_left.get() {
            0 => inside(|| {
                HERE.allocations_left.set(TASKS.random.below(ALLOCATIONS_MAX));
                TASKS.pass();
            }),
            left => HERE.allocations_left.set(left - 1),
        }
    }
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, len) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

type Main = extern "C" fn(*mut c_void) -> *mut c_void;

/// What a thread begins with.
struct Start {
    main: Main,
    argument: *mut c_void,
    task: usize,
}

/// Of the C library, which has another function of that name behind the one in here.
unsafe fn next<F>(name: &std::ffi::CStr) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    // SAFETY: the caller names the function's type.
    unsafe { std::mem::transmute_copy(&found) }
}

/// In the place of the C library's: a thread of a simulated process is a task.
///
/// # Safety
/// As pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    id: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    main: Main,
    argument: *mut c_void,
) -> c_int {
    type Create =
        unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Main, *mut c_void) -> c_int;
    // SAFETY: its type, as in pthread.h.
    let create: Create = unsafe { next(c"pthread_create") };
    if !HERE.is_simulated.get() {
        // SAFETY: as the caller promises.
        return unsafe { create(id, attributes, main, argument) };
    }
    inside(|| {
        let task = TASKS.add();
        FAULTS.inherit(task);
        let start = Box::into_raw(Box::new(Start { main, argument, task }));
        // SAFETY: as the caller promises; `run_task` takes the box.
        let result = unsafe { create(id, attributes, run_task, start.cast()) };
        if result == 0 {
            // SAFETY: written by the call.
            TASKS.begun(unsafe { *id });
            TASKS.pass();
        } else {
            TASKS.remove(task);
        }
        result
    })
}

extern "C" fn run_task(start: *mut c_void) -> *mut c_void {
    let start = start.cast::<Start>();
    // SAFETY: made by `pthread_create` for this thread; nothing is freed before it runs.
    TASKS.wait_for_baton(unsafe { (*start).task });
    // SAFETY: as above.
    let Start { main, argument, .. } = *unsafe { Box::from_raw(start) };
    // SAFETY: the key is there; the value says how often `end_task` was called.
    unsafe { libc::pthread_setspecific(HERE.ends.get(), ptr::without_provenance(1)) };
    HERE.is_inside.set(false);
    main(argument)
}

/// The last thing that a thread does but for what the C library does with signals blocked: the destructor of a key, called
/// again after all others.
unsafe extern "C" fn end_task(calls: *mut c_void) {
    /// How often the C library calls destructors that set their key again.
    const PTHREAD_DESTRUCTOR_ITERATIONS: usize = 4;
    if calls.addr() < PTHREAD_DESTRUCTOR_ITERATIONS {
        // SAFETY: as above.
        unsafe { libc::pthread_setspecific(HERE.ends.get(), ptr::without_provenance(calls.addr() + 1)) };
    } else {
        HERE.is_inside.set(true);
        // SAFETY: no pointers.
        TASKS.end(unsafe { libc::pthread_self() });
    }
}

/// In the place of the C library's.
///
/// # Safety
/// As pthread_join(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_join(id: libc::pthread_t, result: *mut *mut c_void) -> c_int {
    type Join = unsafe extern "C" fn(libc::pthread_t, *mut *mut c_void) -> c_int;
    // SAFETY: its type, as in pthread.h.
    let join: Join = unsafe { next(c"pthread_join") };
    if HERE.is_simulated.get() {
        inside(|| {
            TASKS.join(id);
            TASKS.forget(id);
        });
        calls::let_pass(true);
    }
    // SAFETY: as the caller promises.
    let joined = unsafe { join(id, result) };
    calls::let_pass(false);
    joined
}

/// In the place of the C library's.
///
/// # Safety
/// As pthread_detach(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_detach(id: libc::pthread_t) -> c_int {
    type Detach = unsafe extern "C" fn(libc::pthread_t) -> c_int;
    // SAFETY: its type, as in pthread.h.
    let detach: Detach = unsafe { next(c"pthread_detach") };
    if HERE.is_simulated.get() {
        TASKS.forget(id);
    }
    // SAFETY: as the caller promises.
    unsafe { detach(id) }
}

/// In the place of the C library's, which asks no kernel.
///
/// # Safety
/// As clock_gettime(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    if HERE.is_simulated.get() {
        TASKS.now_ns.set(TASKS.now_ns.get() + 100);
        let since = TASKS.now_ns.get();
        let ns = if clock == libc::CLOCK_REALTIME { since + EPOCH_NS } else { since };
        let time_now =
            libc::timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
        // SAFETY: as the caller promises.
        unsafe { time.write(time_now) };
        return 0;
    }
    // SAFETY: as the caller promises.
    let done = unsafe { syscall::raw(libc::SYS_clock_gettime, [clock as usize, time as usize, 0, 0, 0, 0]) };
    if done == 0 { 0 } else { -1 }
}
