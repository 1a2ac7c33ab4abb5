//! Looking after snapshots of memory that were taken.

mod health;
mod report;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use vmstrata_memory::vault::{Deleted, Info, SnapshotId, Vault, Which};

use crate::args::{VaultArgs, VmDeleteArgs, VmListArgs, VmPruneArgs, VmShowArgs, VmStoreCommand};
use crate::output::{print, print_json};
use report::{Gone, Row, Shown};

/// Runs one of the commands.
///
/// # Errors
/// What could not be done.
pub fn run(command: &VmStoreCommand) -> Result<ExitCode> {
    match command {
        VmStoreCommand::List(args) => run_list(args)?,
        VmStoreCommand::Show(args) => run_show(args)?,
        VmStoreCommand::Delete(args) => run_delete(args)?,
        VmStoreCommand::Prune(args) => run_prune(args)?,
        VmStoreCommand::Verify(args) => return health::run_verify(args),
        VmStoreCommand::Repair(args) => return health::run_repair(args),
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens a vault, and says which of its directories are not there.
///
/// # Errors
/// When none is there.
pub fn open(args: &VaultArgs) -> Result<Arc<Vault>> {
    let vault = Vault::open_directories(&args.vault).context("no directory of the vault can be opened")?;
    for missing in vault.missing() {
        eprintln!("vmstrata: warning: {missing}");
    }
    Ok(vault)
}

/// The ids of the snapshots that are meant.
fn ids(vault: &Vault, which: &[Which]) -> Result<Vec<SnapshotId>> {
    Ok(which.iter().map(|which| vault.find_id(which)).collect::<Result<_, _>>()?)
}

fn run_list(args: &VmListArgs) -> Result<()> {
    let mut listed = open(&args.vault)?.list()?;
    if let Some(guest) = &args.guest {
        listed.retain(|listed| listed.info.as_ref().is_ok_and(|info| info.guest == *guest));
    }
    for lost in listed.iter().filter(|listed| listed.info.is_err()) {
        eprintln!("vmstrata: warning: snapshot {}: what is known of it cannot be read", lost.id);
    }
    if args.json {
        return Ok(print_json(&report::Listing { snapshots: listed.iter().map(Row::new).collect() })?);
    }
    Ok(print(&report::table(&listed))?)
}

fn run_show(args: &VmShowArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let id = vault.find_id(&args.snapshot)?;
    let listed = vault.list()?.into_iter().find(|listed| listed.id == id);
    let listed = listed.with_context(|| format!("no snapshot {}", args.snapshot))?;
    if let Err(tried) = &listed.info {
        anyhow::bail!("snapshot {id}: what is known of it is lost: {}", tried.join("; "));
    }
    let shown = Shown::new(&listed);
    if args.json { Ok(print_json(&shown)?) } else { Ok(print(&shown.text())?) }
}

fn run_delete(args: &VmDeleteArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let ids = ids(&vault, &args.snapshots)?;
    let names = args.snapshots.iter().map(ToString::to_string).collect();
    delete(&vault, &ids, names, args.json)
}

fn delete(vault: &Vault, ids: &[SnapshotId], names: Vec<String>, json: bool) -> Result<()> {
    let done = vault.delete(ids)?;
    let collected = match done {
        Deleted::Collected(collected) => Some(collected.bytes),
        Deleted::Later => None,
    };
    let gone = Gone { deleted: names, freed: collected };
    if json { Ok(print_json(&gone)?) } else { Ok(print(&gone.text())?) }
}

fn run_prune(args: &VmPruneArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let listed = vault.list()?;
    let infos = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
    let has_labels = |info: &&Info| args.label.iter().all(|label| info.labels.contains(label));
    let infos: Vec<&Info> = infos.filter(|info| info.guest == args.guest).filter(has_labels).collect();
    let kept = args.keep.decide(&infos.iter().map(|info| info.taken_ns).collect::<Vec<_>>());
    let split = |wanted: bool| {
        let those = infos.iter().zip(&kept).filter(move |(_, kept)| **kept == wanted);
        those.map(|(info, _)| *info).collect::<Vec<&Info>>()
    };
    let (keep, gone) = (split(true), split(false));
    if args.dry_run || gone.is_empty() {
        return report::tell_plan(&args.guest, &keep, &gone, args.json);
    }
    let ids: Vec<SnapshotId> = gone.iter().map(|info| info.id).collect();
    delete(&vault, &ids, gone.iter().map(|info| info.title()).collect(), args.json)
}
