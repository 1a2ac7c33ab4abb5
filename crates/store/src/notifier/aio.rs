//! Signalling an eventfd through the older interface for asynchronous I/O, `io_submit`: what a host has that forbids io_uring.
//!
//! The kernel signals the eventfd that a request names when the request is done, without ever waiting. The request is a read of
//! nothing from `/dev/null`, done before the call returns.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr;

/// Of `linux/aio_abi.h`.
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_FLAG_RESFD: u32 = 1;

/// A context of the kernel's, and the event that it signals.
#[derive(Debug)]
pub(super) struct Aio {
    context: libc::c_ulong,
    null: File,
    event: Option<OwnedFd>,
}

impl Aio {
    /// One without an event.
    ///
    /// # Errors
    /// Whatever `io_setup` reports.
    pub(super) fn new() -> io::Result<Self> {
        let null = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's name into `context`.
        done(unsafe { libc::syscall(libc::SYS_io_setup, 1_u32, &raw mut context) })?;
        Ok(Self { context, null, event: None })
    }

    /// As [`super::EventNotifier::set`].
    pub(super) fn set(&mut self, event: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.event = None;
        let Some(event) = event else { return Ok(()) };
        let event = event.try_clone_to_owned()?;
        // The kernel looks at the event before it finds that `null` cannot be written.
        match self.submit(IOCB_CMD_PWRITE, &event) {
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => {}
            Err(error) => return Err(error),
            Ok(()) => unreachable!("/dev/null is open for reading"),
        }
        self.event = Some(event);
        Ok(())
    }

    /// As [`super::EventNotifier::notify`].
    pub(super) fn notify(&self) -> io::Result<bool> {
        let Some(event) = &self.event else { return Ok(false) };
        self.submit(IOCB_CMD_PREAD, event)?;
        let mut taken: [u64; 4] = [0; 4];
        // Makes room for the next; a failure leaves the room as it was, which the next call reports.
        // SAFETY: the kernel writes at most one event, of 32 bytes, and a timeout of null means the least count, 0, is there.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0_isize,
                1_isize,
                taken.as_mut_ptr(),
                ptr::null::<libc::timespec>(),
            )
        };
        Ok(true)
    }

    fn submit(&self, opcode: u16, event: &OwnedFd) -> io::Result<()> {
        // SAFETY: a request is plain data, for which zeros are good.
        let mut request: libc::iocb = unsafe { std::mem::zeroed() };
        request.aio_lio_opcode = opcode;
        request.aio_fildes = self.null.as_raw_fd().cast_unsigned();
        request.aio_flags = IOCB_FLAG_RESFD;
        request.aio_resfd = event.as_raw_fd().cast_unsigned();
        let mut requests = [&raw mut request];
        // SAFETY: one request, without memory, which is done when the call returns.
        done(unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1_isize, requests.as_mut_ptr()) })
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context is this value's own.
        let _ = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn done(returned: libc::c_long) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
