//! From a request in the ring to work for the engine, or to an answer at once when there is none to do.

use smallvec::SmallVec;
use vmstrata_disk::{IoQueue, Op, Request};
use vmstrata_store::{SegmentVec, copy_from_slice, copy_to_slice, slice};
use vmstrata_types::{GuestOffset, GuestRange};

use super::super::config::MAX_RANGES;
use super::super::request::{Command, RANGE_LEN, Shape, Status, ZeroRange, discard_range, parse, zero_range};
use super::super::ring::Chain;
use super::super::stats::Counters;
use super::{Pending, Queue};

/// Bytes of the longest list of ranges.
const ENTRIES_LEN: usize = MAX_RANGES as usize * RANGE_LEN;

/// What a request that moves no data consists of.
type Parts = SmallVec<[(Op, GuestRange); 4]>;

impl Queue {
    /// Hands a request to the engine, or answers it.
    #[inline]
    pub(super) fn begin(&mut self, chain: Chain, io: &mut IoQueue, counters: &Counters) {
        counters.requests.add(1);
        let (readable, writable) = (chain.readable_len, chain.writable_len);
        let shape = Shape { readable, writable, descriptors: chain.descriptors };
        let head = chain.head;
        match parse(&chain.header, shape, &self.device.limits()) {
            Ok(Command::Read(range)) => {
                counters.read_bytes.add(range.len);
                self.transfer(head, Op::Read, range, chain.writable, io);
            }
            Ok(Command::Write(range)) => {
                counters.written_bytes.add(range.len);
                let fua = self.device.writes_through(self.parts.features);
                self.transfer(head, Op::Write { fua }, range, chain.readable, io);
            }
            Ok(Command::Flush) => self.flush(head, io, counters),
            Ok(Command::Discard { count }) => {
                let parts = self.discards(&chain.readable, count);
                self.start(head, parts, io, counters);
            }
            Ok(Command::WriteZeroes { count }) => {
                let parts = self.zeroes(&chain.readable, count);
                self.start(head, parts, io, counters);
            }
            Ok(Command::GetId { len }) => {
                copy_from_slice(&slice(&chain.writable, 0, len), &self.device.serial[..len]);
                self.parts.ring.answer(head, Status::Ok as u8, len as u32);
            }
            Err(status) => {
                counters.errors.add(1);
                self.parts.ring.refuse(head, status as u8);
            }
        }
    }

    #[inline]
    fn transfer(
        &mut self,
        head: u16,
        op: Op,
        range: GuestRange,
        segments: SegmentVec<'static>,
        io: &mut IoQueue,
    ) {
        if range.len == 0 {
            return self.parts.ring.refuse(head, Status::Ok as u8);
        }
        let written = if matches!(op, Op::Read) { u32::try_from(range.len).unwrap_or(u32::MAX) } else { 0 };
        self.pending[usize::from(head)] = Pending { parts: 1, status: Status::Ok, written };
        io.push(Request { op, range, segments, token: self.token | u64::from(head) });
    }

    fn flush(&mut self, head: u16, io: &mut IoQueue, counters: &Counters) {
        if self.device.limits().read_only {
            return self.parts.ring.refuse(head, Status::Ok as u8);
        }
        let everything = GuestRange::new(GuestOffset::ZERO, 0);
        self.start(head, Ok(Parts::from_iter([(Op::Flush, everything)])), io, counters);
    }

    /// The ranges to discard that `data` lists, or a status when one of them is not allowed.
    fn discards(&self, data: &SegmentVec<'static>, count: usize) -> Result<Parts, Status> {
        let limits = &self.device.limits();
        let entry = |entry: &_| discard_range(entry, limits).map(|range| (Op::Discard, range));
        entries(data, count, &mut [0; ENTRIES_LEN]).iter().map(entry).collect()
    }

    /// The ranges to zero that `data` lists, or a status when one of them is not allowed.
    fn zeroes(&self, data: &SegmentVec<'static>, count: usize) -> Result<Parts, Status> {
        let limits = &self.device.limits();
        let fua = self.device.writes_through(self.parts.features);
        let part = |zero: ZeroRange| (Op::WriteZeroes { unmap: zero.unmap, fua }, zero.range);
        let entry = |entry: &_| zero_range(entry, limits).map(part);
        entries(data, count, &mut [0; ENTRIES_LEN]).iter().map(entry).collect()
    }

    /// Pushes the parts of a request that moves no data, or answers it with the status it got instead.
    fn start(&mut self, head: u16, parts: Result<Parts, Status>, io: &mut IoQueue, counters: &Counters) {
        let parts = match parts {
            Ok(parts) => parts,
            Err(status) => {
                counters.errors.add(1);
                return self.parts.ring.refuse(head, status as u8);
            }
        };
        let wanted = |&&(op, range): &&(Op, GuestRange)| matches!(op, Op::Flush) || range.len > 0;
        let count = parts.iter().filter(wanted).count();
        if count == 0 {
            return self.parts.ring.refuse(head, Status::Ok as u8);
        }
        self.pending[usize::from(head)] = Pending { parts: count as u16, status: Status::Ok, written: 0 };
        for &(op, range) in parts.iter().filter(wanted) {
            let token = self.token | u64::from(head);
            io.push(Request { op, range, segments: SegmentVec::new(), token });
        }
    }
}

/// Copies `count` entries of a discard or write-zeroes request out of guest memory, once.
fn entries<'a>(
    data: &SegmentVec<'static>,
    count: usize,
    into: &'a mut [u8; ENTRIES_LEN],
) -> &'a [[u8; RANGE_LEN]] {
    let bytes = &mut into[..count * RANGE_LEN];
    copy_to_slice(data, bytes);
    bytes.as_chunks().0
}
