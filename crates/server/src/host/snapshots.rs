//! Snapshots of disks that are served. A snapshot is answered when it is on stable storage; what is left to do then is done
//! on a thread of its own, or by whoever changes or closes the disk before.

use std::sync::Arc;

use vmstrata_api::{Event, SnapshotLayer, SnapshotSpec, SnapshotTaken};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, snapshot_together};

use super::Host;
use crate::error::Error;
use crate::spec::SpecError;

impl Host {
    /// Takes a snapshot of some disks at one instant. It is on stable storage then, and gets its index afterwards.
    ///
    /// # Errors
    /// No disk or one that is not served, one named twice, or what the engine refuses; see [`snapshot_together`].
    pub fn snapshot(&self, asked: SnapshotSpec) -> Result<SnapshotTaken, Error> {
        let (_change, table) = self.begin_change()?;
        let served = |name: &String| table.serving(name).map(|(_, disk)| Arc::clone(disk));
        let disks = asked.disks.iter().map(served).collect::<Result<Vec<Arc<Disk>>, Error>>()?;
        drop(table);
        if let Some(name) = named_twice(&asked.disks) {
            return Err(SpecError::DiskTwice { name: name.to_owned() }.into());
        }
        let info = SnapshotInfo {
            name: asked.name,
            taken_ns: asked.taken_ns,
            labels: asked.labels.into_iter().collect(),
            group: asked.group,
            origin: None,
        };
        let all: Vec<&Disk> = disks.iter().map(|disk| &**disk).collect();
        let taken = snapshot_together(&all, &info)?;
        settle_later(disks);
        let pause = taken.first().map(|taken| taken.pause).unwrap_or_default();
        let layers = asked.disks.into_iter().zip(taken).map(|(disk, taken)| {
            self.tell(Event::SnapshotTaken { disk: disk.clone(), snapshot: info.name.clone() });
            SnapshotLayer { disk, layer: taken.layer.display().to_string() }
        });
        let disks = layers.collect();
        Ok(SnapshotTaken {
            pause_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            disks,
            name: info.name,
        })
    }
}

/// Has what the snapshot left to do done. Failures are logged and counted where they happen.
fn settle_later(disks: Vec<Arc<Disk>>) {
    let settle = move || disks.iter().for_each(|disk| _ = disk.settle());
    if let Err(error) = std::thread::Builder::new().name("settle".into()).spawn(settle) {
        tracing::warn!(%error, "a snapshot gets its index later: no thread");
    }
}

fn named_twice(names: &[String]) -> Option<&str> {
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}
