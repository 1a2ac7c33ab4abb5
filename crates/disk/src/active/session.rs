//! The session of a writer on the active layer, which its header names.

use vmstrata_qcow2::Incompatible;
use vmstrata_qcow2::header::field;
use vmstrata_types::HostOffset;

use super::Active;
use crate::error::{IoContext as _, Result};
use crate::session::{bits_of_log, new_session};

/// Version 2 headers have no feature bits.
pub(crate) const FEATURES_SINCE: u32 = 3;

/// Ends the session on a file whose changes are all committed: stock tools find it as they leave theirs. `wait` returns once
/// no request can still see clusters that nothing leads to any more.
///
/// # Errors
/// What could not be flushed or written; the file is then as after a crash.
pub(crate) fn leave_clean(active: &Active, wait: impl FnOnce()) -> Result<()> {
    active.reclaim(wait)?;
    let leave = || -> Result<()> {
        active.alloc.release_claimed()?;
        // Refcounts first: a header without a session says that they are right.
        active.flusher.flush().while_trying("flush")?;
        leave_log(active)?;
        if active.tables.version >= FEATURES_SINCE { write_session(active, 0) } else { Ok(()) }
    };
    leave().map_err(|error| error.in_file(&active.path))?;
    active.changes.remove_journal();
    Ok(())
}

/// As [`leave_clean`], as far as other processes see the file; [`session_ended`] brings it to stable storage. A power
/// failure in between may leak clusters that were let go of.
///
/// # Errors
/// What could not be written; the file is then as after a crash.
pub(crate) fn end_session(active: &Active, wait: impl FnOnce()) -> Result<()> {
    active.reclaim(wait)?;
    let end = || -> Result<()> {
        active.alloc.release_claimed()?;
        leave_log(active)?;
        if active.tables.version >= FEATURES_SINCE { put_session(active, 0) } else { Ok(()) }
    };
    end().map_err(|error| error.in_file(&active.path))
}

/// Brings the end of a session to stable storage; the journal goes.
///
/// # Errors
/// A host that cannot flush.
pub(crate) fn session_ended(active: &Active) -> Result<()> {
    active.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&active.path))?;
    active.changes.remove_journal();
    Ok(())
}

/// Removes the journal of an image of which nothing is known any more, and has the header say that there is none: else the next
/// process would be refused for want of it.
pub(crate) fn forsake_journal(active: &Active) {
    active.changes.remove_journal();
    if active.tables.version >= FEATURES_SINCE {
        // Where that fails, too, the next process is refused.
        let _ = put_session(active, new_session());
    }
}

/// Writes the autoclear bits, and flushes.
pub(crate) fn write_session(active: &Active, session: u64) -> Result<()> {
    put_session(active, session)?;
    active.flusher.flush().while_trying("flush the header")
}

/// Writes the autoclear bits: ours, and none that stand for structures we do not keep up to date. Where a log may make flushes
/// durable, they tell which one while there is a session, and the image counts as corrupt for stock tools: only with the log is it
/// what was flushed.
pub(crate) fn put_session(active: &Active, session: u64) -> Result<()> {
    let Some(log) = active.log() else {
        return put(active, field::AUTOCLEAR, &(session | active.autoclear).to_be_bytes());
    };
    let [mut incompatible, compatible] = active.features;
    let mut mark = session;
    if session != 0 {
        mark |= bits_of_log(log.tag());
        incompatible |= Incompatible::CORRUPT.bits();
    }
    let words = [incompatible, compatible, mark | active.autoclear];
    // All lie in one sector.
    put(active, field::INCOMPATIBLE, words.map(u64::to_be_bytes).as_flattened())?;
    if log.has_joined() {
        log.set_mark(mark);
    }
    Ok(())
}

fn put(active: &Active, at: u64, bytes: &[u8]) -> Result<()> {
    let at = HostOffset::new(at);
    active.store.write_all(bytes, at).while_trying("write the header").map_err(|error| error.at(at))
}

/// Has a log make flushes of the image durable from now on, if there is one: [`write_session`] wrote `session` just now, and flushed. Where the log takes no
/// more files, the image does without.
pub(crate) fn join_log(active: &Active, session: u64) {
    let Some(log) = active.log() else { return };
    if let Err(error) = log.join(session | bits_of_log(log.tag())) {
        tracing::warn!(disk = %active.path.display(), %error, "its flushes do without the flush log");
    }
}

/// Takes the image out of the log, which it needs no more.
fn leave_log(active: &Active) -> Result<()> {
    active.log().map_or(Ok(()), |log| log.leave()).while_trying("take it out of the flush log")
}
