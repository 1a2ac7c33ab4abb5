//! Looking after snapshots of memory that were taken.

mod belonging;
mod gc;
mod health;
mod report;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use vmstrata_disk::snapshot::Keep;
use vmstrata_memory::vault::{
    Compact, Deleted, DiskState, Info, Listed, SnapshotId, Vault, VaultError, Which,
};

use super::kept::{Keeping, Look};
use crate::args::{
    DiskSnapshotArgs, VaultArgs, VmDeleteArgs, VmListArgs, VmPruneArgs, VmShowArgs, VmStoreCommand,
};
use crate::audit::{self, What};
use crate::output::answer;
pub use report::Gone;
use report::{Row, Shown};

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
        VmStoreCommand::Gc(args) => gc::run(args)?,
        VmStoreCommand::Verify(args) => return health::run_verify(args),
        VmStoreCommand::Repair(args) => return health::run_repair(args),
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens a vault, and says which of its repositories are not there.
///
/// # Errors
/// When none is there.
pub fn open(args: &VaultArgs) -> Result<Arc<Vault>> {
    let vault = Vault::open_at(&args.repositories()).map_err(|error| match error {
        VaultError::Repository(error) => {
            anyhow!("no repository of the vault can be opened: {}: {}", error.repository, error.source)
        }
        other => other.into(),
    })?;
    for missing in vault.missing() {
        eprintln!("vmstrata: warning: {missing}");
    }
    Ok(vault)
}

/// The ids of the snapshots that are meant.
fn ids(vault: &Vault, which: &[Which]) -> Result<Vec<SnapshotId>, VaultError> {
    which.iter().map(|which| vault.find_id(which)).collect()
}

fn run_list(args: &VmListArgs) -> Result<()> {
    let mut listed = open(&args.vault)?.list()?;
    if let Some(guest) = &args.guest {
        listed.retain(|listed| listed.info.as_ref().is_ok_and(|info| info.guest == *guest));
    }
    for lost in listed.iter().filter(|listed| listed.info.is_err()) {
        eprintln!("vmstrata: warning: snapshot {}: what is known of it cannot be read", lost.id);
    }
    let look = Look::at_all(&listed, &args.server)?;
    let rows = listed.iter().map(|listed| Row::new(listed, &look)).collect();
    let listing = report::Listing { snapshots: rows };
    answer(args.json, &listing, || listing.text())
}

fn run_show(args: &VmShowArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let id = vault.find_id(&args.snapshot)?;
    let listed = vault.list()?.into_iter().find(|listed| listed.id == id);
    let listed = listed.with_context(|| format!("no snapshot {}", args.snapshot))?;
    if let Err(tried) = &listed.info {
        anyhow::bail!("snapshot {id}: what is known of it is lost: {}", tried.join("; "));
    }
    let used = vault.used_objects(id)?;
    let look = Look::at_all(std::slice::from_ref(&listed), &args.server)?;
    let shown = Shown::new(&listed, &used, &look);
    answer(args.json, &shown, || shown.text())
}

fn run_delete(args: &VmDeleteArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let listed = vault.list()?;
    args.snapshots.iter().try_for_each(|which| refuse_unnamed(which, &listed))?;
    let is_none_there = || args.snapshots.iter().all(|which| vault.find_id(which).is_err());
    let ids = match ids(&vault, &args.snapshots) {
        Err(missing @ VaultError::NotFound(_)) if !args.dry_run && is_none_there() => {
            return finish_delete(&vault, missing, args);
        }
        ids => ids?,
    };
    let names = ids.iter().map(|id| title(*id, &listed)).collect();
    let disks = disks_of(&listed, &ids);
    if args.dry_run {
        return report::tell_delete_plan(names, &disks, args.disks.disks, args.json);
    }
    delete(&vault, &ids, names, disks, &args.disks)?.tell(args.json)
}

/// Removes the objects that a killed delete has left; its snapshots are not listed any more.
///
/// # Errors
/// `missing` if there are no such objects.
fn finish_delete(vault: &Vault, missing: VaultError, args: &VmDeleteArgs) -> Result<()> {
    if vault.collectable(Compact::default())?.objects == 0 {
        return Err(missing.into());
    }
    eprintln!("vmstrata: {missing}; finishing a delete that was interrupted");
    delete(vault, &[], Vec::new(), Vec::new(), &args.disks)?.tell(args.json)
}

/// Refuses a guest alone: which of its snapshots is the newest may have changed since the user looked.
fn refuse_unnamed(which: &Which, listed: &[Listed]) -> Result<()> {
    let Which::Newest(guest) = which else { return Ok(()) };
    let infos = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
    let titles: Vec<String> = infos.filter(|info| info.guest == *guest).map(Info::title).collect();
    match &titles[..] {
        [] => bail!("{guest}: no snapshots of this guest in the vault"),
        [newest, ..] => bail!(
            "{guest}: names a guest, not a snapshot; it has {}: delete one by its name, as in vmstrata vm delete {newest}",
            titles.join(", ")
        ),
    }
}

/// `GUEST@NAME` of a snapshot; its id where what is known of it is lost.
fn title(id: SnapshotId, listed: &[Listed]) -> String {
    let info = listed.iter().find(|listed| listed.id == id).and_then(|listed| listed.info.as_ref().ok());
    info.map_or_else(|| id.to_string(), Info::title)
}

/// The snapshots of disks that were taken with snapshots of memory.
fn disks_of(listed: &[Listed], ids: &[SnapshotId]) -> Vec<DiskState> {
    let gone = listed.iter().filter(|listed| ids.contains(&listed.id));
    gone.filter_map(|listed| listed.info.as_ref().ok()).flat_map(|info| info.disks.clone()).collect()
}

/// Deletes snapshots of memory, then those of disks that were taken with them, if that is wanted: in this order no memory is
/// ever left without its disks.
fn delete(
    vault: &Vault,
    ids: &[SnapshotId],
    names: Vec<String>,
    disks: Vec<DiskState>,
    wanted: &DiskSnapshotArgs,
) -> Result<Gone> {
    let what = What { object: Some(names.join(", ")), ..What::of("vm_delete", []) };
    let freed = audit::change(what, |what| {
        what.bytes = match vault.delete(ids)? {
            Deleted::Collected(collected) => Some(collected.bytes),
            Deleted::Later => None,
        };
        Ok(what.bytes)
    })?;
    let left = if wanted.disks { belonging::delete(&disks, &wanted.server) } else { disks };
    Ok(Gone::new(names, freed, &left))
}

fn run_prune(args: &VmPruneArgs) -> Result<()> {
    let vault = open(&args.vault)?;
    let listed = vault.list()?;
    let look = Look::at_all(&listed, &args.disks.server)?;
    let (keep, gone) = decide(&listed, &look, (&args.guest, &args.label), &args.keep);
    if args.dry_run || gone.is_empty() {
        return report::tell_plan(&args.guest, &keep, &gone, args.json);
    }
    delete_all(&vault, &gone, &args.disks)?.tell(args.json)
}

/// Deletes the snapshots of a guest with these labels that no rule keeps; `None` when there are none.
///
/// # Errors
/// What could not be deleted.
pub fn prune(
    vault: &Vault,
    guest: &str,
    labels: &[(String, String)],
    keep: &Keep,
    disks: &DiskSnapshotArgs,
) -> Result<Option<Gone>> {
    let listed = vault.list()?;
    let look = Look::at_all(&listed, &disks.server)?;
    let (_, gone) = decide(&listed, &look, (guest, labels), keep);
    if gone.is_empty() { Ok(None) } else { delete_all(vault, &gone, disks).map(Some) }
}

fn delete_all(vault: &Vault, gone: &[&Info], disks: &DiskSnapshotArgs) -> Result<Gone> {
    let ids: Vec<SnapshotId> = gone.iter().map(|info| info.id).collect();
    let states = gone.iter().flat_map(|info| info.disks.clone()).collect();
    delete(vault, &ids, gone.iter().map(|info| info.title()).collect(), states, disks)
}

/// The snapshots of a guest with these labels: those that a rule keeps, and the others. Those that are not complete are neither: a rule that
/// kept them might keep nothing that can be restored.
fn decide<'a>(
    listed: &'a [Listed],
    look: &Look,
    (guest, labels): (&str, &[(String, String)]),
    keep: &Keep,
) -> (Vec<&'a Info>, Vec<&'a Info>) {
    let infos = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
    let infos = infos.filter(|info| look.of(&info.disks) == Keeping::Complete);
    let has_labels = |info: &&Info| labels.iter().all(|label| info.labels.contains(label));
    let infos: Vec<&Info> = infos.filter(|info| info.guest == guest).filter(has_labels).collect();
    let kept = keep.decide(&infos.iter().map(|info| info.taken_ns).collect::<Vec<_>>());
    let mut kept = kept.into_iter();
    infos.into_iter().partition(|_| kept.next() == Some(true))
}
