//! A hint to the processor.

/// Has the processor fetch the line of memory that `address` is in, without waiting for it; nothing where the address is
/// not mapped, and on processors that this does not know.
///
/// What is not in the processor's tables of addresses is walked to first. The walks of hints that follow each other at once
/// overlap; where other work lies between them, each is waited for.
#[inline]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every such processor has the instruction, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction never faults, and changes no memory or register.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
