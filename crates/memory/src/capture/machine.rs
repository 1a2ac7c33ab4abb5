//! A running machine as far as its memory goes: which backends it has, where they are on the host and in the guest.

use std::fs::File;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::json;

use super::memory::MachineRam;
use super::{backend, mtree};
use crate::qmp::{Qmp, QmpError};
use crate::ram::{Block, Layout, LayoutError};

/// Most memory backends a machine may have.
pub const BACKENDS_MAX: usize = 1024;

/// One memory backend of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// QEMU's id of the object.
    pub id: String,
    /// Bytes.
    pub bytes: u64,
    /// The file that holds it, or the directory in which QEMU made one.
    pub path: PathBuf,
}

/// What a machine is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// QEMU's versioned machine type, such as `pc-q35-7.2`.
    pub kind: String,
    /// The backends; their bytes one after the other are what `layout`'s file offsets mean.
    pub backends: Vec<Backend>,
    /// Where they lie in guest-physical memory.
    pub layout: Layout,
    /// Process id of QEMU, as far as the monitor's socket tells.
    pub pid: u32,
}

/// Why a machine's memory cannot be captured.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// QEMU did not tell.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU was not started in the right way.
    #[error(
        "this guest's memory cannot be captured: {why}; start QEMU with {options} (see `vmstrata vm args`)"
    )]
    Unfit {
        /// What is wrong.
        why: String,
        /// The options that are lacking.
        options: String,
    },
    /// Parts of a backend lie nowhere in the guest.
    #[error("memory backend {id} lies in no known way in the guest's memory")]
    Mapping {
        /// QEMU's id of the backend.
        id: String,
    },
    /// The backends contradict each other.
    #[error("the guest's memory blocks are no layout")]
    Layout(#[from] LayoutError),
    /// The backend's file is not what QEMU has.
    #[error("memory backend {id}: {}: {why}", path.display())]
    File {
        /// QEMU's id of the backend.
        id: String,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// An element of QEMU's answer to `query-memdev`.
#[derive(Debug, Deserialize)]
struct Memdev {
    id: Option<String>,
    size: u64,
    share: bool,
}

impl Machine {
    /// Asks a QEMU about its memory.
    ///
    /// # Errors
    /// [`MachineError::Unfit`] names the options that QEMU lacks.
    pub fn inspect(qmp: &mut Qmp) -> Result<Self, MachineError> {
        refuse_encrypted(qmp)?;
        let kind: String = qmp.ask("qom-get", json!({ "path": "/machine", "property": "type" }))?;
        let map = qmp.monitor("info mtree -f")?;
        let mut memdevs: Vec<Memdev> = qmp.ask("query-memdev", json!({}))?;
        // What is plugged later comes later: restored machines must list them in the same order.
        memdevs.sort_by(|one, other| one.id.cmp(&other.id));
        memdevs.truncate(BACKENDS_MAX);
        let (mut backends, mut blocks, mut before) = (Vec::new(), Vec::new(), 0);
        for memdev in memdevs {
            let id = memdev.id.clone().unwrap_or_default();
            let ranges = mtree::ranges(&map, &id);
            if ranges.is_empty() {
                continue;
            }
            let path = file_of(qmp, &id, &memdev)?;
            let own = mtree::blocks(&ranges, memdev.size).ok_or(MachineError::Mapping { id: id.clone() })?;
            blocks.extend(own.into_iter().map(|own| Block { file_offset: before + own.file_offset, ..own }));
            before = before.checked_add(memdev.size).ok_or(MachineError::Mapping { id: id.clone() })?;
            backends.push(Backend { id, bytes: memdev.size, path });
        }
        if backends.is_empty() {
            return Err(unfit("its memory is in no memory backend".to_owned()));
        }
        let kind = kind.trim_end_matches("-machine").to_owned();
        Ok(Self { kind, backends, layout: Layout::new(blocks)?, pid: qmp.peer()? })
    }

    /// Opens the memory, for reading.
    ///
    /// # Errors
    /// When a file cannot be opened, or is not the one that QEMU has open.
    pub fn open(&self) -> Result<MachineRam, MachineError> {
        let files = self.backends.iter().map(|own| Ok((backend::open(own, self.pid)?, own.bytes)));
        let files: Vec<(File, u64)> = files.collect::<Result<_, MachineError>>()?;
        Ok(MachineRam::new(files, self.layout.clone()))
    }
}

/// The file of a backend that other processes can read and that migration may leave out.
fn file_of(qmp: &mut Qmp, id: &str, memdev: &Memdev) -> Result<PathBuf, MachineError> {
    let path = format!("/objects/{id}");
    let mut property = |name: &str| qmp.ask("qom-get", json!({ "path": path, "property": name }));
    // A backend that QEMU made by itself is no object of the user's, and may have no such properties.
    let kind: String = property("type").unwrap_or_default();
    if kind != "memory-backend-file" {
        let kind = if kind.is_empty() { "anonymous memory" } else { &kind };
        return Err(unfit(format!("its memory {id} is {kind}, which no other process can read")));
    }
    if !memdev.share {
        return Err(unfit(format!(
            "its memory {id} has share=off, so its file does not hold what the guest has (one that was restored \
             with --lazy needs --shared, too)"
        )));
    }
    let path: String = property("mem-path")?;
    Ok(PathBuf::from(path))
}

/// Encrypted memory is noise in a file, and its devices' state cannot be had either.
fn refuse_encrypted(qmp: &mut Qmp) -> Result<(), MachineError> {
    let ask = json!({ "path": "/machine", "property": "confidential-guest-support" });
    // Machines without the property have no such support.
    let support: String = qmp.ask("qom-get", ask).unwrap_or_default();
    if support.is_empty() {
        return Ok(());
    }
    let why = "its memory is encrypted".to_owned();
    Err(MachineError::Unfit { why, options: "no confidential-guest-support".to_owned() })
}

fn unfit(why: String) -> MachineError {
    let options = "-object memory-backend-file,id=mem,size=SIZE,mem-path=/dev/shm/NAME,share=on \
                   -machine memory-backend=mem"
        .to_owned();
    MachineError::Unfit { why, options }
}
