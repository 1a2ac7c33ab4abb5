//! Checking the file of a layer: its lock, the journal of a process that was killed while it wrote it, and then
//! [`vmstrata_check`].

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use vmstrata_check::{Repair, Report};
use vmstrata_qcow2::header::field;
use vmstrata_qcow2::{ImageFormat, RawEntry};
use vmstrata_store::{CacheMode, Gate, Store};
use vmstrata_types::HostOffset;

use crate::active::host_of;
use crate::active::session::FEATURES_SINCE;
use crate::chain::{OpenOptions, Unflushed, image_format, read_head};
use crate::disk::Disk;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::journal::{Found, Slot, Subject, look};
use crate::layer::Format;
use crate::opener::{LocalFiles, Opened, Opener as _, Role};
use crate::resources::{ResourceOptions, Resources};
use crate::session::{BootId, SESSION_MASK, log_in};

/// How to check a file.
#[derive(Clone, Debug, Default)]
pub struct CheckOptions {
    /// What to look for, and what to mend.
    pub image: vmstrata_check::Options,
    /// Take no lock, and so look at an image that a process is writing: what is found may not be so. Not for repairs.
    pub force_share: bool,
    /// Where the journals of killed processes are.
    pub journal_dir: Option<PathBuf>,
    /// What happens to the unflushed writes of a killed process that a repair cannot take up.
    pub unflushed: Unflushed,
    /// Directories, beside the image's own, in which backing files may lie: taking a journal up may have to read them.
    pub allow_backing: Vec<PathBuf>,
}

/// Checks the qcow2 file at `path`, its backing files not included, and mends it if asked to.
///
/// Without repair the file is locked as a reader locks it, with repair as a writer: a running QEMU, or a server
/// that has it open for writing, is in the way of both.
///
/// Where the process that wrote the image was killed, its journal counts: what it leads to is not leaked, and a repair takes it
/// up first.
///
/// # Errors
/// A journal that a repair cannot take up; a file that cannot be opened, is locked, or is an image of another format;
/// whatever [`vmstrata_check::check`] returns.
pub fn check(path: &Path, options: &CheckOptions) -> Result<Report> {
    let repairs = options.image.repair != Repair::None;
    let role = match repairs {
        true => Role::Active(CacheMode::Host),
        false if options.force_share => Role::Inspected,
        false => Role::Frozen,
    };
    let mut opened = LocalFiles.open(path, role, &Gate::unrestricted())?;
    let mut pending = pending(&opened, options).map_err(|error| error.in_file(path))?;
    if repairs && pending.is_some() {
        // Opening the disk takes the lock itself.
        drop(opened);
        take_up(path, options)?;
        opened = LocalFiles.open(path, role, &Gate::unrestricted())?;
        pending = None;
    }
    let journal_missing = pending.as_ref().is_some_and(|left| left.clusters.is_none());
    let journaled = pending.and_then(|left| left.clusters).unwrap_or_default();
    let check = || -> Result<Report> {
        match image_format(&*opened.store, opened.identity.len)? {
            Some(ImageFormat::Qcow2) => {}
            None => return Err(ErrorKind::NoMetadata.into()),
            Some(format) => return Err(ErrorKind::Foreign { format }.into()),
        }
        let image = vmstrata_check::Options { journaled, ..options.image.clone() };
        Ok(Report { journal_missing, ..vmstrata_check::check(&*opened.store, &image)? })
    };
    check().map_err(|error| error.in_file(path))
}

/// Unflushed writes of a killed process.
#[derive(Debug)]
struct Pending {
    /// Host clusters that the newest entries of the journal lead to; `None` where it is missing.
    clusters: Option<HashSet<HostOffset>>,
}

/// What a killed process left of an image, if it left anything.
///
/// # Errors
/// A journal that cannot be read. An image that cannot be read has none: the check itself says what is wrong with it.
fn pending(opened: &Opened, options: &CheckOptions) -> Result<Option<Pending>> {
    let Ok(head) = read_head(&*opened.store, opened.identity.len) else { return Ok(None) };
    let session = head.header.autoclear.bits() & SESSION_MASK;
    if session == 0 || head.header.version < FEATURES_SINCE || options.force_share {
        return Ok(None);
    }
    if log_in(head.header.autoclear.bits()) != 0 {
        return Ok(Some(Pending { clusters: None }));
    }
    let boot = BootId::now().while_trying("read the kernel's boot id")?;
    let is_extended = head.header.has_subclusters();
    let subject = Subject { image: opened.identity.file, boot, session, is_extended };
    let found = match &options.journal_dir {
        Some(dir) => {
            look(dir, &subject).while_trying("read the volatile journal").map_err(|e| e.in_file(dir))?
        }
        None => Found::default(),
    };
    if !found.is_there && !boot.has_journal(session) {
        return Ok(None);
    }
    let newest: BTreeMap<Slot, RawEntry> =
        found.records.iter().map(|record| (record.slot, record.new)).collect();
    let entries = head.header.entry_format();
    let clusters = newest.into_iter().filter_map(|entry| host_of(entries, entry).flatten());
    Ok(Some(Pending { clusters: found.is_there.then(|| clusters.collect()) }))
}

/// Brings the writes to the image at `path`, as the next server would. With [`Unflushed::Discard`] an image of which they
/// cannot be taken up goes on without them.
///
/// # Errors
/// What keeps the image from being opened or closed.
fn take_up(path: &Path, options: &CheckOptions) -> Result<()> {
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

/// Has the image name no process that writes it.
fn end_session(path: &Path) -> Result<()> {
    let opened = LocalFiles.open(path, Role::Active(CacheMode::Host), &Gate::unrestricted())?;
    let store: &dyn Store = &*opened.store;
    let at = HostOffset::new(field::AUTOCLEAR);
    let end = || {
        let mut bits = [0; 8];
        store.read_exact(&mut bits, at)?;
        let bits = u64::from_be_bytes(bits);
        store.write_all(&(bits & !(SESSION_MASK | log_in(bits))).to_be_bytes(), at)?;
        store.flush()
    };
    end().while_trying("write the header").map_err(|error| error.at(at).in_file(path))
}
