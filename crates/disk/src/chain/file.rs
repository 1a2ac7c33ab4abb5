//! One file of a chain: opened, and its header read.

use std::path::{Path, PathBuf};

use vmstrata_store::Gate;

use super::OpenOptions;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::head::{Qcow2Head, has_magic, probe, raw_size, read_head};
use crate::json_name::Described;
use crate::layer::Format;
use crate::opener::{Opened, Opener, Role};
use crate::session::{SESSION_MASK, log_in};
use crate::window::{Window, part_of};

/// The open file on top of a chain.
#[derive(Debug)]
pub(crate) struct Top {
    pub(crate) path: PathBuf,
    pub(crate) opened: Opened,
    /// What of the file it is; `None` for all.
    pub(crate) window: Option<Window>,
    /// Virtual size in bytes.
    pub(crate) size: u64,
    /// `None` for a raw file.
    pub(crate) head: Option<Qcow2Head>,
    /// Whether its format is what its bytes look like, as none was said.
    pub(crate) is_probed: bool,
}

impl Top {
    /// Whether a process has the file open for writing, or was killed while it had.
    pub(crate) fn is_in_session(&self) -> bool {
        self.head.as_ref().is_some_and(|head| head.header.autoclear.bits() & SESSION_MASK != 0)
    }

    /// Whether a flush log may have flushed writes of it.
    pub(crate) fn is_behind_log(&self) -> bool {
        self.head.as_ref().is_some_and(|head| log_in(head.header.autoclear.bits()) != 0)
    }

    /// Refuses a layer as a state of a disk whose own content is partly overwritten by that of the layers above it, because it is
    /// being dropped ([`crate::merge`]). Below those it is right.
    ///
    /// # Errors
    /// [`ErrorKind::BeingDropped`].
    pub(crate) fn check_state(&self) -> Result<()> {
        if is_being_dropped(&self.path, self.head.as_ref()) {
            return Err(Error::from(ErrorKind::BeingDropped).in_file(&self.path));
        }
        Ok(())
    }
}

/// As [`Top::check_state`], of a file whose chain may be broken for just that reason; of one that cannot be read itself nothing is said.
///
/// # Errors
/// As [`Top::check_state`].
pub(crate) fn check_state_at(path: &Path, opener: &dyn Opener) -> Result<()> {
    match open_layer(path, Role::Inspected, None, &Gate::unrestricted(), opener) {
        Ok(top) => top.check_state(),
        Err(_) => Ok(()),
    }
}

/// Whether [`Top::check_state`] refuses it.
pub(crate) fn is_being_dropped(path: &Path, head: Option<&Qcow2Head>) -> bool {
    let valid_as = head.and_then(|head| head.valid_as.as_deref());
    valid_as.is_some_and(|name| path.file_name() != Some(name))
}

/// Opens the file of a disk, or of a state of one: no other file names it and says what it is.
///
/// # Errors
/// As [`open_layer`]; [`ErrorKind::SaidRaw`].
pub(crate) fn open_top(path: &Path, role: Role, options: &OpenOptions, opener: &dyn Opener) -> Result<Top> {
    let opened = opener.open(path, role, &Gate::unrestricted())?;
    if options.format == Some(Format::Raw) && !options.format_is_exact {
        refuse_overlay(path, &opened).map_err(|error| error.in_file(path))?;
    }
    read_top(path, opened, options.format, None)
}

/// Refuses a file that is said to be raw and begins with a qcow2 header of vmstrata's, as an overlay does that took a raw disk's
/// place. Any other header is a guest's data. Snapshots make no overlays of devices.
fn refuse_overlay(path: &Path, opened: &Opened) -> Result<()> {
    if !has_magic(&*opened.store)? || !path.metadata().while_trying("examine")?.is_file() {
        return Ok(());
    }
    match read_head(&*opened.store, opened.identity.len) {
        Ok(head) if head.is_ours => Err(ErrorKind::SaidRaw.into()),
        Err(error) if matches!(error.kind(), ErrorKind::Io { .. }) => Err(error),
        // No overlay of vmstrata's, or a header that nothing can use.
        _ => Ok(()),
    }
}

/// Opens a file of which is known how it keeps its bytes; `None` looks at its first ones.
///
/// # Errors
/// A file that cannot be opened, is not allowed, is locked, or breaks the format.
pub(crate) fn open_layer(
    path: &Path,
    role: Role,
    format: Option<Format>,
    gate: &Gate,
    opener: &dyn Opener,
) -> Result<Top> {
    read_top(path, opener.open(path, role, gate)?, format, None)
}

/// As [`open_layer`], by the description of it in the layer above.
///
/// # Errors
/// As [`open_layer`]; a part of a file that the file does not have.
pub(crate) fn open_described(layer: &Described, role: Role, gate: &Gate, opener: &dyn Opener) -> Result<Top> {
    read_top(&layer.path, opener.open(&layer.path, role, gate)?, layer.format, layer.window)
}

fn read_top(path: &Path, opened: Opened, format: Option<Format>, window: Option<Window>) -> Result<Top> {
    let opened = part_of(opened, window).map_err(|error| error.in_file(path))?;
    let read = || -> Result<(u64, Option<Qcow2Head>)> {
        let file_len = opened.identity.len;
        if let Some(window) = window {
            return Ok((raw_size(window.len_in(file_len)?), None));
        }
        let head = match format {
            Some(Format::Raw) => None,
            Some(Format::Qcow2) => Some(read_head(&*opened.store, file_len)?),
            None => probe(&*opened.store, file_len)?,
        };
        let size = head.as_ref().map_or(raw_size(file_len), |head| head.header.size);
        Ok((size, head))
    };
    let (size, head) = read().map_err(|error| error.in_file(path))?;
    Ok(Top { path: path.to_owned(), opened, window, size, head, is_probed: format.is_none() })
}
