//! Making the file on top of a chain ready for writes: repair, session, and the journal of a killed process.

use std::path::Path;
use std::sync::Arc;

use vmstrata_check::{Options as CheckOptions, Repair, Report, check};
use vmstrata_qcow2::bitmap::BitmapsExtension;
use vmstrata_qcow2::header::field;
use vmstrata_qcow2::{Autoclear, Incompatible};
use vmstrata_store::{CacheMode, Gate, LocalFile, Store};
use vmstrata_types::{HostOffset, LayerIndex};

use crate::active::Active;
use crate::active::session::{FEATURES_SINCE, join_log, leave_clean, write_session};
use crate::chain::{
    OpenOptions, Qcow2Head, Top as OpenTop, Unflushed, check_state_at, open_layer, read_head,
};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::journal::{Journal, Record, Subject};
use crate::layer::Layer;
use crate::layers::{Layers, RawTop, Top, index_of};
use crate::loading::{Chain, freeze, read_chain};
use crate::names::leads_to_own_repository;
use crate::opener::{Opener, Role};
use crate::resources::Resources;
use crate::session::{BootId, LOG_MASK, SESSION_MASK, bits_of_log, log_in, new_session};

/// Opens the layers of the chain whose active layer is `path`. Returns also whether the chain had an index that did not hold any more.
///
/// # Errors
/// Anything wrong with any file of the chain, with the file's name, layer and offset.
pub(super) fn open_layers(
    path: &Path,
    options: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<(Layers, bool)> {
    let in_file = |error: Error| error.in_file(path);
    let mut chain = read_chain(path, options, resources)
        .or_else(|error| check_state_at(path, &**resources.files().opener()).and(Err(error)))?;
    chain.top.check_state()?;
    if chain.behind_log && options.read_only {
        return Err(in_file(ErrorKind::BehindLog.into()));
    }
    if chain.unfinished && !options.read_only {
        finish_snapshot(chain, (options.cache, options.unflushed), resources)?;
        chain = read_chain(path, options, resources)?;
    }
    if !options.read_only {
        if leads_to_own_repository(path, chain.below.last().map(|layer| &*layer.path)) {
            return Err(in_file(ErrorKind::TieredPath.into()));
        }
        // What is flushed from now on is found by this name.
        resources.files().opener().flush_name(path).map_err(in_file)?;
        flush_newest(&chain.below, resources)?;
    }
    if options.read_only && (chain.unfinished || chain.top.is_in_session()) {
        tracing::warn!(disk = %path.display(), "its writer was killed, or is at work: what was written last shows once the disk has been opened for writing");
    }
    let Chain { top, mut below, index, lost_index, .. } = chain;
    if !options.read_only && !options.force {
        let file = (path, top.opened.identity.file);
        let found = resources.beside().standing_on(file, below.iter().map(|layer| &*layer.path));
        if let Some(image) = found.while_trying("look for images that stand on it").map_err(in_file)? {
            return Err(in_file(ErrorKind::IsBase { image }.into()));
        }
    }
    let size = top.size;
    let (top, frozen) = if options.read_only {
        below.push(freeze(top, resources));
        (Top::Frozen, Some(resources.share_map(below, index)?))
    } else {
        let frozen = if below.is_empty() { None } else { Some(resources.share_map(below, index)?) };
        let depth = frozen.as_ref().map_or(0, |map| map.layers().len());
        let place = (index_of(depth), options.unflushed);
        (open_top(top, place, resources)?, frozen)
    };
    Ok((Layers::new(size, top, frozen, resources), lost_index))
}

/// Makes the top file ready for writes.
///
/// # Errors
/// A file that cannot be used or repaired; a journal of a killed process that is missing or does not fit, unless what it has
/// may be discarded: the journal is kept.
pub(crate) fn open_top(
    top: OpenTop,
    (index, unflushed): (LayerIndex, Unflushed),
    resources: &Arc<Resources>,
) -> Result<Top> {
    let OpenTop { path, opened, head, is_probed, .. } = top;
    let Some(head) = head else {
        let guard = is_probed.then(Arc::default);
        if is_probed {
            tracing::warn!(disk = %path.display(), "its format was not said, and its first bytes say raw: writes that would make it look like another are refused; say format=raw if it is");
        }
        return Ok(Top::Raw(RawTop::new(path, opened, guard)));
    };
    let in_file = |error: Error| error.in_file(&path);
    let head =
        whole_by_log(head, &*opened.store).and_then(|head| repaired(head, &opened.store)).map_err(in_file)?;
    let header = &head.header;
    let (cluster, block) =
        (header.cluster_bits.size(), opened.store.local().map_or(1, LocalFile::raw_alignment));
    if cluster < block as u64 {
        return Err(in_file(ErrorKind::BlockTooLarge { cluster, block }.into()));
    }
    let identity = opened.identity;
    let open = || {
        Active::open(&path, Arc::clone(&opened.store), identity, header, index, resources.new_pages()?)
            .map_err(|error| in_file(error.in_layer(index)))
    };
    let mut active = open()?;
    if header.version < FEATURES_SINCE {
        // No bit would say whether a journal is about this state of the image.
        active.changes.commit_each_change(resources.journal_dir().is_some());
        return Ok(Top::Qcow2(Arc::new(active)));
    }
    active.autoclear = distrust_bitmaps(&active, &head, identity.len).map_err(in_file)?;
    let old = header.autoclear.bits() & SESSION_MASK;
    let mut active = Arc::new(active);
    let (journal, new) = match resources.journal_dir() {
        None => {
            refuse_missing(old, None, unflushed).map_err(in_file)?;
            (None, new_session())
        }
        Some(dir) => {
            let opener = &**resources.files().opener();
            let (journal, new) = take_over(&active, dir, (old, unflushed), opener)?;
            (Some(journal), new)
        }
    };
    if old != 0 && free_leaks(&active) {
        // What is in memory of the tables and refcounts was read before.
        let mut again = open()?;
        again.autoclear = active.autoclear;
        active = Arc::new(again);
    }
    write_session(&active, new).map_err(in_file)?;
    join_log(&active, new);
    active.changes.use_journal(journal);
    Ok(Top::Qcow2(active))
}

/// Opens the image's journal, takes up what the process of session `old` left in it, and begins a new session, which it returns.
///
/// The journal of the old session is one until the image names the new one: a process may be killed in between.
fn take_over(
    active: &Active,
    dir: &Path,
    (old, unflushed): (u64, Unflushed),
    opener: &dyn Opener,
) -> Result<(Journal, u64)> {
    let in_file = |error: Error| error.in_file(&active.path);
    let boot = BootId::now().while_trying("read the kernel's boot id")?;
    let is_extended = active.has_subclusters();
    let subject = Subject { image: active.identity.file, boot, session: old, is_extended };
    let (mut journal, found) = Journal::open(dir, subject, opener)?;
    if found.is_there {
        recover(active, dir, (&found.records, unflushed)).map_err(in_file)?;
    } else {
        refuse_missing(old, Some((dir, boot)), unflushed).map_err(in_file)?;
        if old == 0 && found.of_other_sessions > 0 {
            tracing::warn!(disk = %active.path.display(), changes = found.of_other_sessions, "another program wrote the image after its server was killed: the server's unflushed writes are lost");
        }
    }
    let new = boot.new_session();
    let begun = journal.begin(new);
    begun.while_trying("write the volatile journal").map_err(|error| error.in_file(journal.path()))?;
    Ok((journal, new))
}

/// Refuses an image whose last writer was killed in this boot and left its journal elsewhere.
fn refuse_missing(session: u64, place: Option<(&Path, BootId)>, unflushed: Unflushed) -> Result<()> {
    if session == 0 {
        return Ok(());
    }
    let boot =
        place.map_or_else(BootId::now, |(_, boot)| Ok(boot)).while_trying("read the kernel's boot id")?;
    if !boot.has_journal(session) {
        return Ok(());
    }
    match unflushed {
        Unflushed::Keep => {
            Err(ErrorKind::JournalMissing { dir: place.map(|(dir, _)| dir.to_owned()) }.into())
        }
        Unflushed::Discard => {
            tracing::warn!(
                "the unflushed writes of a killed process are discarded, as asked: its journal is missing"
            );
            Ok(())
        }
    }
}

/// Takes up the journal of a killed process.
fn recover(active: &Active, dir: &Path, (found, unflushed): (&[Record], Unflushed)) -> Result<()> {
    if found.is_empty() {
        return Ok(());
    }
    if let Err(mismatch) = active.take_up(found)? {
        return match unflushed {
            Unflushed::Keep => {
                Err(ErrorKind::JournalMismatch { mismatch: Box::new(mismatch), dir: dir.to_owned() }.into())
            }
            Unflushed::Discard => {
                tracing::warn!(disk = %active.path.display(), %mismatch, changes = found.len(), "the unflushed writes of a killed process are discarded, as asked");
                Ok(())
            }
        };
    }
    active.changes.commit(active)?;
    tracing::info!(disk = %active.path.display(), changes = found.len(), "took up the writes of a killed process");
    Ok(())
}

/// Clusters of a file up to which it is searched for leaks: its tables have 64 MiB then, and guests wait for as long as reading
/// them takes.
const SEARCHED_CLUSTERS_MAX: u64 = 8 << 20;

/// Gives back the clusters that a killed process had claimed and nothing leads to, so that the layer is clean once it is frozen.
/// Returns whether the image may have changed.
///
/// Not being able to is no reason to refuse the disk: the clusters stay leaked.
fn free_leaks(active: &Active) -> bool {
    let disk = active.path.display();
    let free = || -> Result<Option<u64>> {
        active.reclaim(|| ())?;
        active.alloc.release_claimed()?;
        let len = active.store.len().while_trying("read the file's length")?;
        // A check looks no further than to the end of the file, and clusters are claimed past it.
        let end = len.max(active.alloc.used_end()?.get());
        if end >> active.tables.geometry.cluster_bits.get() > SEARCHED_CLUSTERS_MAX {
            return Ok(None);
        }
        if end > len {
            active.store.set_len(end).while_trying("extend the file")?;
        }
        let options = CheckOptions { repair: Repair::Leaks, findings_max: 0, ..CheckOptions::default() };
        let checked = check(&*active.store, &options);
        if end > len {
            active.store.set_len(len).while_trying("cut the file to its length")?;
        }
        Ok(Some(checked?.leaks_fixed))
    };
    match free() {
        Ok(Some(0)) => {}
        Ok(Some(clusters)) => tracing::info!(%disk, clusters, "freed what a killed process had leaked"),
        Ok(None) => {
            tracing::info!(%disk, "not searched for leaked clusters after a crash, as it is large: `vmstrata check --repair=leaks` frees them");
        }
        Err(error) => {
            tracing::warn!(%disk, %error, "clusters that a killed process leaked stay: `vmstrata check --repair=leaks` frees them");
        }
    }
    true
}

/// Takes the mark off an image that a process left behind the log that is open now: before that was open, all that it had was brought
/// into the image.
///
/// # Errors
/// [`ErrorKind::BehindLog`] where it is another log, or none.
fn whole_by_log(head: Qcow2Head, store: &dyn Store) -> Result<Qcow2Head> {
    let bits = head.header.autoclear.bits();
    if log_in(bits) == 0 {
        return Ok(head);
    }
    let log = store.local().and_then(LocalFile::log).map(|log| bits_of_log(log.tag()));
    if log != Some(log_in(bits)) {
        return Err(ErrorKind::BehindLog.into());
    }
    let incompatible = head.header.incompatible & !Incompatible::CORRUPT;
    let words = [incompatible.bits(), head.header.compatible.bits(), bits & !LOG_MASK];
    let at = HostOffset::new(field::INCOMPATIBLE);
    let written = store.write_all(words.map(u64::to_be_bytes).as_flattened(), at);
    written.and_then(|()| store.flush()).while_trying("write the header").map_err(|error| error.at(at))?;
    read_head(store, store.len().while_trying("read the file's length")?)
}

/// Refuses an image marked corrupt; repairs one whose refcounts were left behind.
fn repaired(head: Qcow2Head, store: &Arc<dyn Store>) -> Result<Qcow2Head> {
    if head.header.incompatible.contains(Incompatible::CORRUPT) {
        return Err(ErrorKind::MarkedCorrupt.into());
    }
    if !head.header.incompatible.contains(Incompatible::DIRTY) {
        return Ok(head);
    }
    let options = CheckOptions { repair: Repair::All, findings_max: 0, ..CheckOptions::default() };
    let Report { corruptions_fixed, leaks_fixed, .. } = check(&**store, &options)?;
    tracing::info!(corruptions_fixed, leaks_fixed, "repaired the refcounts of an image that was not closed");
    let len = store.len().while_trying("read the file's length")?;
    let head = read_head(&**store, len)?;
    let sound = !head.header.incompatible.intersects(Incompatible::CORRUPT | Incompatible::DIRTY);
    if sound { Ok(head) } else { Err(ErrorKind::MarkedCorrupt.into()) }
}

/// Marks the image's persistent bitmaps as not to be trusted: they do not follow our writes. Returns the autoclear bit
/// that then says the truth of them, or 0 when there are none, or none that can be read.
///
/// Dropping the bit instead would be as true, but leave the bitmaps' clusters without an owner.
fn distrust_bitmaps(active: &Active, head: &Qcow2Head, file_len: u64) -> Result<u64> {
    let header = &head.header;
    let Some(data) = head.bitmaps.as_ref().filter(|_| header.autoclear.contains(Autoclear::BITMAPS)) else {
        return Ok(0);
    };
    let Ok(extension) = BitmapsExtension::parse(data, u64::from(header.header_length), header, file_len)
    else {
        return Ok(0);
    };
    let at = extension.directory_offset;
    let mut directory = vec![0; usize::try_from(extension.directory_len).expect("at most 64 MiB")];
    active.store.read_exact(&mut directory, at).while_trying("read the bitmaps").map_err(|e| e.at(at))?;
    if extension.parse_directory(&directory, header, file_len).is_err() {
        return Ok(0);
    }
    extension.mark_in_use(&mut directory);
    active.store.write_all(&directory, at).while_trying("mark the bitmaps").map_err(|e| e.at(at))?;
    active.flusher.flush().while_trying("flush the bitmaps")?;
    tracing::info!(disk = %active.path.display(), "persistent bitmaps are marked as in use: the next backup by them is a full one");
    Ok(Autoclear::BITMAPS.bits())
}

/// Flushes the newest of the frozen layers: a process that was killed as it froze it may have left its last writes, and the word that
/// its session has ended, in the host's page cache alone. Both are read from now on.
///
/// # Errors
/// Whatever the host reports.
fn flush_newest(below: &[Arc<Layer>], resources: &Resources) -> Result<()> {
    let Some(layer) = below.last() else { return Ok(()) };
    let flushed = resources.files().store(layer)?.flush();
    flushed.while_trying("flush it").map_err(|error| error.in_file(&layer.path))
}

/// Takes up what a killed process left of the layer below the chain's top, and ends its session.
///
/// # Errors
/// A file that is in use, is not the one that was found in the chain, or cannot be written.
fn finish_snapshot(
    chain: Chain,
    (cache, unflushed): (CacheMode, Unflushed),
    resources: &Arc<Resources>,
) -> Result<()> {
    let Chain { top, mut below, index, .. } = chain;
    let layer = below.pop().expect("the unfinished layer");
    let (path, file, format) = (layer.path.clone(), layer.identity.file, layer.format());
    // A reader's lock on the file would keep the writer out.
    drop((top, index, layer));
    let opener = &**resources.files().opener();
    let backing = open_layer(&path, Role::Active(cache), Some(format), &Gate::unrestricted(), opener)?;
    if backing.opened.identity.file != file {
        // The gate let another file through.
        return Err(Error::from(ErrorKind::Changed).in_file(&path));
    }
    let (index, size) = (index_of(below.len()), backing.size);
    let layers = Layers::new(size, open_top(backing, (index, unflushed), resources)?, None, resources);
    layers.commit()?;
    if let Top::Qcow2(active) = &layers.top {
        leave_clean(active, || ())?;
    }
    tracing::info!(file = %path.display(), "finished the snapshot that a killed process began");
    Ok(())
}
