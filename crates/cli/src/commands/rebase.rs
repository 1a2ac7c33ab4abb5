//! `vmstrata rebase`: has a disk stand on another version of its base.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use vmstrata_backup::{RebaseOptions, foresee_rebase, rebase};
use vmstrata_disk::{
    Disk, Format, OpenOptions, Resources, copy_access, directory_of, is_published, probe_chain,
    unfinished_copy,
};
use vmstrata_repo::Repository;
use vmstrata_tier::{Pin, Purpose};
use vmstrata_types::path_to_text;

use super::backup::watched;
use super::snapshot::live::Live;
use super::snapshot::resources;
use super::tiered::{pin_of, reader_of, repository_in, split, tiered};
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
    /// Those that its file took before.
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
    if let Some(live) = Live::find(slice::from_ref(&args.disk), &args.access.server)? {
        bail!(
            "{}: a server has it: end its guest, and `vmstrata disk remove {}` first",
            args.disk.display(),
            live.name()
        );
    }
    let disk = args.disk.canonicalize().with_context(|| args.disk.display().to_string())?;
    let target = Target::find(&args.onto)?;
    let resources = resources(&args.access.journal)?;
    let own = Own { args, disk: &disk, resources: &resources };
    let below = own.check()?;
    let report = if args.dry_run {
        own.report(&target, own.foresee(&target)?)?
    } else {
        let onto = path_to_text(&args.onto);
        audit::change(audit::of("rebase", [&args.disk]).object(onto), |_| own.rebase(&target, &below))?
    };
    answer(args.access.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

/// The state that the disk is to stand on.
struct Target {
    repository: Arc<dyn Repository>,
    pin: Pin,
    layer: PathBuf,
}

impl Target {
    fn find(onto: &Path) -> Result<Self> {
        let (base, name) = split(onto).with_context(|| format!("{}: say BASE@VERSION", onto.display()))?;
        let found = tiered(base)?;
        found.refuse_elsewhere("`rebase` works")?;
        let pin = pin_of(&found, base, name)?;
        let layer = std::path::absolute(found.top_of(found.state_of(&pin.epoch)?))?;
        Ok(Self { repository: found.repository, pin, layer })
    }
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

    fn options(&self) -> RebaseOptions {
        let allow_backing = self.args.access.backing.allow_backing.clone();
        RebaseOptions { allow_backing, no_subclusters: self.args.no_subclusters }
    }

    /// Refuses a disk of which something would be lost. Returns the layer that it stands on.
    fn check(&self) -> Result<PathBuf> {
        let chain = probe_chain(self.disk, &self.open_options(true))?;
        let (top, below) = chain.split_last().expect("a chain has a layer");
        let path = self.args.disk.display();
        let newest = below.last().filter(|layer| is_published(&layer.path));
        let newest = newest.with_context(|| {
            format!("{path}: it does not stand on a published layer itself: it has snapshots of its own, or is no clone of a tiered disk's snapshot")
        })?;
        ensure!(top.snapshots.is_empty(), "{path}: it has internal snapshots, which would be lost");
        ensure!(top.bitmaps.is_empty(), "{path}: it has bitmaps, which would be lost");
        Ok(newest.path.clone())
    }

    fn foresee(&self, target: &Target) -> Result<u64> {
        watched("comparing", self.args.access.quiet || self.args.access.json, |watch| {
            Ok(foresee_rebase((self.disk, &target.layer), &self.options(), self.resources, watch)?)
        })
    }

    fn report(&self, target: &Target, stored_bytes: u64) -> Result<Report> {
        use std::os::unix::fs::MetadataExt as _;
        Ok(Report {
            disk: path_to_text(&self.args.disk),
            onto: path_to_text(&target.layer),
            stored_bytes,
            allocated_bytes_before: self.disk.metadata()?.blocks() * 512,
            is_dry_run: self.args.dry_run,
        })
    }

    fn rebase(&self, target: &Target, below: &Path) -> Result<Report> {
        // What a server that was killed had not flushed belongs to it; and no other process may have it open for writing.
        let open =
            OpenOptions { unflushed: self.args.access.journal.unflushed(), ..self.open_options(false) };
        Disk::open(self.disk, &open, self.resources)?.close()?;
        let held = Disk::open(self.disk, &self.open_options(true), self.resources)?;
        let draft = unfinished_copy(self.disk);
        remove_if_there(&draft)?;
        let pin = target.pin.again(&*target.repository, &reader_of(self.disk))?;
        let made = watched("rebasing", self.args.access.quiet || self.args.access.json, |watch| {
            Ok(rebase((self.disk, &target.layer), &draft, &self.options(), self.resources, watch)?)
        });
        let report = made.and_then(|bytes| self.report(target, bytes));
        let placed = report.and_then(|report| {
            let file = File::options().write(true).open(&draft)?;
            copy_access(self.disk, &file)?;
            file.sync_all()?;
            fs::rename(&draft, self.disk)?;
            Ok(report)
        });
        if placed.is_err() {
            remove_if_there(&draft)?;
            pin.release(&*target.repository)?;
        }
        let report = placed?;
        File::open(directory_of(self.disk))?.sync_all()?;
        drop(held);
        self.release(below, &pin)?;
        Ok(report)
    }

    /// Lets go of the state that the disk stood on before.
    fn release(&self, below: &Path, new: &Pin) -> Result<()> {
        let Some(directory) = below.parent() else { return Ok(()) };
        let found = repository_in(directory)?;
        let Purpose::Reader(who) = reader_of(self.disk) else { return Ok(()) };
        // The clone may have been made on another host.
        let is_own = |pin: &Pin| match &pin.purpose {
            Purpose::Reader(other) => {
                other.rsplit_once(" at ").map(|(of, _)| of) == who.rsplit_once(" at ").map(|(of, _)| of)
            }
            _ => false,
        };
        let old = Pin::all(&*found)?.into_iter().filter(|pin| pin.id != new.id && is_own(pin));
        old.into_iter().try_for_each(|pin| Ok(pin.release(&*found)?))
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
