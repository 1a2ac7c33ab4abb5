//! A disk in pieces: what of each is to be read, and what is nothing but zeros.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::iter;

use vmstrata_disk::{Disk, Extent, IoContext as _, Result};
use vmstrata_store::{Segment, is_zero};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, LayerIndex};

/// Bytes of a piece: a multiple of every cluster size, so that no cluster is in two; and no more than a processor's cache keeps
/// between the reading and the writing of them.
pub(super) const PIECE: u64 = 2 << 20;
/// Runs of allocation asked for at a time, and bytes of a disk looked at in one go.
const BATCH: usize = 4096;
const LOOK: u64 = 64 << 30;
/// The most zeros of one job: zeros may have to be written.
const HOLE_MAX: u64 = 1 << 30;
/// A raw disk ends with a whole sector.
const SECTOR: usize = 512;

/// What is known of a unit. Of two things that are said of parts of one, the greater is true of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    /// The target says nothing: it reads as what lies below, or as zeros.
    Absent,
    /// Zeros that hide what lies below.
    Zero,
    /// Bytes.
    Data,
}

/// A part of the disk, by units.
#[derive(Debug)]
pub(super) struct Piece {
    /// Where it begins, a multiple of [`PIECE`].
    pub(super) at: GuestOffset,
    /// Bytes of the disk in it.
    pub(super) len: usize,
    /// What its units are.
    pub(super) marks: Vec<Mark>,
    unit: ClusterBits,
    /// Its bytes, if they came with it.
    given: Option<Vec<u8>>,
}

/// What is done at a time.
#[derive(Debug)]
pub(super) enum Job {
    Piece(Piece),
    /// Nothing but zeros, or what lies below.
    Hole(GuestRange),
}

impl Job {
    /// Bytes of the disk.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Piece(piece) => piece.len as u64,
            Self::Hole(range) => range.len,
        }
    }

    /// Bytes that are to be read.
    pub(super) fn to_read(&self) -> u64 {
        match self {
            Self::Piece(piece) => piece.to_read(),
            Self::Hole(_) => 0,
        }
    }
}

impl Piece {
    fn new(at: u64, len: u64, unit: ClusterBits) -> Self {
        let marks = vec![Mark::Absent; len.div_ceil(unit.size()) as usize];
        Self { at: GuestOffset::new(at), len: len as usize, marks, unit, given: None }
    }

    /// As [`Job::to_read`].
    pub(super) fn to_read(&self) -> u64 {
        self.runs(Mark::Data).map(|run| (run.end.min(self.len) - run.start) as u64).sum()
    }

    /// Notes what a part of it is: of zeros in a part of a unit, all of that is stored.
    fn mark(&mut self, range: GuestRange, mark: Mark) {
        let (unit, end) = (self.unit.size(), self.at.get() + self.len as u64);
        let first = (range.start - self.at) / unit;
        let last = (range.end() - self.at).div_ceil(unit);
        for number in first..last {
            let start = self.at.get() + number * unit;
            let is_whole = range.start.get() <= start && range.end().get() >= (start + unit).min(end);
            let mark = if mark == Mark::Zero && !is_whole { Mark::Data } else { mark };
            let known = &mut self.marks[number as usize];
            *known = mark.max(*known);
        }
    }

    /// The bytes of one unit of it, whole.
    pub(super) fn unit_size(&self) -> usize {
        self.unit.size() as usize
    }

    /// Runs of units that are `mark`, as the bytes from its beginning on; the last unit counts as whole.
    pub(super) fn runs(&self, mark: Mark) -> impl Iterator<Item = std::ops::Range<usize>> {
        let (marks, unit) = (&self.marks, self.unit_size());
        let mut next = 0;
        iter::from_fn(move || {
            let first = next + marks[next..].iter().position(|found| *found == mark)?;
            let len = marks[first..].iter().take_while(|found| **found == mark).count();
            next = first + len;
            Some(first * unit..next * unit)
        })
    }

    /// Fills `bytes` with its data, and notes units of that which turn out to be zeros: they are `zeros`. Bytes past the
    /// disk's end are zeros.
    ///
    /// # Errors
    /// What cannot be read.
    pub(super) fn read(&mut self, disk: Option<&Disk>, bytes: &mut [u8], zeros: Mark) -> Result<()> {
        let given = self.given.take();
        for run in self.runs(Mark::Data) {
            let there = run.end.min(self.len);
            match (&given, disk) {
                (Some(given), _) => bytes[run.start..there].copy_from_slice(&given[run.start..there]),
                (None, Some(disk)) => {
                    disk.read(
                        self.at + run.start as u64,
                        &[Segment::from_mut(&mut bytes[run.start..there])],
                    )?;
                }
                (None, None) => unreachable!("without a disk the bytes come with the piece"),
            }
            bytes[there..run.end].fill(0);
        }
        let unit = self.unit_size();
        for (mark, bytes) in self.marks.iter_mut().zip(bytes.chunks(unit)) {
            if *mark == Mark::Data && is_zero(bytes) {
                *mark = zeros;
            }
        }
        Ok(())
    }
}

/// The jobs of a disk, in order and without gaps. Only what the layer `alone` says counts, if there is one.
pub(super) fn of_disk(
    disk: &Disk,
    unit: ClusterBits,
    alone: Option<LayerIndex>,
) -> impl Iterator<Item = Result<Job>> {
    let mut pieces = Pieces { disk, unit, alone, at: 0, extents: VecDeque::new() };
    iter::from_fn(move || (pieces.at < disk.size()).then(|| pieces.next()))
}

struct Pieces<'a> {
    disk: &'a Disk,
    unit: ClusterBits,
    alone: Option<LayerIndex>,
    /// Where the next job begins.
    at: u64,
    /// What comes next, from there on.
    extents: VecDeque<Extent>,
}

impl Pieces<'_> {
    /// The run that begins at `at`.
    fn extent(&mut self, at: u64) -> Result<Extent> {
        if self.extents.is_empty() {
            let rest = (self.disk.size() - at).min(LOOK);
            self.extents = self.disk.extents(GuestRange::new(GuestOffset::new(at), rest), BATCH)?.into();
        }
        Ok(self.extents[0])
    }

    /// Leaves what lies before `at`.
    fn pass(&mut self, at: u64) {
        let first = &mut self.extents[0].range;
        let end = first.end();
        if end.get() == at {
            self.extents.pop_front();
        } else {
            *first = GuestRange::new(GuestOffset::new(at), end.get() - at);
        }
    }

    fn mark_of(&self, extent: &Extent) -> Mark {
        match self.alone {
            Some(alone) if extent.layer != Some(alone) => Mark::Absent,
            Some(_) if extent.kind.reads_zero() => Mark::Zero,
            None if extent.kind.reads_zero() => Mark::Absent,
            _ => Mark::Data,
        }
    }

    fn next(&mut self) -> Result<Job> {
        let (at, size) = (self.at, self.disk.size());
        let first = self.extent(at)?;
        let end = (at + PIECE).min(size);
        if self.mark_of(&first) == Mark::Absent && first.range.end().get() >= end {
            let end = first.range.end().get().min(at + HOLE_MAX);
            let end = if end == size { end } else { end / PIECE * PIECE };
            self.pass(end);
            self.at = end;
            return Ok(Job::Hole(GuestRange::new(GuestOffset::new(at), end - at)));
        }
        let mut piece = Piece::new(at, end - at, self.unit);
        let mut from = at;
        while from < end {
            let extent = self.extent(from)?;
            let to = extent.range.end().get().min(end);
            piece.mark(GuestRange::new(GuestOffset::new(from), to - from), self.mark_of(&extent));
            self.pass(to);
            from = to;
        }
        self.at = end;
        Ok(Job::Piece(piece))
    }
}

/// The jobs of a raw disk whose bytes come in order.
pub(super) fn of_stream(
    stream: &mut (dyn Read + Send),
    unit: ClusterBits,
) -> impl Iterator<Item = Result<Job>> + Send {
    let mut at = 0;
    iter::from_fn(move || match next_of(&mut *stream).while_trying("read the stream") {
        Ok(bytes) if bytes.is_empty() => None,
        Ok(bytes) => {
            let mut piece = Piece::new(at, bytes.len() as u64, unit);
            piece.marks.fill(Mark::Data);
            piece.given = Some(bytes);
            at += PIECE;
            Some(Ok(Job::Piece(piece)))
        }
        Err(error) => Some(Err(error)),
    })
}

/// The bytes of a piece; fewer at the end, in whole sectors.
fn next_of(stream: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(PIECE as usize);
    stream.take(PIECE).read_to_end(&mut bytes)?;
    bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: ClusterBits = ClusterBits::DEFAULT;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len)
    }

    #[test]
    fn zeros_in_a_part_of_a_unit_are_stored_and_the_last_unit_need_not_be_whole() {
        let mut piece = Piece::new(PIECE, 0x2_8000, UNIT);
        piece.mark(range(PIECE, 0x8000), Mark::Absent);
        piece.mark(range(PIECE + 0x8000, 0x1_8000), Mark::Zero);
        piece.mark(range(PIECE + 0x2_0000, 0x8000), Mark::Zero);
        assert_eq!(piece.marks, [Mark::Data, Mark::Zero, Mark::Zero]);
        piece.mark(range(PIECE + 0x2_7000, 0x1000), Mark::Data);
        assert_eq!(piece.marks, [Mark::Data, Mark::Zero, Mark::Data]);
        let runs: Vec<_> = piece.runs(Mark::Data).collect();
        assert_eq!(runs, [0..0x1_0000, 0x2_0000..0x3_0000]);
    }

    #[test]
    fn a_stream_ends_with_a_whole_sector_and_its_zeros_are_found() {
        let mut bytes = vec![0; PIECE as usize + 0x1_0001];
        (bytes[0], bytes[PIECE as usize + 0x1_0000]) = (1, 2);
        let mut buf = vec![7; PIECE as usize];
        let mut found = Vec::new();
        for job in of_stream(&mut &bytes[..], UNIT) {
            let Ok(Job::Piece(mut piece)) = job else { panic!("{job:?}") };
            piece.read(None, &mut buf, Mark::Absent).unwrap();
            let data: Vec<_> = piece.runs(Mark::Data).collect();
            found.push((piece.at.get(), piece.len, data));
        }
        let one = |run: std::ops::Range<usize>| -> Vec<_> { std::iter::once(run).collect() };
        let ends = [(0, PIECE as usize, one(0..0x1_0000)), (PIECE, 0x1_0200, one(0x1_0000..0x2_0000))];
        assert_eq!(found, ends);
        assert!(buf[0x1_0000] == 2 && buf[0x1_0001..0x2_0000].iter().all(|byte| *byte == 0), "padded");
    }
}
