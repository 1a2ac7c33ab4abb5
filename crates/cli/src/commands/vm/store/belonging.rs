//! Snapshots of disks that were taken with snapshots of memory, deleted with them.

use std::path::PathBuf;

use anyhow::Result;
use vmstrata_api::MergeDirection;
use vmstrata_memory::vault::DiskState;

use super::super::kept;
use crate::args::{ControlArgs, MergeHowArgs};
use crate::client::Client;
use crate::commands::merge::delete_quietly;
use crate::commands::snapshot::live::Live;

/// Deletes them, through the server that may be serving the disks; says why of, and returns, those that are left.
pub fn delete(states: &[DiskState], server: &ControlArgs) -> Vec<DiskState> {
    let mut states: Vec<&DiskState> = states.iter().collect();
    states.sort_by_key(|state| &state.disk);
    let mut left = Vec::new();
    // One request for each: a name that is gone already does not fail the others.
    for state in states {
        if let Err(error) = delete_one(state, server) {
            eprintln!("vmstrata: warning: {}@{} is left: {error:#}", state.disk, state.snapshot);
            left.push(state.clone());
        }
    }
    left
}

fn delete_one(state: &DiskState, server: &ControlArgs) -> Result<()> {
    if let Some(taken_ns) = state.tiered_ns {
        return kept::delete(&Client::new(server)?, state, taken_ns).map(drop);
    }
    let (disk, name) = (PathBuf::from(&state.disk), state.snapshot.as_str());
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
