//! What the journal of a killed process has of the image under check.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use vmstrata_qcow2::entry::EntryFormat;
use vmstrata_qcow2::header::field;
use vmstrata_store::{CacheMode, Gate, Store};
use vmstrata_types::HostOffset;

use super::{CheckOptions, Repair};
use crate::active::host_of;
use crate::active::session::FEATURES_SINCE;
use crate::chain::{OpenOptions, Unflushed, read_head};
use crate::disk::Disk;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::journal::{Slot, Subject, look};
use crate::layer::Format;
use crate::opener::{LocalFiles, Opened, Opener as _, Role};
use crate::resources::{ResourceOptions, Resources};
use crate::session::{BootId, SESSION_MASK};

/// Unflushed writes of a killed process.
#[derive(Debug)]
pub(super) struct Pending {
    /// Host clusters that the newest entries of the journal lead to; `None` where it is missing.
    pub(super) clusters: Option<HashSet<HostOffset>>,
}

/// What a killed process left of an image, if it left anything.
///
/// # Errors
/// A journal that cannot be read. An image that cannot be read has none: the check itself says what is wrong with it.
pub(super) fn pending(opened: &Opened, options: &CheckOptions) -> Result<Option<Pending>> {
    let Ok(head) = read_head(&*opened.store, opened.identity.len) else { return Ok(None) };
    let session = head.header.autoclear.bits() & SESSION_MASK;
    if session == 0 || head.header.version < FEATURES_SINCE || options.force_share {
        return Ok(None);
    }
    let boot = BootId::now().while_trying("read the kernel's boot id")?;
    let subject = Subject { image: opened.identity.file, boot, session };
    let found = match &options.journal_dir {
        Some(dir) => {
            look(dir, &subject).while_trying("read the volatile journal").map_err(|e| e.in_file(dir))?
        }
        None => crate::journal::Found::default(),
    };
    if !found.is_there && !boot.has_journal(session) {
        return Ok(None);
    }
    let newest: BTreeMap<Slot, u64> = found.records.iter().map(|record| (record.slot, record.new)).collect();
    let bits = head.header.cluster_bits;
    let entries = EntryFormat::new(head.header.version, bits);
    let clusters = newest.into_iter().filter_map(|entry| host_of(entries, bits, entry).flatten());
    Ok(Some(Pending { clusters: found.is_there.then(|| clusters.collect()) }))
}

impl Pending {
    /// Brings the writes to the image at `path`, as the next server would. With [`Unflushed::Discard`] an image of which they
    /// cannot be taken up goes on without them.
    ///
    /// # Errors
    /// What keeps the image from being opened or closed.
    pub(super) fn take_up(&self, path: &Path, options: &CheckOptions) -> Result<()> {
        debug_assert!(options.repair != Repair::None);
        let journal_dir = options.journal_dir.clone();
        let resources = Resources::start(ResourceOptions { journal_dir, ..ResourceOptions::default() })?;
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            allow_backing: options.allow_backing.clone(),
            unflushed: options.unflushed,
            ..OpenOptions::default()
        };
        match (Disk::open(path, &open, &resources).and_then(|disk| disk.close()), options.unflushed) {
            (Ok(()), _) => Ok(()),
            (Err(error), Unflushed::Discard) => {
                tracing::warn!(disk = %path.display(), %error, "the unflushed writes of a killed process are discarded, as asked");
                end_session(path)
            }
            (Err(source), Unflushed::Keep) => {
                Err(Error::from(ErrorKind::JournalStuck { source: Box::new(source) }).in_file(path))
            }
        }
    }
}

/// Has the image name no process that writes it.
fn end_session(path: &Path) -> Result<()> {
    let opened = LocalFiles.open(path, Role::Active(CacheMode::Host), &Gate::unrestricted())?;
    let store: &dyn Store = &*opened.store;
    let at = HostOffset::new(field::AUTOCLEAR);
    let end = || {
        let mut bits = [0; 8];
        store.read_exact(&mut bits, at)?;
        store.write_all(&(u64::from_be_bytes(bits) & !SESSION_MASK).to_be_bytes(), at)?;
        store.flush()
    };
    end().while_trying("write the header").map_err(|error| error.at(at).in_file(path))
}
