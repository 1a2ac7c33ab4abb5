//! Snapshots of disks that are served.

use std::sync::Arc;

use vmstrata_api::{Event, SnapshotLayer, SnapshotSpec, SnapshotTaken};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, snapshot_together};

use super::Host;
use crate::error::Error;
use crate::spec::SpecError;

impl Host {
    /// Takes a snapshot of some disks at one instant.
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

fn named_twice(names: &[String]) -> Option<&str> {
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}
