//! Finds the extents of an object without its table, past whatever is damaged.

use vmstrata_repo::ObjectReader;

use super::super::extent::{self, ExtentHeader, ExtentId};
use super::super::name::ObjectId;
use super::{Contents, ExtentPlace, HEADER, read};

/// Bytes that are searched for the beginning of an extent at once.
const WINDOW: u64 = 256 << 10;
/// Bytes that can be read or not: a sector.
const SECTOR: u64 = 4096;
/// Places that look like the beginning of an extent and are none, before the search of a gap is given up: a guest can put
/// such bytes into its memory, and each costs a checksum.
const MAX_FALSE_STARTS: u32 = 4096;

/// The extents that are whole; those that are not have length 0.
pub(in super::super) fn scan(name: ObjectId, reader: &dyn ObjectReader) -> Contents {
    let search = Search { name, reader };
    let (mut extents, mut at) = (Vec::new(), HEADER as u64);
    while let Some((number, place)) = search.extent_at(at).or_else(|| search.next_after(at)) {
        if number >= extents.len() {
            extents.resize(number + 1, ExtentPlace::default());
        }
        extents[number] = place;
        at = place.offset + u64::from(place.len);
    }
    Contents { extents }
}

struct Search<'a> {
    name: ObjectId,
    reader: &'a dyn ObjectReader,
}

impl Search<'_> {
    fn header_at(&self, at: u64) -> Option<ExtentHeader> {
        ExtentHeader::parse(&read(self.reader, at, extent::HEADER).ok()?).ok()
    }

    /// The number and place of the extent that begins at `at`, when a whole one does.
    fn extent_at(&self, at: u64) -> Option<(usize, ExtentPlace)> {
        let header = self.header_at(at)?;
        // None has a higher number than there is room for extents.
        if u64::from(header.number) >= self.reader.len() / extent::HEADER as u64 {
            return None;
        }
        let len = extent::HEADER + header.stored;
        let id = ExtentId { object: self.name, number: header.number };
        extent::check(id, &read(self.reader, at, len).ok()?).ok()?;
        let place = ExtentPlace { offset: at, len: len as u32, pages: header.pages as u8 };
        Some((header.number as usize, place))
    }

    /// The next extent past `at`, where none begins that is whole: behind the damaged one, if that still says how long it is.
    fn next_after(&self, at: u64) -> Option<(usize, ExtentPlace)> {
        let damaged = self.header_at(at).map(|header| at + (extent::HEADER + header.stored) as u64);
        damaged.and_then(|end| self.extent_at(end)).or_else(|| self.search(at + 1))
    }

    /// The first extent at or past `at`, wherever it begins.
    fn search(&self, mut at: u64) -> Option<(usize, ExtentPlace)> {
        let mut false_starts = 0;
        loop {
            let Some(window) = self.window(at) else {
                at = self.readable_past(at)?;
                continue;
            };
            let starts = window.len().checked_sub(extent::HEADER - 1).filter(|starts| *starts > 0)?;
            for (offset, header) in (at..).zip(window.windows(extent::HEADER)) {
                if ExtentHeader::parse(header).is_err() {
                    continue;
                }
                if let Some(found) = self.extent_at(offset) {
                    return Some(found);
                }
                false_starts += 1;
                if false_starts > MAX_FALSE_STARTS {
                    return None;
                }
            }
            at += starts as u64;
        }
    }

    /// Bytes from `at` on: as many as can be read, to a factor of two; `None` where not even a sector can.
    fn window(&self, at: u64) -> Option<Vec<u8>> {
        let mut len = self.reader.len().saturating_sub(at).min(WINDOW);
        loop {
            match read(self.reader, at, len as usize) {
                Ok(bytes) => return Some(bytes),
                Err(_) if len > SECTOR => len = (len / 2).max(SECTOR),
                Err(_) => return None,
            }
        }
    }

    /// Where reading succeeds again past `at`, to a sector: found in growing steps, as much may be lost.
    fn readable_past(&self, at: u64) -> Option<u64> {
        let can = |at: u64| read(self.reader, at, SECTOR as usize).is_ok();
        let (mut lost, mut step) = (at, SECTOR);
        let mut good = loop {
            let next = lost.checked_add(step).filter(|next| next + SECTOR <= self.reader.len())?;
            if can(next) {
                break next;
            }
            (lost, step) = (next, (step * 2).min(WINDOW));
        };
        while good - lost > SECTOR {
            let between = lost + (good - lost) / 2;
            *(if can(between) { &mut good } else { &mut lost }) = between;
        }
        Some(good)
    }
}
