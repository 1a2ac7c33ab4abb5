//! The disks of a snapshot of memory, read at their states of the same instant.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources, snapshot};
use vmstrata_memory::capture::BoxError;
use vmstrata_memory::disk::{OpenDisk, ReadDisk};
use vmstrata_memory::vault::DiskState;
use vmstrata_store::Segment;
use vmstrata_types::GuestOffset;

use crate::args::BackingArgs;
use crate::commands::states::explain;

/// Opens states of disks by their names in the disks' chains.
#[derive(Debug)]
pub(super) struct States {
    options: OpenOptions,
    resources: Arc<Resources>,
}

impl States {
    /// Backing files may be where `backing` says.
    ///
    /// # Errors
    /// A host that cannot start the threads that reading takes.
    pub(super) fn new(backing: &BackingArgs) -> vmstrata_disk::Result<Self> {
        let allow_backing = backing.allow_backing.clone();
        let options = OpenOptions { read_only: true, allow_backing, ..OpenOptions::default() };
        Ok(Self { options, resources: Resources::start(ResourceOptions::default())? })
    }
}

impl OpenDisk for States {
    fn open(&self, state: &DiskState) -> Result<Box<dyn ReadDisk>, BoxError> {
        let found = snapshot::find(Path::new(&state.disk), &state.snapshot, &self.options);
        let found = found.map_err(|error| explain(&error))?;
        let (format, options) = (Some(found.format), self.options.clone());
        let options = OpenOptions { format, format_is_exact: true, ..options };
        let disk = Disk::open(&found.layer, &options, &self.resources).map_err(|error| explain(&error))?;
        Ok(Box::new(State(disk)))
    }
}

struct State(Arc<Disk>);

impl ReadDisk for State {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read(GuestOffset::new(offset), &[Segment::from_mut(into)]).map_err(io::Error::other)
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
    let state = |(state, file): (&DiskState, &PathBuf)| DiskState {
        disk: file.display().to_string(),
        snapshot: state.snapshot.clone(),
    };
    Ok(states.iter().zip(files).map(state).collect())
}
