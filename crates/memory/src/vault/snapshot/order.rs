//! What is read of a snapshot, in the order it lies in its objects: an extent is read once for all its pages.

use std::io;

use super::super::error::{Result, VaultError};
use super::super::live;
use super::super::pages::{self, Content, Entry, PageNumber, Place};
use super::super::sources::ExtentKey;
use super::Snapshot;
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;

/// Which pages are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// All that were stored.
    All,
    /// Only those that the guest cannot live without: as if all clean ones were lost.
    Critical,
}

/// Pages that lie side by side in the machine and in an extent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) place: Place,
    pub(super) first: PageNumber,
    pub(super) len: u64,
    pub(super) class: PageClass,
}

impl Piece {
    /// The places of its pages in the extent, a bit for each.
    pub(super) fn places(&self) -> u64 {
        live::places(self.place.slot, self.len)
    }

    /// The object and the number of its extent.
    pub(super) fn extent(&self) -> ExtentKey {
        (self.place.object, self.place.extent)
    }
}

/// The stored pages of a snapshot that are wanted, in the order they lie in its objects.
#[derive(Debug)]
pub struct Order(Vec<Piece>);

impl Order {
    /// Pieces of one extent each.
    pub(super) fn extents(&self) -> impl Iterator<Item = &[Piece]> {
        self.0.chunk_by(|one, other| one.extent() == other.extent())
    }

    /// The pieces of an extent.
    fn of(&self, extent: ExtentKey) -> &[Piece] {
        let from = self.0.partition_point(|piece| piece.extent() < extent);
        let len = self.0[from..].partition_point(|piece| piece.extent() == extent);
        &self.0[from..from + len]
    }
}

impl Snapshot {
    /// What is to be read; and, in order, the clean pages of which nothing is: not wanted or not stored.
    pub fn order(&self, want: Want) -> (Order, Vec<Frame>) {
        let layout = &self.metadata.info.layout;
        let (mut pieces, mut lost) = (Vec::new(), Vec::new());
        for (first, len, Entry { class, content }) in self.metadata.pages.runs() {
            let is_wanted = want == Want::All || class == PageClass::Critical;
            match content {
                Content::At(place) if is_wanted => pieces.push(Piece { place, first, len, class }),
                Content::Zero => {}
                _ if class == PageClass::Clean => {
                    lost.extend((first.0..first.0 + len).map(|page| pages::frame(layout, PageNumber(page))));
                }
                _ => {}
            }
        }
        pieces.sort_unstable_by_key(|piece| (piece.extent(), piece.place.slot));
        (Order(pieces), lost)
    }

    /// The pages that `order` has with their classes, those of an extent together, in the order they lie in objects.
    pub fn extents<'a>(
        &'a self,
        order: &'a Order,
    ) -> impl Iterator<Item = Vec<(Frame, PageClass)>> + use<'a> {
        let layout = &self.metadata.info.layout;
        order.extents().map(move |extent| {
            let pages = extent.iter().flat_map(|piece| {
                let numbers = piece.first.0..piece.first.0 + piece.len;
                numbers.map(move |page| (pages::frame(layout, PageNumber(page)), piece.class))
            });
            pages.collect()
        })
    }

    /// Reads the extent that holds `frame`, and gives all pages of it that `order` has, each once. Gives nothing if nothing
    /// is stored of the page.
    ///
    /// # Errors
    /// [`VaultError::PageLost`] when no copy has the page, also for a clean one; [`VaultError::Page`] for a page
    /// that the machine does not have; [`VaultError::Sink`] when `give` fails.
    pub fn read_around(
        &self,
        order: &Order,
        frame: Frame,
        give: &mut dyn FnMut(Frame, &[u8; PAGE_BYTES]) -> io::Result<()>,
    ) -> Result<()> {
        let layout = &self.metadata.info.layout;
        let number = pages::number(layout, frame)
            .ok_or(VaultError::Page { frame, reason: "the machine has no such page" })?;
        let Content::At(place) = self.metadata.pages.get(number).content else { return Ok(()) };
        let (key, own) = ((place.object, place.extent), live::places(place.slot, 1));
        let pieces = order.of(key);
        let wanted = pieces.iter().fold(own, |wanted, piece| wanted | piece.places());
        let (have, tried, extent) = self.sources.extent(key, wanted);
        if have & own == 0 {
            return Err(VaultError::PageLost { snapshot: self.info().title(), frame, tried });
        }
        for piece in pieces {
            for by in 0..piece.len {
                let slot = usize::from(piece.place.slot) + by as usize;
                if have >> slot & 1 == 0 {
                    continue;
                }
                let frame = pages::frame(layout, PageNumber(piece.first.0 + by));
                give(frame, &extent.as_chunks().0[slot])
                    .map_err(|source| VaultError::Sink { frame, source })?;
            }
        }
        Ok(())
    }
}
