//! `vmstrata base`: versions of a disk that others stand on.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use vmstrata_disk::snapshot::{SnapshotInfo, is_snapshot_name, now_ns};
use vmstrata_disk::{Disk, OpenOptions, Resources, Shrink};
use vmstrata_store::{Segment, is_zero};
use vmstrata_tier::{Pin, Place, Purpose, TierOptions, Tiered, forget, snapshots, snapshots_of};
use vmstrata_types::{GuestOffset, GuestRange, path_to_text, time};

use super::backup::watched;
use super::snapshot::live::Live;
use super::snapshot::resources;
use super::tiered::{Found, repository_at, tiered};
use crate::args::{BaseArgs, BaseCommand, BaseListArgs, BasePublishArgs, BaseRetireArgs};
use crate::audit;
use crate::disk_spec::format_by_name;
use crate::output::{Table, answer};
use crate::units::short_size;

/// Bytes that are compared at a time.
const PIECE: u64 = 2 << 20;
/// What differs in a byte is written as a whole.
const BLOCK: usize = 4096;
/// How long a repository may take for a version.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Runs the command.
///
/// # Errors
/// What could not be done.
pub fn run(args: &BaseArgs) -> Result<ExitCode> {
    match &args.command {
        BaseCommand::Publish(args) => publish(args)?,
        BaseCommand::List(args) => list(args)?,
        BaseCommand::Retire(args) => retire(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Published {
    base: String,
    version: String,
    /// Bytes in which it differs from what the base held before.
    written_bytes: u64,
}

fn publish(args: &BasePublishArgs) -> Result<()> {
    let path = args.base.display();
    ensure!(is_snapshot_name(&args.version), "'{}' is no name of a version", args.version);
    if let Some(live) = Live::find(slice::from_ref(&args.base), &args.access.server)? {
        let (name, version) = (live.name(), &args.version);
        bail!(
            "{path}: a server has it: `vmstrata snapshot create {name} --name {version}` publishes what its guest has written"
        );
    }
    match repository_at(&args.base)? {
        None if args.from.is_some() => {
            bail!("{path}: publish the first version without --from: it is what the image holds")
        }
        Some(found) => {
            ensure!(
                found.is_directory,
                "{path}: serve it with its keys tier and repository: `vmstrata snapshot create` then publishes a version"
            );
            let is_there = |(info, _): &(SnapshotInfo, Pin)| info.name == args.version;
            ensure!(
                !snapshots(&*found.repository)?.iter().any(is_there),
                "{path}: has a version '{}' already",
                args.version
            );
        }
        None => {}
    }
    let resources = resources(&args.access.journal)?;
    let tier = std::path::absolute(&args.tier)?;
    let what = audit::of("base_publish", [&args.base]).object(&args.version);
    let written_bytes = audit::change(what, |_| {
        let place = Place::of(&args.base, &tier)?;
        let (disks, tiered) =
            Tiered::open(&place, TierOptions::default(), &[OpenOptions::default()], &resources)?;
        let published = publish_open(args, &disks[0], &tiered, &resources);
        // Whatever came of it, nothing is left open.
        tiered.stop(Instant::now() + PATIENCE);
        let closed = disks[0].close();
        let written = published?;
        closed?;
        Ok(written)
    })?;
    let published =
        Published { base: path_to_text(&args.base), version: args.version.clone(), written_bytes };
    answer(args.access.json, &published, || {
        let Published { base, version, written_bytes } = &published;
        format!(
            "{base}@{version}: published, {} differ from before\na disk that stands on it: vmstrata snapshot clone {base}@{version} -o FILE\n",
            short_size(*written_bytes)
        )
    })
}

fn publish_open(
    args: &BasePublishArgs,
    base: &Arc<Disk>,
    tiered: &Tiered,
    resources: &Arc<Resources>,
) -> Result<u64> {
    let mut written = 0;
    if let Some(from) = &args.from {
        let format = args.format.unwrap_or_else(|| format_by_name(from));
        let allow_backing = args.access.backing.allow_backing.clone();
        let open =
            OpenOptions { read_only: true, allow_backing, format: Some(format), ..OpenOptions::default() };
        let image = Disk::open(from, &open, resources)?;
        written =
            watched("comparing", args.access.quiet || args.access.json, |watch| take(&image, base, watch))?;
    }
    let info = SnapshotInfo { name: args.version.clone(), taken_ns: now_ns(), ..SnapshotInfo::default() };
    tiered.snapshot(&info, Instant::now() + PATIENCE, || {})?;
    Ok(written)
}

/// Has the base hold what an image holds. Returns the bytes that were written for that.
fn take(image: &Disk, base: &Disk, watch: &mut dyn FnMut(u64, u64) -> bool) -> Result<u64> {
    let size = image.size();
    if size != base.size() {
        base.resize(size, Shrink::Allow)?;
    }
    let (mut new, mut old) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
    let mut written = 0;
    for at in (0..size).step_by(PIECE as usize) {
        let len = (size - at).min(PIECE) as usize;
        let start = GuestOffset::new(at);
        image.read(start, &[Segment::from_mut(&mut new[..len])])?;
        base.read(start, &[Segment::from_mut(&mut old[..len])])?;
        let blocks: Vec<(usize, bool)> = (0..len)
            .step_by(BLOCK)
            .map(|at| (at, new[at..len.min(at + BLOCK)] != old[at..len.min(at + BLOCK)]))
            .collect();
        for run in blocks.chunk_by(|one, next| one.1 == next.1).filter(|run| run[0].1) {
            let run = run[0].0..len.min(run[run.len() - 1].0 + BLOCK);
            let range = GuestRange::new(start + run.start as u64, run.len() as u64);
            let bytes = &mut new[run];
            if is_zero(bytes) {
                base.write_zeroes(range, true)?;
            } else {
                base.write(range.start, &[Segment::from_mut(bytes)])?;
                written += range.len;
            }
        }
        ensure!(watch(at + len as u64, size), "stopped before it was done: nothing is published");
    }
    base.flush()?;
    Ok(written)
}

#[derive(Debug, Serialize)]
struct Listed {
    base: String,
    versions: Vec<Version>,
}

#[derive(Debug, Serialize)]
struct Version {
    version: String,
    time: String,
    virtual_size: u64,
    /// Bytes of its layers that no version before it has.
    added_bytes: u64,
    /// Who stands on it.
    disks: Vec<String>,
}

/// The versions, oldest first.
fn versions(base: &Path) -> Result<(Found, Vec<Version>)> {
    let found = tiered(base)?;
    let pins = Pin::all(&*found.repository)?;
    let mut known = HashSet::new();
    let mut versions = Vec::new();
    for (info, pin) in snapshots_of(pins.clone()) {
        let state = found.state_of(&pin.epoch)?;
        let added = state.objects.iter().filter(|object| known.insert(object.id)).map(|object| object.stored);
        let stands = |other: &Pin| match &other.purpose {
            Purpose::Reader(who) if other.epoch.number == pin.epoch.number => {
                Some(who.strip_prefix("clone ").unwrap_or(who).to_owned())
            }
            _ => None,
        };
        versions.push(Version {
            version: info.name.clone(),
            time: time::rfc3339(info.taken_ns),
            virtual_size: state.size,
            added_bytes: added.sum(),
            disks: pins.iter().filter_map(stands).collect(),
        });
    }
    Ok((found, versions))
}

fn list(args: &BaseListArgs) -> Result<()> {
    let (_, versions) = versions(&args.base)?;
    let listed = Listed { base: path_to_text(&args.base), versions };
    answer(args.json, &listed, || {
        if listed.versions.is_empty() {
            return format!("{}: no versions\n", listed.base);
        }
        let mut table = Table::new(["VERSION", "PUBLISHED", ">SIZE", ">ADDS", ">DISKS"]);
        for Version { version, time, virtual_size, added_bytes, disks } in &listed.versions {
            let [size, added] = [*virtual_size, *added_bytes].map(short_size);
            table.row([version.clone(), time.clone(), size, added, disks.len().to_string()]);
        }
        table.to_string()
    })
}

fn retire(args: &BaseRetireArgs) -> Result<()> {
    let (path, name) = (args.base.display(), &args.version);
    let (found, versions) = versions(&args.base)?;
    let version = versions.into_iter().find(|version| version.version == *name);
    let version = version.with_context(|| format!("{path}: no version '{name}'"))?;
    if !args.yes {
        let stands = match &version.disks[..] {
            [] => {
                "nothing stands on it, and its layers are deleted unless other versions have them".to_owned()
            }
            disks => format!("{} keep it: {}", disks.len(), disks.join(", ")),
        };
        bail!("{path}@{name}: no disk can be cloned from it any more; {stands}: add --yes");
    }
    audit::change(audit::of("base_retire", [&args.base]).object(name), |_| {
        Ok(forget(&*found.repository, name)?)
    })?;
    answer(args.json, &version, || format!("{path}@{name}: retired; {} disks keep it\n", version.disks.len()))
}
