//! The disks of a snapshot of memory, read at their states of the same instant.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use vmstrata_disk::{Disk, Extent, OpenOptions, ResourceOptions, Resources, snapshot};
use vmstrata_memory::BoxError;
use vmstrata_memory::disk::{OpenDisk, ReadDisk};
use vmstrata_memory::vault::DiskState;
use vmstrata_store::Segment;
use vmstrata_tier::{CachedFiles, open_state};
use vmstrata_types::{GuestOffset, GuestRange, LayerIndex, path_from_text, path_to_text};

use super::kept::{Published, published};
use crate::args::{BackingArgs, ControlArgs};
use crate::client::Client;
use crate::commands::states::explain;
use crate::commands::taken::{Taken, find_taken};

/// Runs of a disk looked up at a time.
const EXTENTS: usize = 1024;

/// How often is looked whether a state is published.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long one may take that is on its way.
const PUBLISHED_MAX: Duration = Duration::from_secs(30);

/// Opens states of disks: by their names in the disks' chains, or as layers of a repository.
#[derive(Debug)]
pub(super) struct States {
    options: OpenOptions,
    files: Arc<CachedFiles>,
    resources: Arc<Resources>,
    /// The server of tiered disks.
    server: ControlArgs,
    /// How long to wait for a state that is not published yet.
    patience: Duration,
}

impl States {
    /// Backing files may be where `backing` says; `server` may serve the disks.
    ///
    /// # Errors
    /// A host that cannot start the threads that reading takes.
    pub(super) fn new(backing: &BackingArgs, server: &ControlArgs) -> vmstrata_disk::Result<Self> {
        let allow_backing = backing.allow_backing.clone();
        let options = OpenOptions { read_only: true, allow_backing, ..OpenOptions::default() };
        let files = Arc::<CachedFiles>::default();
        let resources = Resources::start_with(ResourceOptions::default(), files.clone())?;
        Ok(Self { options, files, resources, server: server.clone(), patience: PUBLISHED_MAX })
    }

    /// The same, for a guest that is held meanwhile: nothing is waited for.
    #[must_use]
    pub(super) fn while_held(self) -> Self {
        Self { patience: Duration::ZERO, ..self }
    }

    /// Opens a state of a tiered disk, once it is published.
    fn open_tiered(&self, state: &DiskState, taken_ns: u64) -> anyhow::Result<Arc<Disk>> {
        let (client, deadline) = (Client::new(&self.server)?, Instant::now() + self.patience);
        let cache = loop {
            match published(&client, state, taken_ns)? {
                Published::Perhaps(cache) => break cache,
                Published::Soon if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
                Published::Soon => bail!("it is not published yet"),
            }
        };
        let (path, name) = (path_from_text(&state.disk), state.snapshot.clone());
        let (found, pin) = find_taken(&path, Taken { name, taken_ns })?;
        let dir = if found.is_directory { Some(&found.name) } else { cache.as_ref() };
        let dir = dir.with_context(|| {
            format!("{}: it is read by way of what a server keeps of it: serve it", path.display())
        })?;
        let (from, reading) = ((&found.repository, dir.as_path()), (cache.as_deref(), &self.files));
        Ok(open_state(from, found.state_of(&pin.epoch)?, reading, &self.options, &self.resources)?)
    }
}

impl OpenDisk for States {
    fn open(&self, state: &DiskState) -> Result<Box<dyn ReadDisk>, BoxError> {
        if let Some(taken_ns) = state.tiered_ns {
            let disk = self.open_tiered(state, taken_ns).map_err(|error| format!("{error:#}"))?;
            return Ok(Box::new(State { disk, opened: Mutex::default() }));
        }
        let found = snapshot::find(&path_from_text(&state.disk), &state.snapshot, &self.options);
        let found = found.map_err(|error| explain(&error))?;
        let (format, options) = (Some(found.format), self.options.clone());
        let options = OpenOptions { format, format_is_exact: true, ..options };
        let disk = Disk::open(&found.layer, &options, &self.resources).map_err(|error| explain(&error))?;
        Ok(Box::new(State { disk, opened: Mutex::default() }))
    }
}

struct State {
    disk: Arc<Disk>,
    /// Bytes of the files of layers that [`State::check`] came to, as far as they open.
    opened: Mutex<HashMap<LayerIndex, Option<u64>>>,
}

impl State {
    /// Bytes of the file of the layer that has `extent`.
    fn opened(&self, layer: LayerIndex, extent: &Extent) -> Option<u64> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        *opened.entry(layer).or_insert_with(|| {
            // Layers open when they are first read.
            self.read_at(extent.range.start.get(), &mut [0]).ok()?;
            Some(self.disk.layers().get(layer.index())?.file_len)
        })
    }
}

impl ReadDisk for State {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.read(GuestOffset::new(offset), &[Segment::from_mut(into)]).map_err(io::Error::other)
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut left = GuestRange::new(GuestOffset::new(offset), len);
        while left.len > 0 {
            let extents = self.disk.extents_by_place(left, EXTENTS).map_err(io::Error::other)?;
            for extent in extents.iter().filter(|extent| !extent.kind.reads_zero()) {
                let file = extent.layer.and_then(|layer| self.opened(layer, extent));
                // Where a compressed cluster ends is in its layer's table, which is read.
                let end = extent.host.map_or(0, |host| host.get().saturating_add(extent.range.len));
                if file.is_none_or(|bytes| bytes < end) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            let done: u64 = extents.iter().map(|extent| extent.range.len).sum();
            left = GuestRange::new(left.start + done, left.len - done);
        }
        Ok(())
    }
}

/// The states of a snapshot's disks, which are in other files now if any are named.
///
/// # Errors
/// When there are not as many files as disks.
pub(super) fn moved(states: &[DiskState], files: &[PathBuf]) -> anyhow::Result<Vec<DiskState>> {
    if files.is_empty() {
        return Ok(states.to_vec());
    }
    let (has, named) = (states.len(), files.len());
    anyhow::ensure!(
        has == named,
        "the snapshot has {has} disks (see `vmstrata vm show`), and --disk names {named}"
    );
    let state =
        |(state, file): (&DiskState, &PathBuf)| DiskState { disk: path_to_text(file), ..state.clone() };
    Ok(states.iter().zip(files).map(state).collect())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;

    use super::*;

    fn tool(program: &str, args: &[&str]) {
        assert!(Command::new(program).args(args).output().unwrap().status.success(), "{program} {args:?}");
    }

    #[test]
    fn bytes_whose_layer_was_cut_short_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let [base, top] = ["base.qcow2", "top.qcow2"].map(|name| dir.path().join(name).display().to_string());
        tool("qemu-img", &["create", "-q", "-f", "qcow2", &base, "1M"]);
        tool("qemu-io", &["-c", "write -P 1 0 64k", "-c", "write -P 2 512k 64k", &base]);
        let cut = std::fs::metadata(&base).unwrap().len() - 4096;
        File::options().write(true).open(&base).unwrap().set_len(cut).unwrap();
        tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top]);
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let resources = Resources::start(ResourceOptions::default()).unwrap();
        let disk = Disk::open(top.as_ref(), &options, &resources).unwrap();
        let state = State { disk, opened: Mutex::default() };
        let last = (512 << 10) + (60 << 10);
        // What no layer has is zeros.
        for (offset, can_read) in [(0, true), (256 << 10, true), (last - 4096, true), (last, false)] {
            assert_eq!(state.check(offset, 4096).is_ok(), can_read, "{offset}");
        }
        assert!(state.check(0, last + 4096).is_err() && state.check((1 << 20) - 512, 4096).is_err());
    }
}
