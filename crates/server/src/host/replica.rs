//! What this host keeps of layers in repositories that its disks stand on.

use std::path::Path;
use std::sync::Arc;

use vmstrata_api::{self as api, ChangedBy, JobSpec, JobStatus};
use vmstrata_disk::{Disk, OpenOptions, published_below};
use vmstrata_tier::{BOOT, LayerReplica, Replica};
use vmstrata_types::path_to_text;

use super::Host;
use crate::error::Error;
use crate::hours::Hours;
use crate::jobs::{REPLICA_FILL, REPLICA_SCRUB, ReplicaWalk};
use crate::spec::{DiskSpec, ReplicaSpec, absolute, format_of};

impl Host {
    /// Has what a chain has in a repository read through the cache in the disk's directory.
    ///
    /// # Errors
    /// A chain or a repository that cannot be read; a cache that cannot be used.
    pub(super) fn read_through(
        &self,
        image: &Path,
        options: &OpenOptions,
        asked: &ReplicaSpec,
    ) -> Result<(), Error> {
        match published_below(image, options)? {
            Some(newest) => self.caches.read_through(&newest, asked, BOOT),
            None => Ok(()),
        }
    }

    /// What is here of each disk's layers.
    pub fn replicas(&self) -> Result<api::ReplicaList, Error> {
        let served: Vec<(String, Arc<Disk>)> = {
            let table = self.table.lock();
            table.served().map(|(name, disk)| (name.to_owned(), Arc::clone(disk))).collect()
        };
        let mut replicas = Vec::new();
        for (name, disk) in served {
            let replica = self.caches.replica(&disk)?;
            if !replica.is_empty() {
                replicas.push(shown(&name, &replica));
            }
        }
        Ok(api::ReplicaList { replicas })
    }

    /// Keeps what comes of a disk's layers, or lets it go as that of others.
    ///
    /// # Errors
    /// No such disk, one without such layers; a cache without room for them.
    pub fn pin_replica(&self, name: &str, asked: api::ReplicaPin) -> Result<api::Replica, Error> {
        let replica = self.replica(name)?;
        replica.pin(asked.pinned)?;
        Ok(shown(name, &replica))
    }

    /// Gives up what is here of a disk's layers.
    ///
    /// # Errors
    /// No such disk, one without such layers; pinned ones.
    pub fn drop_replica(&self, name: &str) -> Result<api::ReplicaDropped, Error> {
        Ok(api::ReplicaDropped { bytes: self.replica(name)?.give_up()? })
    }

    /// Begins to fill or to scrub.
    pub(super) fn begin_replica_walk(&self, asked: &JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        let name = asked.disk();
        let (slot, work) = match asked {
            JobSpec::ReplicaFill { hours, from, format, .. } => {
                let hours = hours.as_deref().map(Hours::parse).transpose()?;
                let slot = self.jobs.reserve(&REPLICA_FILL, name)?;
                let replica = self.replica(name)?;
                let walk = match from {
                    Some(from) => replica.fill_from(self.open_image(name, from, *format)?)?,
                    None => replica.fill()?,
                };
                (slot, ReplicaWalk::new(walk, hours))
            }
            _ => {
                let slot = self.jobs.reserve(&REPLICA_SCRUB, name)?;
                (slot, ReplicaWalk::new(self.replica(name)?.scrub(), None))
            }
        };
        self.keep_job(name, || slot.start(asked.bytes_per_second(), by, work))
    }

    /// Opens an image that may have what a disk's layers hold, as that disk is opened, but for reads alone.
    fn open_image(&self, disk: &str, path: &str, format: Option<api::Format>) -> Result<Arc<Disk>, Error> {
        let path = absolute("from", path)?;
        let spec = self.table.lock().serving(disk)?.0.clone();
        let image = DiskSpec {
            path,
            // No disk of the server has this name.
            name: String::new(),
            read_only: true,
            format: format.map(format_of),
            clone_of: None,
            ..spec
        };
        // The key says where that disk's own backing files may lie.
        let options = OpenOptions { allow_backing_alone: false, ..self.open_options(&image) };
        self.open_files(&image, options)
    }

    fn replica(&self, name: &str) -> Result<Replica, Error> {
        let disk = Arc::clone(self.table.lock().serving(name)?.1);
        let replica = self.caches.replica(&disk)?;
        if replica.is_empty() { Err(Error::NoReplica { name: name.to_owned() }) } else { Ok(replica) }
    }
}

fn shown(disk: &str, replica: &Replica) -> api::Replica {
    let layer = |layer: LayerReplica| api::ReplicaLayer {
        id: layer.id.to_string(),
        repository: layer.repository,
        cache: path_to_text(&layer.cache),
        bytes: layer.bytes,
        kept_bytes: layer.kept_bytes,
        pinned: layer.is_pinned,
    };
    api::Replica { disk: disk.to_owned(), layers: replica.layers().into_iter().map(layer).collect() }
}
