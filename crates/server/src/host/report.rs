//! What the host says of itself.

use vmstrata_api as api;
use vmstrata_disk::{Disk, Format, LayerInfo};
use vmstrata_export::nbd::TlsMode;
use vmstrata_store::io_uring_refused;

use super::stats::translate;
use super::{Entry, Host, Phase};
use crate::error::Error;
use crate::spec::shown_detect_zeroes;

impl Host {
    /// The server, its disks and its exports.
    pub fn status(&self) -> api::ServerStatus {
        api::ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            io_uring_refused: io_uring_refused().map(ToString::to_string),
            resources: self.resource_status(),
            disks: self.disks(),
            exports: self.exports(),
        }
    }

    pub(super) fn resource_status(&self) -> api::ResourceStatus {
        let used = self.resources.usage();
        api::ResourceStatus {
            metadata_cache_bytes: used.metadata_cache_bytes,
            metadata_cache_max_bytes: self.limits.metadata_cache_bytes,
            metadata_cache_fills: used.metadata_cache_fills,
            open_files: used.open_files as u64,
            open_files_max: self.limits.max_open_files as u64,
        }
    }

    /// All disks, in the order in which they were added.
    pub fn disks(&self) -> Vec<api::DiskStatus> {
        let entries = self.entries();
        entries.iter().map(disk_status).collect()
    }

    /// All exports, in the order in which they were added.
    pub fn exports(&self) -> Vec<api::ExportStatus> {
        let tls = !matches!(self.tls, TlsMode::Off);
        let table = self.table.lock();
        table.exports.iter().map(|export| export.status(tls)).collect()
    }

    /// One export.
    ///
    /// # Errors
    /// No such export.
    pub fn export(&self, id: u64) -> Result<api::ExportStatus, Error> {
        self.exports().into_iter().find(|export| export.id == id).ok_or(Error::NoSuchExport { id })
    }

    /// One disk, with its chain and its exports.
    ///
    /// # Errors
    /// No such disk.
    pub fn disk(&self, name: &str) -> Result<api::DiskDetail, Error> {
        let entries = self.entries();
        let entry = entries.iter().find(|entry| entry.spec.name == name);
        let entry = entry.ok_or_else(|| Error::NoSuchDisk { name: name.to_owned() })?;
        let chain = match &entry.phase {
            Phase::Serving(disk) => disk.layers().iter().map(layer_status).collect(),
            _ => Vec::new(),
        };
        let stats = match &entry.phase {
            Phase::Serving(disk) => Some(translate(&disk.stats())),
            _ => None,
        };
        let exports = self.exports().into_iter().filter(|export| export.export.serves(name)).collect();
        Ok(api::DiskDetail { disk: disk_status(entry), chain, exports, stats })
    }

    /// The table as it is now: what takes longer than copying it is done without its lock.
    pub(super) fn entries(&self) -> Vec<Entry> {
        self.table.lock().disks.clone()
    }
}

pub(super) fn state(phase: &Phase) -> api::DiskState {
    match phase {
        Phase::Opening => api::DiskState::Opening,
        Phase::Serving(_) => api::DiskState::Serving,
        Phase::Closing => api::DiskState::Closing,
        Phase::Waiting(_) => api::DiskState::Waiting,
    }
}

fn disk_status(entry: &Entry) -> api::DiskStatus {
    let disk = match &entry.phase {
        Phase::Serving(disk) => Some(disk),
        _ => None,
    };
    let stats = disk.map(|disk| disk.stats()).unwrap_or_default();
    api::DiskStatus {
        name: entry.spec.name.clone(),
        path: entry.spec.path.display().to_string(),
        file: disk
            .and_then(|disk| disk.active_file())
            .map(|file| api::FileNumber { device: file.dev, inode: file.ino }),
        state: state(&entry.phase),
        added: entry.is_added,
        open_error: match &entry.phase {
            Phase::Waiting(wait) => Some(wait.why.clone()),
            _ => None,
        },
        read_only: disk.map_or(entry.spec.read_only, |disk| disk.is_read_only()),
        detect_zeroes: shown_detect_zeroes(entry.spec.detect_zeroes),
        size_bytes: disk.map(|disk| disk.size()),
        layers: disk.map(|disk| layers(disk)),
        failed: disk.and_then(|disk| disk.failure()),
        finalizing: disk.is_some_and(|disk| disk.is_finalizing()),
        finalize_failures: disk.map_or(0, |disk| disk.finalize_failures()),
        metadata_hits: stats.metadata_hits[0],
        metadata_misses: stats.metadata_misses[0],
    }
}

pub(super) fn layers(disk: &Disk) -> u64 {
    disk.layer_count() as u64
}

fn layer_status(layer: &LayerInfo) -> api::LayerStatus {
    api::LayerStatus {
        index: layer.index.get(),
        path: layer.path.display().to_string(),
        format: match layer.format {
            Format::Qcow2 => api::Format::Qcow2,
            Format::Raw => api::Format::Raw,
        },
        size_bytes: layer.size,
        cluster_size_bytes: layer.cluster_bits.map(|bits| bits.size()),
        file_bytes: layer.file_len,
    }
}
