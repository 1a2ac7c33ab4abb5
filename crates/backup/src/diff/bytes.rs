//! Comparing what the tables say may have changed byte by byte.

use std::sync::Arc;

use vmstrata_disk::{Disk, Result};
use vmstrata_store::Segment;
use vmstrata_types::{GuestOffset, GuestRange};

use super::{Diff, DiffExtent, DiffExtents, DiffKind, Found, Search};

/// Bytes compared at a time; a multiple of every cluster size.
const PIECE: u64 = 2 << 20;

/// What has changed, in order, in whole units; ends with the first error.
#[derive(Debug)]
pub struct ChangedBytes {
    extents: DiffExtents,
    old: Arc<Disk>,
    new: Arc<Disk>,
    unit: usize,
    /// What of the current extent was not compared yet.
    rest: Option<DiffExtent>,
    /// The end of what was compared.
    at: GuestOffset,
    found: Found,
}

/// What one look found.
#[derive(Debug)]
pub(crate) enum Looked {
    /// What has changed next.
    Changed(DiffExtent),
    /// Nothing more in what was compared, which ends here.
    UpTo(GuestOffset),
    /// Nothing more at all.
    End,
}

impl ChangedBytes {
    pub(super) fn new(diff: &Diff) -> Result<Self> {
        Ok(Self {
            extents: diff.extents(),
            old: diff.disk(diff.states.top(&diff.states.old))?,
            new: diff.disk(diff.states.top(&diff.states.new))?,
            unit: usize::try_from(diff.unit().size()).expect("at most 2 MiB"),
            rest: None,
            at: GuestOffset::ZERO,
            found: Found::default(),
        })
    }

    /// The newer state.
    pub(crate) fn new_state(&self) -> &Arc<Disk> {
        &self.new
    }

    /// Compares no more than one piece.
    ///
    /// # Errors
    /// A state that cannot be read.
    pub(crate) fn look(&mut self) -> Result<Looked> {
        if self.found.extents.len() < 2 {
            if self.advance()? {
                return Ok(Looked::UpTo(self.at));
            }
            return Ok(self.found.extents.pop_front().map_or(Looked::End, Looked::Changed));
        }
        Ok(Looked::Changed(self.found.extents.pop_front().expect("there are two")))
    }
}

/// Reads a range; what lies past the disk's end is zeros.
fn read(disk: &Disk, at: GuestOffset, len: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len).expect("a piece is small")];
    let there = disk.size().saturating_sub(at.get()).min(len);
    if there > 0 {
        disk.read(at, &[Segment::from_mut(&mut bytes[..there as usize])])?;
    }
    Ok(bytes)
}

impl Search for ChangedBytes {
    /// Compares the next piece; false at the end.
    fn advance(&mut self) -> Result<bool> {
        let Some(extent) = self.rest.take().map(Ok).or_else(|| self.extents.next()).transpose()? else {
            return Ok(false);
        };
        let start = extent.range.start;
        // Pieces end on multiples of their size, so that units are compared whole.
        let len = extent.range.len.min(PIECE - start.get() % PIECE);
        if len < extent.range.len {
            let range = GuestRange::new(start + len, extent.range.len - len);
            self.rest = Some(DiffExtent { range, ..extent });
        }
        let old = read(&self.old, start, len)?;
        let new = read(&self.new, start, len)?;
        let mut done = 0;
        while done < new.len() {
            let within = usize::try_from(start.get() % self.unit as u64).expect("less than a unit");
            let unit = if done == 0 { self.unit - within } else { self.unit };
            let part = done..new.len().min(done + unit);
            if old[part.clone()] != new[part.clone()] {
                let is_zero = new[part.clone()].iter().all(|byte| *byte == 0);
                let kind = if is_zero { DiffKind::Zero } else { DiffKind::Data };
                let range = GuestRange::new(start + done as u64, part.len() as u64);
                self.found.push(DiffExtent { range, kind });
            }
            done = part.end;
        }
        self.at = start + len;
        Ok(true)
    }

    fn found(&mut self) -> &mut Found {
        &mut self.found
    }
}

impl Iterator for ChangedBytes {
    type Item = Result<DiffExtent>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_found()
    }
}
