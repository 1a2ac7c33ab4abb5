//! Requests, as the disk carries them out: each enters, is checked, and goes to the layers.

use vmstrata_store::{AlignedBuf, Segment, total_len};
use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use crate::error::Result;
use crate::request::{Op, Request};
use crate::workers::CarryOut;
use crate::zero::{Purpose, ZERO_CHUNK};

impl Disk {
    /// Stops requests: returns once none is inside; new ones wait for [`Disk::resume`], or are refused once the disk is closed.
    /// [`Disk::flush`], snapshots and merges go on. One caller at a time may drain a disk.
    pub fn drain(&self) {
        self.epochs.close();
    }

    /// Lets requests in again.
    pub fn resume(&self) {
        self.epochs.open();
    }

    /// Refuses a request that makes no sense for this disk.
    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        if request.op.has_buffers() {
            self.check_buffers(request.range, total_len(&request.segments))?;
        } else if request.op != Op::Flush {
            self.check_range(request.range)?;
        }
        if request.op.changes_disk() { self.check_writable() } else { Ok(()) }
    }

    /// Carries a request out, blocking until it is done.
    ///
    /// # Errors
    /// As the method for the operation.
    pub fn run(&self, request: &Request) -> Result<()> {
        self.check(request)?;
        let segments: &[Segment<'_>] = &request.segments;
        let range = request.range;
        match request.op {
            Op::Read => self.read_counted(range.start, segments),
            Op::Write { fua } => self.write(range.start, segments).and_then(|()| self.flush_if(fua)),
            Op::Flush => self.flush(),
            Op::Discard => self.discard(range),
            Op::WriteZeroes { unmap, fua } => {
                self.write_zeroes(range, unmap).and_then(|()| self.flush_if(fua))
            }
            Op::Prefetch => self.prefetch(range),
        }
    }

    fn flush_if(&self, fua: bool) -> Result<()> {
        if fua { self.flush() } else { Ok(()) }
    }
}

impl CarryOut for Disk {
    fn check(&self, request: &Request) -> Result<()> {
        self.check(request)
    }

    fn run(&self, request: &Request) -> Result<()> {
        self.run(request)
    }
}

impl Disk {
    /// Writes `from` at `at`. It can be read once this returns, and is durable after the next [`Disk::flush`].
    ///
    /// # Errors
    /// A disk that takes no writes, a range that does not fit it, or a host that is full or cannot write: any part
    /// of the range may then have been written.
    pub fn write(&self, at: GuestOffset, from: &[Segment<'_>]) -> Result<()> {
        let _guard = self.epochs.enter();
        let _inside = self.write_gate.enter();
        let len = total_len(from);
        self.check_range(GuestRange::new(at, len as u64))?;
        self.check_writable()?;
        self.layers_now().write(at, from).map_err(|error| self.fail_if_fatal(error))
    }
}

impl Disk {
    /// Makes a range read as zeros; with `unmap` its space is given back.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn write_zeroes(&self, range: GuestRange, unmap: bool) -> Result<()> {
        self.clear(range, if unmap { Purpose::ZeroAndFree } else { Purpose::Zero })
    }

    /// Gives the space of a range back. Whole clusters read as zeros afterwards (except in version 2 images with a
    /// backing file, which cannot say so: there they are left alone); parts of clusters are left alone.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn discard(&self, range: GuestRange) -> Result<()> {
        self.clear(range, Purpose::Discard)
    }

    fn clear(&self, range: GuestRange, purpose: Purpose) -> Result<()> {
        let _guard = self.epochs.enter();
        let _inside = self.write_gate.enter();
        self.check_range(range)?;
        self.check_writable()?;
        if range.len == 0 {
            return Ok(());
        }
        self.layers_now().clear(range, purpose).map_err(|error| self.fail_if_fatal(error))
    }
}

impl Disk {
    /// Reads a range into the host's page cache, as far as that is useful.
    ///
    /// # Errors
    /// As [`Disk::read`].
    pub fn prefetch(&self, range: GuestRange) -> Result<()> {
        let mut buf = AlignedBuf::zeroed(ZERO_CHUNK.min(range.len as usize));
        let mut done = 0;
        while done < range.len {
            let part = (range.len - done).min(buf.len() as u64);
            self.read(range.start + done, &[Segment::from_mut(&mut buf[..part as usize])])?;
            done += part;
        }
        Ok(())
    }
}
