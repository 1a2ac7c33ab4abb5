//! `vmstrata rebase`: has a disk stand on another version of its base.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use vmstrata_api::{DiskDetail, JobSpec, encode_segment};
use vmstrata_backup::{Rebase, RebaseOptions, rebased_from};
use vmstrata_disk::snapshot::state_of;
use vmstrata_disk::{Disk, Format, OpenOptions, Resources, copy_access, directory_of, unfinished_copy};
use vmstrata_tier::{BaseState, PinId, Place, rebase, release_clone, repository_of};
use vmstrata_types::{path_from_text, path_to_text};

use super::backup::watched;
use super::snapshot::live::Live;
use super::snapshot::resources;
use super::tiered::{address_of, split};
use crate::args::RebaseArgs;
use crate::audit;
use crate::output::answer;
use crate::units::short_size;

/// What was done, or would be.
#[derive(Debug, Serialize)]
struct Report {
    disk: String,
    onto: String,
    /// Bytes that the disk stores beside its base.
    stored_bytes: u64,
    /// Those that its file took before; of a tiered disk, the file of this host that took its writes.
    allocated_bytes_before: u64,
    is_dry_run: bool,
}

impl Report {
    fn text(&self) -> String {
        let Self { disk, onto, stored_bytes, allocated_bytes_before, is_dry_run } = self;
        let [stored, before] = [*stored_bytes, *allocated_bytes_before].map(short_size);
        let would = if *is_dry_run { "would stand" } else { "stands" };
        format!("{disk}: {would} on {onto}, and stores {stored} of its own ({before} before)\n")
    }
}

/// Runs the command.
///
/// # Errors
/// What could not be done; the disk is then as it was.
pub fn run(args: &RebaseArgs) -> Result<ExitCode> {
    let report = match Live::find(slice::from_ref(&args.disk), &args.access.server)? {
        Some(live) => rebase_served(args, &live)?,
        None => rebase_file(args)?,
    };
    answer(args.access.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

/// Its server does it, while the guest goes on.
fn rebase_served(args: &RebaseArgs, live: &Live) -> Result<Report> {
    ensure!(
        !args.no_subclusters,
        "{}: is served: its key subclusters says how its overlays are made",
        args.disk.display()
    );
    let (base, version) = named(args)?;
    let onto = match address_of(base)? {
        Some(_) => path_to_text(&args.onto),
        None => path_to_text(&state_of(&std::path::absolute(base)?, version)),
    };
    let disk = live.name().to_owned();
    let served: DiskDetail = live.client().get(&format!("/v1/disks/{}", encode_segment(&disk)))?;
    let written = served.chain.last().with_context(|| format!("{disk}: has no layers"))?;
    let allocated_bytes_before = allocated(&path_from_text(&written.path))?;
    let asked = JobSpec::Rebase { disk, onto, dry_run: args.dry_run, bytes_per_second: None };
    let job = live.wait_job(&asked, args.access.quiet || args.access.json)?;
    Ok(Report {
        disk: path_to_text(&args.disk),
        onto: path_to_text(&args.onto),
        stored_bytes: job.differing_bytes.unwrap_or_default(),
        allocated_bytes_before,
        is_dry_run: args.dry_run,
    })
}

fn rebase_file(args: &RebaseArgs) -> Result<Report> {
    let (base, _) = named(args)?;
    ensure!(
        address_of(base)?.is_none(),
        "{}: its layers are no files: serve the disk with its keys replica and repository, and run this again",
        base.display()
    );
    let disk = args.disk.canonicalize().with_context(|| args.disk.display().to_string())?;
    let resources = resources(&args.access.journal)?;
    let own = Own { args, disk: &disk, resources: &resources };
    if let Some(tier) = &args.tier {
        return own.rebase_tiered(&Place::of(&disk, tier)?);
    }
    ensure!(
        !repository_of(&disk).exists(),
        "{}: is a tiered disk: say with --tier where this host keeps its copy",
        args.disk.display()
    );
    let below = own.check()?;
    let target = BaseState::find(&args.onto, &below)?;
    if args.dry_run {
        let before = allocated(&disk)?;
        let stored = own.run(Rebase::foresee((&disk, target.layer()), &own.options(), &resources)?)?;
        return Ok(own.report(&target, before, stored));
    }
    let onto = path_to_text(&args.onto);
    audit::change(audit::of("rebase", [&args.disk]).object(onto), |_| own.rebase(&target, &below))
}

/// The base and its version.
fn named(args: &RebaseArgs) -> Result<(&Path, &str)> {
    split(&args.onto).with_context(|| format!("{}: say BASE@VERSION", args.onto.display()))
}

fn allocated(disk: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    Ok(disk.metadata()?.blocks() * 512)
}

/// The disk.
struct Own<'a> {
    args: &'a RebaseArgs,
    disk: &'a Path,
    resources: &'a Arc<Resources>,
}

impl Own<'_> {
    fn open_options(&self, read_only: bool) -> OpenOptions {
        let allow_backing = self.args.access.backing.allow_backing.clone();
        OpenOptions { read_only, allow_backing, format: Some(Format::Qcow2), ..OpenOptions::default() }
    }

    /// Takes up what a killed server had not flushed: it belongs to the disk.
    fn with_unflushed(&self) -> OpenOptions {
        OpenOptions { unflushed: self.args.access.journal.unflushed(), ..self.open_options(false) }
    }

    fn options(&self) -> RebaseOptions {
        let allow_backing = self.args.access.backing.allow_backing.clone();
        let no_subclusters = self.args.no_subclusters;
        RebaseOptions { allow_backing, no_subclusters, ..RebaseOptions::default() }
    }

    fn run(&self, rebase: Rebase) -> Result<u64> {
        let what = if self.args.dry_run { "comparing" } else { "rebasing" };
        watched(what, self.args.access.quiet || self.args.access.json, |watch| Ok(rebase.run(watch)?))
    }

    /// Returns the published layer below the disk. Refuses a disk with content that a rebase would drop.
    fn check(&self) -> Result<PathBuf> {
        Ok(rebased_from(self.disk, &self.open_options(true))?)
    }

    fn report(&self, target: &BaseState, allocated_bytes_before: u64, stored_bytes: u64) -> Report {
        Report {
            disk: path_to_text(&self.args.disk),
            onto: path_to_text(target.layer()),
            stored_bytes,
            allocated_bytes_before,
            is_dry_run: self.args.dry_run,
        }
    }

    fn rebase(&self, target: &BaseState, below: &Path) -> Result<Report> {
        // No other process may have it open for writing.
        Disk::open(self.disk, &self.with_unflushed(), self.resources)?.close()?;
        let held = Disk::open(self.disk, &self.open_options(true), self.resources)?;
        let draft = unfinished_copy(self.disk);
        remove_if_there(&draft)?;
        let pin = target.keep_for(self.disk, PinId::draw())?;
        let states = (self.disk, target.layer());
        let made = Rebase::begin(states, &draft, &self.options(), self.resources);
        let made = made.map_err(Into::into).and_then(|rebase| self.run(rebase));
        let report = made.and_then(|bytes| Ok(self.report(target, allocated(self.disk)?, bytes)));
        let placed = report.and_then(|report| {
            let file = File::options().write(true).open(&draft)?;
            copy_access(self.disk, &file)?;
            file.sync_all()?;
            fs::rename(&draft, self.disk)?;
            Ok(report)
        });
        if placed.is_err() {
            remove_if_there(&draft)?;
            target.release(&pin)?;
        }
        let report = placed?;
        File::open(directory_of(self.disk))?.sync_all()?;
        drop(held);
        release_clone(self.disk, (below, None), |other| other.id != pin.id)?;
        Ok(report)
    }

    fn rebase_tiered(&self, place: &Place) -> Result<Report> {
        let target = BaseState::find_shared(&self.args.onto)?;
        let mut options = self.options();
        options.allow_backing.extend([&place.local, &place.repository].map(Clone::clone));
        let disk = place.disk();
        let before = allocated(&disk)?;
        if self.args.dry_run {
            let rebase = Rebase::foresee((&disk, target.layer()), &options, self.resources)?;
            return Ok(self.report(&target, before, self.run(rebase)?));
        }
        let onto = path_to_text(&self.args.onto);
        audit::change(audit::of("rebase", [&self.args.disk]).object(onto), |_| {
            let mut stored_bytes = 0;
            rebase(place, target.layer(), &self.with_unflushed(), self.resources, |draft| -> Result<()> {
                let states = (draft.disk, draft.onto);
                stored_bytes = self.run(Rebase::begin(states, draft.path, &options, self.resources)?)?;
                Ok(())
            })?;
            Ok(self.report(&target, before, stored_bytes))
        })
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}: cannot be removed", path.display()))
        }
        _ => Ok(()),
    }
}
