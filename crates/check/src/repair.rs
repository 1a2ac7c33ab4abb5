//! Mending an image, in rounds of scan and repair until a scan finds nothing more to mend.
//!
//! Order of writes within a round, with a flush after each step, so that a crash at any point leaves an image no
//! worse than it was and the next repair finishes the work:
//!
//! 1. refcounts, in place ([`refcounts::repair_in_place`]) or in new structures past all that is in use, which the header
//!    is then switched to ([`refcounts::rebuild`]): from here on they are right for every reference there is;
//! 2. table entries ([`tables::mend`]): flags that follow from the refcounts, and bits that must not be there;
//! 3. when a scan finds the image free of corruption, the dirty and corrupt bits of the header.
//!
//! A mapping table that guest data lies on cannot be written without changing that data: it is moved first
//! ([`moves`]). Where references could not be followed, refcounts are never lowered: what seems leaked may be what
//! the user wants to recover.

mod moves;
mod refcounts;
mod tables;

use vmstrata_qcow2::Incompatible;
use vmstrata_qcow2::header::field;
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use crate::error::{IoContext as _, Result};
use crate::image::Image;
use crate::report::Report;
use crate::scan::{Scan, scan};
use crate::{Options, Repair};

/// Rounds after which what is left is left. A move takes one, what it frees the next, and two are to spare.
const ROUNDS: usize = 5;

/// Mends what [`Options::repair`] asks for and reports what is left.
///
/// # Errors
/// As [`crate::check`].
pub(crate) fn repair(store: &dyn Store, options: &Options) -> Result<Report> {
    let mut first: Option<(u64, u64)> = None;
    for round in 0.. {
        let image = Image::read(store, options)?;
        let scan = scan(&image)?;
        let before = *first.get_or_insert((scan.report.corruptions, scan.report.leaks));
        if round == ROUNDS || !mend(&image, &scan)? {
            return finish(&image, scan.report, before);
        }
    }
    unreachable!("the last round returns")
}

/// One round; false when nothing was written.
fn mend(image: &Image<'_>, scan: &Scan) -> Result<bool> {
    let all = image.options.repair == Repair::All;
    if scan.report.is_clean() || scan.report.check_errors > 0 {
        return Ok(false);
    }
    if scan.must_rebuild && (!all || scan.references_unknown) {
        // Writing into damaged refcount structures could damage whatever lies on them.
        return Ok(false);
    }
    if all && !scan.references_unknown && moves::separate(image, scan)? {
        return Ok(true);
    }
    let written = if scan.must_rebuild {
        refcounts::rebuild(image, &scan.disk, scan.free_from..scan.free_from)?;
        true
    } else {
        refcounts::repair_in_place(image, scan)?
    };
    let entries = tables::mend(image.store, image.options, scan)?;
    Ok(written || entries > 0)
}

/// Clears the bits that keep others from writing, if all is well.
fn finish(image: &Image<'_>, mut report: Report, before: (u64, u64)) -> Result<Report> {
    report.corruptions_fixed = before.0.saturating_sub(report.corruptions);
    report.leaks_fixed = before.1.saturating_sub(report.leaks);
    let bits = Incompatible::DIRTY | Incompatible::CORRUPT;
    if report.is_safe() && image.header.incompatible.intersects(bits) {
        let kept = image.header.incompatible.difference(bits).bits();
        flush(image.store)?;
        write(image.store, HostOffset::new(field::INCOMPATIBLE), &kept.to_be_bytes(), "clear the dirty bit")?;
        flush(image.store)?;
        (report.dirty, report.marked_corrupt) = (false, false);
    }
    Ok(report)
}

fn flush(store: &dyn Store) -> Result<()> {
    store.flush().while_trying("flush the repaired image")
}

fn write(store: &dyn Store, at: HostOffset, bytes: &[u8], action: &'static str) -> Result<()> {
    store.write_all(bytes, at).while_trying(action).map_err(|error| error.at(at))
}
