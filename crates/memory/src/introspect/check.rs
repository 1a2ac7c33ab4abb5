//! The kernel's own counters, held against what a pass found: a stale or misread array of struct pages does not agree.

use super::cause::{Cause, CauseMap};
use super::guest::Guest;
use super::view::View;
use super::{Pages, Unreadable};
use crate::address::Virtual;

/// Frames that a counter may be off: CPUs keep changes to themselves for a while, and the guest may have been paused while
/// it moved a block of 1,024.
const SLACK: u64 = 2048;
/// Nodes have at most 5 or 6 zones.
const ZONES_MAX: u32 = 8;

/// Numbers of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Told {
    free: u64,
    file: u64,
}

/// Compares a pass with the kernel's counters.
///
/// # Errors
/// [`Unreadable::Inconsistent`] when they are far apart.
pub(super) fn against_counters(guest: &Guest, view: &mut View<'_>, pages: &Pages) -> Result<(), Unreadable> {
    let told = told(guest, view).ok_or_else(|| Unreadable::Missing("readable zones".into()))?;
    let frames = pages.causes.iter().count() as u64;
    agree(told, &pages.causes, SLACK + frames / 64)
}

fn agree(told: Told, causes: &CauseMap, slack: u64) -> Result<(), Unreadable> {
    use Cause::{BlockCache, BusyCache, CleanExt4, CleanXfs, DirtyCache, MappedCache, OtherCache, Shmem};
    let mut counts = vec![0; Cause::ALL.len()];
    causes.iter().for_each(|(_, cause)| counts[cause as usize] += 1);
    let count = |wanted: &[Cause]| wanted.iter().map(|&cause| counts[cause as usize]).sum::<u64>();
    let free = count(&[Cause::Free]);
    let cached =
        count(&[CleanExt4, CleanXfs, DirtyCache, MappedCache, BusyCache, OtherCache, BlockCache, Shmem]);
    // The kernel counts its swap cache as pages of files.
    let most = cached + count(&[Cause::Anonymous]);
    let far = |what: &str, found: u64, told: u64| {
        Err(Unreadable::Inconsistent(format!(
            "{found} {what} pages were found where the kernel counts {told}"
        )))
    };
    if free.abs_diff(told.free) > slack {
        return far("free", free, told.free);
    }
    if told.file > most.saturating_add(slack) || cached > told.file.saturating_add(slack) {
        return far("cache", cached, told.file);
    }
    Ok(())
}

fn told(guest: &Guest, view: &mut View<'_>) -> Option<Told> {
    let shape = guest.shapes.counters;
    let mut told = Told::default();
    let at = |base: Virtual, offset: usize| base.checked_add(offset as u64);
    for node in guest.nodes(view) {
        let zones = view.u32(at(node, shape.zone_count)?)?.min(ZONES_MAX) as usize;
        for zone in 0..zones {
            let areas = at(node, shape.zones + zone * shape.zone_size + shape.free_areas)?;
            for order in 0..guest.shapes.types.orders {
                let area = at(areas, order as usize * shape.free_area_size + shape.free_blocks)?;
                told.free = told.free.saturating_add(view.u64(area)?.checked_shl(order)?);
            }
        }
        // Below zero for a moment, for want of what the CPUs have not added: as good as none.
        let file = view.u64(at(node, shape.file_pages)?)?.cast_signed();
        told.file = told.file.saturating_add(u64::try_from(file).unwrap_or(0));
    }
    Some(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Frame;

    #[test]
    fn counters_may_lag_but_not_contradict() {
        let mut causes = CauseMap::new(100);
        causes.set(Frame::new(0), 40, Cause::Free);
        causes.set(Frame::new(40), 20, Cause::CleanXfs);
        causes.set(Frame::new(60), 10, Cause::Anonymous);
        let judged = |free, file| agree(Told { free, file }, &causes, 5).map_err(|error| error.to_string());
        assert_eq!(judged(44, 16), Ok(()));
        assert_eq!(judged(36, 34), Ok(()), "swap cache is anonymous here");
        assert_eq!(
            judged(46, 20).unwrap_err().split(": ").nth(1),
            Some("40 free pages were found where the kernel counts 46")
        );
        assert!(judged(34, 20).is_err());
        assert!(judged(40, 14).is_err());
        assert!(judged(40, 36).is_err());
    }
}
