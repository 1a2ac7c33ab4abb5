//! The tables of a snapshot, kept as pages among its critical ones: where the guest's pages lie, what hides those that are lost,
//! where they lie on the guest's disks, and blobs.
//!
//! ```text
//!  table ──► piece: what it says of 1,024 pages ──► length │ bytes │ zeros up to a whole page ──► pages, each found or stored
//!                                                                                                      │
//!  metadata object: kinds and lengths of the tables, and where their pages lie ◄───────────────────────┘
//! ```
//!
//! What a guest changed between two snapshots changes some pieces; the pages of all others are in the store already. They
//! have as many copies as critical pages, and are verified, repaired and collected with them.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::bytes::{Malformed, Put, Take};
use super::error::{Result, VaultError};
use super::hiding;
use super::pages::{Content, Entry, PageNumber, Pages, Place};
use super::refill::{self, Refill};
use super::sources::Sources;
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;
use crate::hide::Hiding;

/// Pages of the guest that a piece speaks of, at most.
pub(super) const PIECE_PAGES: u64 = 1024;
/// Pages that a piece of [`Kind::Pages`] takes, at most: a run has up to 10 bytes.
const MOST_OF_PIECE: u64 = (LENGTH as u64 + PIECE_PAGES * 10).div_ceil(PAGE_BYTES as u64);
/// Pages of all tables but [`Kind::Pages`]: 1 GiB.
pub(super) const MAX_PAGES: u64 = 1 << 18;
/// Tables of a kind that only who wrote them understands.
pub(super) const MAX_BLOBS: usize = 60;
/// Bytes of such a table's name.
pub(super) const MAX_BLOB_NAME: usize = 100;
/// Bytes of a piece's length, with which it begins.
const LENGTH: usize = 4;

/// Which table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Pages,
    Hiding,
    Refill,
    Blob(String),
}

/// What a snapshot says of its guest's pages, and blobs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tables<'a> {
    pub(super) pages: &'a Pages,
    pub(super) hiding: &'a Hiding,
    /// In order of frames.
    pub(super) refill: &'a [(Frame, Refill)],
    pub(super) blobs: &'a BTreeMap<String, Vec<u8>>,
}

/// Where the pages of a snapshot's tables lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Index {
    /// With the number of their pages.
    tables: Vec<(Kind, u64)>,
    /// Of all tables, one after another.
    #[serde(skip)]
    places: Pages,
}

/// Puts a page somewhere, and says where.
pub(super) type PutPage<'a> = dyn FnMut(&[u8; PAGE_BYTES]) -> Result<Content> + 'a;

impl Tables<'_> {
    /// Gives all pages to `put`.
    ///
    /// # Errors
    /// [`VaultError::Limit`] for tables that are too long; what `put` says.
    pub(super) fn write(&self, put: &mut PutPage<'_>) -> Result<Index> {
        let mut tables = Vec::new();
        let mut places = Pages::default();
        let mut table = |kind: Kind, write: &dyn Fn(&mut PutPiece<'_>) -> Result<()>| {
            let before = places.count();
            write(&mut |piece| put_piece(piece, put, &mut places))?;
            tables.push((kind, places.count() - before));
            Ok::<_, VaultError>(())
        };
        table(Kind::Pages, &|put| self.pages.encode_pieces(put))?;
        table(Kind::Hiding, &|put| hiding::encode_pieces(self.hiding, put))?;
        table(Kind::Refill, &|put| refill::encode_pieces(self.refill, put))?;
        for (name, blob) in self.blobs {
            table(Kind::Blob(name.clone()), &|put| put(blob))?;
        }
        let index = Index { tables, places };
        let (value, most) = (index.pages_of_others().unwrap_or(u64::MAX), MAX_PAGES);
        if value <= most {
            return Ok(index);
        }
        let (value, most) = (value.try_into().unwrap_or(i64::MAX), most as i64);
        Err(VaultError::Limit { what: "the number of pages that metadata takes", value, least: 0, most })
    }
}

/// The piece of a table that a frame is in.
pub(super) fn piece_of(frame: Frame) -> u64 {
    frame.get() / PIECE_PAGES
}

/// Takes a piece of a table.
pub(super) type PutPiece<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

fn put_piece(piece: &[u8], put: &mut PutPage<'_>, places: &mut Pages) -> Result<()> {
    let len = u32::try_from(piece.len()).expect("callers have checked it");
    let mut page = [0; PAGE_BYTES];
    page[..LENGTH].copy_from_slice(&len.to_le_bytes());
    let (first, rest) = piece.split_at(piece.len().min(PAGE_BYTES - LENGTH));
    page[LENGTH..][..first.len()].copy_from_slice(first);
    let mut put = |page: &[u8; PAGE_BYTES]| -> Result<()> {
        places.push(Entry { class: PageClass::Critical, content: put(page)? }, 1);
        Ok(())
    };
    put(&page)?;
    rest.chunks(PAGE_BYTES).try_for_each(|chunk| {
        page[..chunk.len()].copy_from_slice(chunk);
        page[chunk.len()..].fill(0);
        put(&page)
    })
}

impl Index {
    /// Where they lie, with how many pages that follow.
    pub(super) fn places(&self) -> impl Iterator<Item = (Place, u64)> + '_ {
        self.places.places()
    }

    /// The objects that they lie in, with the class of those pages; many times each.
    pub(super) fn objects(&self) -> impl Iterator<Item = (u16, PageClass)> + '_ {
        self.places.objects()
    }

    pub(super) fn encode_places(&self, put: &mut Put) {
        self.places.encode(put);
    }

    /// Reads where the pages of the tables lie, of a machine that has `count` pages.
    pub(super) fn decode_places(&mut self, take: &mut Take<'_>, count: u64) -> Result<(), Malformed> {
        if self.tables.len() > MAX_BLOBS + 3 {
            return Err(Malformed("it has too many tables"));
        }
        if (1..self.tables.len())
            .any(|at| self.tables[..at].iter().any(|(kind, _)| *kind == self.tables[at].0))
        {
            return Err(Malformed("a table is there twice"));
        }
        let pages = self.tables.first().filter(|(kind, _)| *kind == Kind::Pages);
        let (_, pages) = pages.ok_or(Malformed("it has no pages"))?;
        let others = self.pages_of_others().filter(|others| *others <= MAX_PAGES);
        let is_short = *pages <= count.div_ceil(PIECE_PAGES) * MOST_OF_PIECE;
        let others = others.filter(|_| is_short).ok_or(Malformed("a table is too long"))?;
        self.places = Pages::decode(take, pages + others)?;
        let all_kept = self.places.runs().all(|(_, _, entry)| entry.class == PageClass::Critical);
        if all_kept { Ok(()) } else { Err(Malformed("a page of a table is not critical")) }
    }

    /// Pages of all tables but the first.
    fn pages_of_others(&self) -> Option<u64> {
        self.tables.iter().skip(1).try_fold(0u64, |sum, (_, pages)| sum.checked_add(*pages))
    }

    /// The pages of a table.
    fn range(&self, wanted: &Kind) -> Option<Range<u64>> {
        let mut start = 0u64;
        for (kind, pages) in &self.tables {
            let end = start.saturating_add(*pages);
            if kind == wanted {
                return Some(start..end);
            }
            start = end;
        }
        None
    }

    /// Reads every page, whatever it says.
    ///
    /// # Errors
    /// Each copy with what was wrong.
    pub(super) fn check(&self, sources: &Sources) -> Result<(), Vec<String>> {
        self.tables
            .iter()
            .try_for_each(|(kind, _)| self.pieces(kind, sources).try_for_each(|piece| piece.map(drop)))
    }

    /// Where all pages of a machine that has `count` of them are.
    ///
    /// # Errors
    /// Each copy with what was wrong, or what the table is not.
    pub(super) fn pages(&self, sources: &Sources, count: u64) -> Result<Pages, Vec<String>> {
        let mut pages = Pages::default();
        for piece in self.pieces(&Kind::Pages, sources) {
            let left = (count - pages.count()).min(PIECE_PAGES);
            decode(&piece?, |take| pages.decode_more(take, left))?;
        }
        if pages.count() == count {
            Ok(pages)
        } else {
            Err(malformed(Malformed("it does not have all pages")))
        }
    }

    /// What hides pages.
    ///
    /// # Errors
    /// As [`Self::pages`].
    pub(super) fn hiding(&self, sources: &Sources) -> Result<Hiding, Vec<String>> {
        let mut found = Hiding::default();
        for piece in self.pieces(&Kind::Hiding, sources) {
            decode(&piece?, |take| hiding::decode_more(&mut found, take))?;
        }
        Ok(found)
    }

    /// What lies on the guest's disks, of which there are so many.
    ///
    /// # Errors
    /// As [`Self::pages`].
    pub(super) fn refill(
        &self,
        sources: &Sources,
        disks: usize,
    ) -> Result<Vec<(Frame, Refill)>, Vec<String>> {
        let mut table = Vec::new();
        for piece in self.pieces(&Kind::Refill, sources) {
            decode(&piece?, |take| refill::decode_more(&mut table, take, disks))?;
        }
        Ok(table)
    }

    /// All blobs.
    ///
    /// # Errors
    /// As [`Self::pages`].
    pub(super) fn blobs(&self, sources: &Sources) -> Result<BTreeMap<String, Vec<u8>>, Vec<String>> {
        let mut blobs = BTreeMap::new();
        for (kind, _) in &self.tables {
            let Kind::Blob(name) = kind else { continue };
            let pieces: Vec<Vec<u8>> = self.pieces(kind, sources).collect::<Result<_, _>>()?;
            blobs.insert(name.clone(), pieces.concat());
        }
        Ok(blobs)
    }

    fn pieces<'a>(&'a self, kind: &Kind, sources: &'a Sources) -> Pieces<'a> {
        Pieces { places: &self.places, sources, left: self.range(kind).unwrap_or_default() }
    }
}

/// The pieces of a table; ends with the first that cannot be read.
struct Pieces<'a> {
    places: &'a Pages,
    sources: &'a Sources,
    /// Pages that were not read.
    left: Range<u64>,
}

impl Iterator for Pieces<'_> {
    type Item = Result<Vec<u8>, Vec<String>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left.is_empty() {
            return None;
        }
        let piece = self.read();
        if piece.is_err() {
            self.left = 0..0;
        }
        Some(piece)
    }
}

impl Pieces<'_> {
    fn read(&mut self) -> Result<Vec<u8>, Vec<String>> {
        let mut piece = Vec::new();
        self.append_page(&mut piece)?;
        let len = Take(&piece).u32().map_err(malformed)? as usize;
        // Memory is taken as pages come, not because a length asks for it.
        while piece.len() - LENGTH < len {
            self.append_page(&mut piece)?;
        }
        piece.drain(..LENGTH);
        piece.truncate(len);
        Ok(piece)
    }

    fn append_page(&mut self, piece: &mut Vec<u8>) -> Result<(), Vec<String>> {
        let number = self.left.next().ok_or_else(|| malformed(Malformed("a table ends too early")))?;
        if let Content::At(place) = self.places.get(PageNumber(number)).content {
            let extent = self.sources.page_at(place)?;
            piece.extend_from_slice(&extent[usize::from(place.slot) * PAGE_BYTES..][..PAGE_BYTES]);
        } else {
            piece.resize(piece.len() + PAGE_BYTES, 0);
        }
        Ok(())
    }
}

/// Gives all of a piece to `decode`.
fn decode(
    piece: &[u8],
    decode: impl FnOnce(&mut Take<'_>) -> Result<(), Malformed>,
) -> Result<(), Vec<String>> {
    let mut take = Take(piece);
    decode(&mut take).and_then(|()| take.end()).map_err(malformed)
}

fn malformed(what: Malformed) -> Vec<String> {
    vec![what.0.to_owned()]
}

#[cfg(test)]
mod tests;
