//! Snapshots of a disk in use.

use std::path::PathBuf;
use std::time::Duration;

use vmstrata_store::Gate;

use super::Disk;
use super::switch::NewNames;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Format;
use crate::layers::Top;
use crate::snapshot::{PrepareOptions, SnapshotInfo, prepare};

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The layer that holds the state of the disk at that moment.
    pub layer: PathBuf,
    /// For how long writes were held; reads were not.
    pub pause: Duration,
}

impl Disk {
    /// Takes a snapshot: what is active becomes a frozen layer called after `info.name`, and an empty overlay takes the
    /// writes from now on, under the disk's own path.
    ///
    /// Everything that completed before the call is in the snapshot, nothing that begins after it returned is. When it
    /// returns, the snapshot is on stable storage.
    ///
    /// # Errors
    /// A disk that takes no writes, a name that is taken or none, a host that cannot make the files: nothing has changed.
    /// Or a host that cannot flush or write what was active: the disk takes no more writes.
    pub fn snapshot(&self, info: &SnapshotInfo) -> Result<Taken> {
        let _changing = self.changing.lock();
        self.check_writable()?;
        let (format, file) = match &self.layers_now().top {
            Top::Qcow2(active) => (Format::Qcow2, active.identity.file),
            Top::Raw(raw) => (Format::Raw, raw.identity.file),
            Top::Frozen => unreachable!("checked to be writable"),
        };
        let opener = self.resources.files().opener();
        if opener.identity(&self.path, &Gate::unrestricted())?.file != file {
            return Err(Error::from(ErrorKind::Changed).in_file(&self.path));
        }
        let prepared =
            prepare(&self.path, info, &PrepareOptions { format: Some(format), ..Default::default() })?;
        let (overlay, layer) = (prepared.overlay().to_owned(), prepared.frozen_path().to_owned());
        let names = NewNames { overlay: &overlay, frozen: &layer };
        let pause = self.switch_to(names, || {
            // Once renamed, what is written must go to the overlay, or nowhere.
            prepared.rename()?.flush().map_err(|error| self.latch(error))
        })?;
        tracing::info!(disk = %self.path.display(), snapshot = info.name, pause_us = pause.as_micros(), "snapshot taken");
        Ok(Taken { layer, pause })
    }
}
