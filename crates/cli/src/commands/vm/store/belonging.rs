//! Snapshots of disks that were taken with snapshots of memory, deleted with them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use vmstrata_api::MergeDirection;
use vmstrata_memory::vault::DiskState;

use crate::args::{ControlArgs, MergeHowArgs};
use crate::commands::merge::delete_quietly;
use crate::commands::snapshot::live::Live;

/// Deletes them, through the server that may be serving the disks; says why of, and returns, those that are left.
pub fn delete(states: &[DiskState], server: &ControlArgs) -> Vec<DiskState> {
    let mut by_disk = BTreeMap::<&str, Vec<String>>::new();
    for state in states {
        by_disk.entry(&state.disk).or_default().push(state.snapshot.clone());
    }
    let mut left = Vec::new();
    for (disk, names) in by_disk {
        // One by one: a name that somebody has deleted before is in no other's way.
        for name in names {
            if let Err(error) = delete_one(disk.into(), &name, server) {
                eprintln!("vmstrata: warning: {disk}@{name} is left: {error:#}");
                left.push(DiskState { disk: disk.to_owned(), snapshot: name });
            }
        }
    }
    left
}

fn delete_one(disk: PathBuf, name: &str, server: &ControlArgs) -> Result<()> {
    let names = vec![name.to_owned()];
    let Some(live) = Live::find(std::slice::from_ref(&disk), server)? else {
        return delete_quietly(&disk, &names);
    };
    live.wait_job(
        &MergeHowArgs::default().delete(live.name(), &names, false, MergeDirection::default()),
        false,
    )?;
    Ok(())
}
