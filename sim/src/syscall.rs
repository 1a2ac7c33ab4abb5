//! System calls at the one address that the filter of [`crate::kernel`] lets pass.

use std::sync::atomic::AtomicU32;

std::arch::global_asm!(
    ".text",
    ".globl vmstrata_sim_syscall",
    "vmstrata_sim_syscall:",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "mov rdx, rcx",
    "mov r10, r8",
    "mov r8, r9",
    "mov r9, [rsp + 8]",
    "syscall",
    ".globl vmstrata_sim_syscall_end",
    "vmstrata_sim_syscall_end:",
    "ret",
);

unsafe extern "C" {
    fn vmstrata_sim_syscall(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize)
    -> isize;
    fn vmstrata_sim_syscall_end();
}

/// Where the kernel sees that a call comes from.
pub fn address() -> u64 {
    vmstrata_sim_syscall_end as *const () as u64
}

/// Makes a call; the result is the kernel's, an error number below 0.
///
/// # Safety
/// As the call itself.
pub unsafe fn raw(number: i64, args: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = args;
    // SAFETY: the function makes the call and changes no register that a callee may not.
    unsafe { vmstrata_sim_syscall(number, a, b, c, d, e, f) }
}

pub fn exit(code: usize) -> ! {
    // SAFETY: ends the process.
    unsafe { raw(libc::SYS_exit_group, [code, 0, 0, 0, 0, 0]) };
    unreachable!("the process has ended")
}

pub fn futex_wait(word: &AtomicU32, value: u32) {
    let args = [word.as_ptr() as usize, libc::FUTEX_WAIT as usize, value as usize, 0, 0, 0];
    // SAFETY: the word lives as long as the call.
    unsafe { raw(libc::SYS_futex, args) };
}

pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: as above.
    unsafe { raw(libc::SYS_futex, [word.as_ptr() as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0]) };
}

/// The thread, as the kernel calls it.
pub fn thread() -> usize {
    // SAFETY: no pointers.
    unsafe { raw(libc::SYS_gettid, [0; 6]) as usize }
}

/// Returns once a thread of this process is gone.
pub fn wait_for_end(thread: usize) {
    // SAFETY: no pointers, and no signal.
    let exists = || unsafe { raw(libc::SYS_tkill, [thread, 0, 0, 0, 0, 0]) == 0 };
    while exists() {
        // SAFETY: no pointers.
        unsafe { raw(libc::SYS_sched_yield, [0; 6]) };
    }
}
