//! What a layer says, in 32 bytes; and when it was last changed, as far as that can be relied on.
//!
//! The digest covers what the map and the serving of a layer depend on: the header's fields that say where tables are
//! and how to read them, the backing file's name, the L1 table and all L2 tables. It leaves out what may change without
//! a difference: refcounts, internal snapshots, bitmaps, autoclear bits, the index itself, and the bytes of clusters.

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};
use vmstrata_qcow2::L2Entry;
use vmstrata_qcow2::index::{BackingFormat, LayerRecord, RecordTables};
use vmstrata_store::{Gate, LocalFile, Store};

use super::IndexLayer;
use super::write::record_tables;
use crate::chain::{Qcow2Head, open_layer};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::files::is_being_written;
use crate::layer::{Format, Tables, table_of, words};
use crate::opener::{Opener, Role};
use crate::session::SESSION_MASK;

/// Starts every digest, so that a later definition cannot be taken for this one.
const DOMAIN: &[u8; 16] = b"vmstrata layer 1";
/// L1 entries read at once.
const L1_BATCH: usize = 4096;

/// What a look at all tables of a layer finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) digest: [u8; 32],
    /// Whether everything that the tables name begins within the file. If not, the file was cut short, and must not
    /// grow: reading what was cut off is an error, and has to stay one.
    pub(super) whole: bool,
    /// Where the last table or cluster that is named begins. From there on, refcounts alone do not make a file free.
    pub(super) highest: u64,
    /// Where the last of the active tables ends.
    pub(super) tables_end: u64,
}

/// What may be read of tables that a stranger may have made: no more than what is on the disk can account for.
#[derive(Debug)]
pub(super) struct TableBudget {
    left: u64,
}

impl TableBudget {
    /// All tables of a disk of 2 TiB in clusters of 64 KiB: so many may be made of holes.
    const LEAST: u64 = 256 << 20;
    /// Bytes of tables for each byte that the file takes up: a table that names a single cluster may be one sixteenth data.
    const TIMES: u64 = 16;

    /// # Errors
    /// Whatever the host reports.
    pub(super) fn of(store: &dyn Store) -> Result<Self> {
        let allocated = match store.local().and_then(LocalFile::raw) {
            Some(fd) => {
                let stat = rustix::fs::fstat(fd).map_err(std::io::Error::from);
                stat.while_trying("look at the file")?.st_blocks.unsigned_abs() * 512
            }
            None => store.len().while_trying("read the file's length")?,
        };
        Ok(Self { left: allocated.saturating_mul(Self::TIMES).saturating_add(Self::LEAST) })
    }

    /// Counts a table that is about to be read.
    ///
    /// # Errors
    /// Too many tables.
    pub(super) fn take(&mut self, bytes: u64) -> Result<()> {
        let left = self.left.checked_sub(bytes);
        self.left =
            left.ok_or(ErrorKind::NotIndexable { reason: "its tables are more than its file holds" })?;
        Ok(())
    }
}

/// Digests a file of `file_len` bytes; `head` is `None` for a raw one.
///
/// # Errors
/// Tables that cannot be read, that break the format, or that a process was writing when it was last seen.
pub(super) fn digest(store: &dyn Store, head: Option<&Qcow2Head>, file_len: u64) -> Result<Content> {
    let mut hash = Sha256::new_with_prefix(DOMAIN);
    let Some(head) = head else {
        hash.update([0]);
        hash.update(file_len.to_le_bytes());
        return Ok(Content { digest: hash.finalize().into(), whole: true, highest: file_len, tables_end: 0 });
    };
    if head.header.autoclear.bits() & SESSION_MASK != 0 {
        return Err(
            ErrorKind::NotIndexable { reason: "a process writes it, or was killed while it did" }.into()
        );
    }
    if head.backing_name.as_ref().is_some_and(|name| name.as_bytes().starts_with(b"json:")) {
        return Err(ErrorKind::NotIndexable { reason: "a json: description names its backing file" }.into());
    }
    let tables = Tables::of(&head.header);
    hash.update([1]);
    update_header(&mut hash, head, &tables);
    let (highest, tables_end) = update_tables(&mut hash, store, &tables, file_len)?;
    let whole = highest < file_len;
    // A file that is whole may grow, by an index for instance.
    hash.update(if whole { u64::MAX } else { file_len }.to_le_bytes());
    Ok(Content { digest: hash.finalize().into(), whole, highest, tables_end })
}

/// What a file says of itself: all that a record of the layer table repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    digest: [u8; 32],
    size: u64,
    tables: Option<RecordTables>,
}

impl Seen {
    /// What `record` says that the file says.
    pub(super) fn as_recorded(record: &LayerRecord) -> Self {
        Self { digest: record.digest, size: record.size, tables: record.tables }
    }
}

/// Digests a file as it would be opened from above: `above` is the layer whose header names it.
pub(super) fn digest_file(
    path: &Path,
    above: Option<&IndexLayer>,
    layer: &IndexLayer,
    gate: &Gate,
    opener: &dyn Opener,
) -> Result<Seen> {
    let format = match above {
        Some(above) => {
            above.record.backing.as_ref().and_then(|backing| backing.format).map(|format| match format {
                BackingFormat::Raw => Format::Raw,
                BackingFormat::Qcow2 => Format::Qcow2,
            })
        }
        None => Some(layer.layer().format()),
    };
    let top = open_layer(path, Role::Inspected, format, gate, opener)?;
    // What it says while a process writes it may not last.
    if top.opened.identity != layer.identity || is_being_written(&*top.opened.store) {
        return Err(Error::from(ErrorKind::Changed).in_file(path));
    }
    let content = digest(&*top.opened.store, top.head.as_ref(), top.opened.identity.len)?;
    let tables = top.head.as_ref().map(|head| record_tables(&Tables::of(&head.header)));
    Ok(Seen { digest: content.digest, size: top.size, tables })
}

fn update_header(hash: &mut Sha256, head: &Qcow2Head, tables: &Tables) {
    hash.update(tables.version.to_le_bytes());
    hash.update(tables.geometry.cluster_bits.get().to_le_bytes());
    // Extended entries are told by a bit that no compression type has, so that the digests of all others stay.
    hash.update([tables.compression.to_byte() | u8::from(tables.entries.is_extended()) << 7]);
    hash.update(head.header.size.to_le_bytes());
    hash.update(tables.l1_at.get().to_le_bytes());
    hash.update(tables.l1_entries.to_le_bytes());
    let name = head.backing_name.as_ref().map(|name| name.as_bytes());
    for text in [name, head.backing_format.as_ref().map(String::as_bytes)] {
        hash.update(text.map_or(u32::MAX, |text| text.len() as u32).to_le_bytes());
        hash.update(text.unwrap_or_default());
    }
}

/// Adds the L1 table and every L2 table; returns the highest offset that is named, and where the last table ends.
fn update_tables(hash: &mut Sha256, store: &dyn Store, tables: &Tables, file_len: u64) -> Result<(u64, u64)> {
    let cluster = tables.geometry.cluster_bits.size();
    let (mut l1, mut l2) = (Vec::new(), vec![0; usize::try_from(cluster).expect("at most 2 MiB")]);
    let entries = tables.l1_entries as usize;
    let mut highest = tables.l1_at.get();
    let mut tables_end = highest + entries as u64 * 8;
    // One that is named over and over would be read for ever.
    let (mut met, mut budget) = (HashSet::new(), TableBudget::of(store)?);
    for batch in (0..entries).step_by(L1_BATCH) {
        let at = tables.l1_at + batch as u64 * 8;
        l1.resize((entries - batch).min(L1_BATCH) * 8, 0);
        store.read_padded(&mut l1, at).while_trying("read the L1 table").map_err(|e| e.at(at))?;
        hash.update(&l1);
        for (number, raw) in words(&l1).enumerate().filter(|&(_, raw)| raw != 0) {
            let table = table_of(tables, raw, file_len).map_err(|e| e.at(at + number as u64 * 8))?;
            let Some(table) = table else { continue };
            if !met.insert(table) {
                return Err(ErrorKind::NotIndexable { reason: "several L1 entries name one L2 table" }.into());
            }
            budget.take(cluster)?;
            store.read_padded(&mut l2, table).while_trying("read an L2 table").map_err(|e| e.at(table))?;
            hash.update(&l2);
            highest = highest.max(table.get()).max(highest_of(tables, &l2));
            tables_end = tables_end.max(table.get() + cluster);
        }
    }
    Ok((highest, tables_end))
}

fn highest_of(tables: &Tables, l2: &[u8]) -> u64 {
    let host = |raw| match tables.entries.l2(raw) {
        Ok(L2Entry::Data { host, .. } | L2Entry::Compressed { host, .. }) => host.get(),
        Ok(L2Entry::Subclusters { host: Some(host), states, .. }) if states.allocated != 0 => host.get(),
        // What breaks the format is an error wherever the file ends.
        _ => 0,
    };
    tables.entries.raw_entries(l2).filter(|raw| !raw.is_empty()).map(host).max().unwrap_or(0)
}

/// For how long a change may get the same time as one before it: the kernel's tick, with room to spare.
const TICK: Duration = Duration::from_millis(20);
/// The same where the file system seems to keep whole seconds.
const COARSE_TICK: Duration = Duration::from_secs(2);

/// The time of a file's last change as something that tells it from later changes: waits for the moment when a later
/// one must get another time. `None` when that is not soon, as on file systems that keep whole seconds.
pub(super) fn stable_mtime(mtime_ns: i64) -> Option<i64> {
    let tick = if mtime_ns % 1_000_000_000 == 0 { COARSE_TICK } else { TICK };
    let changed = SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(mtime_ns).ok()?);
    let age = changed.elapsed().ok()?;
    let wait = tick.saturating_sub(age);
    if wait > TICK {
        return None;
    }
    std::thread::sleep(wait);
    Some(mtime_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now_ns() -> i64 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        i64::try_from(now.as_nanos()).expect("before 2262")
    }

    #[test]
    fn a_time_is_stable_when_a_later_change_must_get_another() {
        let old = now_ns() - 5_000_000_000;
        assert_eq!(stable_mtime(old), Some(old));
        let young = now_ns() / 10 * 10 + 1;
        assert_eq!(stable_mtime(young), Some(young));
        assert!(now_ns() - young >= 20_000_000, "it waited");
    }

    #[test]
    fn times_that_tell_nothing_are_not_waited_for() {
        let whole_second = now_ns() / 1_000_000_000 * 1_000_000_000;
        assert_eq!(stable_mtime(whole_second), None);
        assert_eq!(stable_mtime(now_ns() + 60_000_000_001), None, "a clock that went back");
        assert_eq!(stable_mtime(-1), None);
    }
}
