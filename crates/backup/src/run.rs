//! Making a backup.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use vmstrata_disk::create::{refuse_existing, reserve};
use vmstrata_disk::{AtomicFile, Disk, OpenOptions, Resources, Result, snapshot};
use vmstrata_types::{GuestOffset, GuestRange};

use crate::REGION_BYTES;
use crate::before::{check_previous, check_target, link};
use crate::coming::Coming;
use crate::diff::{Diff, DiffKind, DiffOptions};
use crate::fault::BackupFault;
use crate::head::{Shape, cluster_bits};
use crate::manifest::{FileSum, Link, Manifest, REGIONS_MAX, RegionSum, State, manifest_path};
use crate::packed::{PackedFile, PackedRegion};
use crate::pipeline::{Crew, in_order};
use crate::plain::write_tables;
use crate::plan::{Plan, Planned};
use crate::region::Region;
use crate::target::{Output, sum_of};
use crate::{BackupOptions, BackupReport, BackupTarget, Watch};

/// Runs of allocation asked for at a time.
const BATCH: usize = 4096;
/// Bytes of a disk looked at in one go.
const LOOK: u64 = 64 << 30;

/// Backs up a state.
///
/// # Errors
/// Options that do not go together; a previous backup of another state than the one since which changes are stored; a state
/// that cannot be read or is being written; a target that exists (unless `replace` is set) or cannot be written. A file
/// target is then unchanged.
pub fn backup(
    state: &snapshot::State,
    target: BackupTarget<'_>,
    options: &BackupOptions,
    resources: &Arc<Resources>,
    watch: Watch<'_>,
) -> Result<BackupReport> {
    let started = Instant::now();
    let link = link(options)?;
    check_target(&state.path, &target, options)?;
    let (disk, plan) = open(state, options, resources, watch)?;
    if plan.has_more_regions_than(REGIONS_MAX) {
        return Err(BackupFault::TooMuch { most: REGIONS_MAX as u64 * REGION_BYTES }.into());
    }
    let backing_name = link.as_ref().map(|link| &link.file);
    let shape = Shape::of_backup(plan.bits(), plan.size(), backing_name, options.compression);
    let state = State::of(state);
    let mut job =
        Job { disk: &disk, plan: &plan, shape: &shape, options, watch, done: 0, regions: Vec::new() };
    let manifest = match target {
        BackupTarget::Stream(stream) => {
            let file = job.write_plain(Output::stream(stream))?;
            job.describe(state, link, file)
        }
        BackupTarget::File { path, replace } => {
            job.write_file(state, link, &path, replace).map_err(|error| error.in_file(&path))?
        }
    };
    Ok(BackupReport { manifest, stored_bytes: job.done, took: started.elapsed() })
}

/// The disk in that state, and what of it to store.
fn open(
    state: &snapshot::State,
    options: &BackupOptions,
    resources: &Arc<Resources>,
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(Arc<Disk>, Plan)> {
    let allow_backing = options.allow_backing.clone();
    let open = state.open_options(OpenOptions { read_only: true, allow_backing, ..OpenOptions::default() });
    let disk = Disk::open(&state.path, &open, resources)?;
    let plan = match &options.since {
        None => plan_all(&disk, watch)?,
        Some(since) => {
            let since = since.clone().as_known_to(state, &open)?;
            plan_changes(&since, state, &disk, options, resources)?
        }
    };
    Ok((disk, plan))
}

/// Every cluster that does not read as zeros without being read.
fn plan_all(disk: &Disk, watch: &mut dyn FnMut(u64, u64) -> bool) -> Result<Plan> {
    let mut plan = Plan::new(cluster_bits(disk.cluster_bits(), disk.size()), disk.size());
    let mut rest = GuestRange::new(GuestOffset::ZERO, disk.size());
    while rest.len > 0 {
        let extents = disk.extents(GuestRange::new(rest.start, rest.len.min(LOOK)), BATCH)?;
        for extent in extents.iter().filter(|extent| !extent.kind.reads_zero()) {
            plan.mark(extent.range, DiffKind::Data)?;
        }
        let next = extents.last().expect("a range that is not empty has an extent").range.end();
        rest = GuestRange::new(next, disk.size() - next.get());
        if !watch(0, disk.size()) {
            return Err(BackupFault::Stopped.into());
        }
    }
    Ok(plan)
}

fn plan_changes(
    since: &snapshot::State,
    state: &snapshot::State,
    disk: &Disk,
    options: &BackupOptions,
    resources: &Arc<Resources>,
) -> Result<Plan> {
    let diff_options = DiffOptions {
        allow_backing: options.allow_backing.clone(),
        allocation: false,
        format: state.format,
        old_format: since.format,
    };
    let diff = Diff::open(&since.path, &state.path, &diff_options, resources)?;
    if let Some(previous) = &options.previous {
        check_previous(previous, since)?;
        if previous.disk_bytes != diff.old_size() {
            let (found, expected) = (previous.disk_bytes, diff.old_size());
            return Err(BackupFault::OtherSize { found, expected }.into());
        }
        if previous.state.is_same_snapshot(&State::of(since)).is_none() {
            tracing::warn!(state = %since.path.display(), "it is not known when this state was taken, or not of which the previous backup is: they are taken for the same by their names");
        }
    }
    let mut plan = Plan::new(cluster_bits(disk.cluster_bits(), disk.size()), disk.size());
    for extent in diff.extents() {
        let extent = extent?;
        plan.mark(extent.range, extent.kind)?;
    }
    Ok(plan)
}

/// A backup under way.
struct Job<'a> {
    disk: &'a Disk,
    plan: &'a Plan,
    shape: &'a Shape,
    options: &'a BackupOptions,
    watch: Watch<'a>,
    /// Bytes of the disk written.
    done: u64,
    regions: Vec<RegionSum>,
}

impl Job<'_> {
    /// Makes the file and its manifest, and names both when they are whole.
    fn write_file(
        &mut self,
        state: State,
        link: Option<Link>,
        path: &Path,
        replace: bool,
    ) -> Result<Manifest> {
        let (_replaced, draft) = reserve(path, replace)?;
        if !replace {
            let manifest = manifest_path(path);
            refuse_existing(&manifest).map_err(|error| error.in_file(&manifest))?;
        }
        let file = match self.options.compression {
            None => self.write_plain(Output::file(&draft.file))?,
            Some(_) => self.write_packed(&draft)?,
        };
        let manifest = self.describe(state, link, file);
        let coming = Coming::write(&manifest, path)?;
        match draft.publish(path, replace) {
            Ok(()) => coming.arrive()?,
            Err(error) => {
                coming.leave();
                return Err(error);
            }
        }
        Ok(manifest)
    }

    fn describe(&mut self, state: State, builds_on: Option<Link>, file: FileSum) -> Manifest {
        let manifest = Manifest {
            vmstrata_backup: Manifest::VERSION,
            state,
            builds_on,
            made_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            disk_bytes: self.plan.size(),
            cluster_bytes: self.plan.bits().size(),
            file,
            region_bytes: REGION_BYTES,
            regions: std::mem::take(&mut self.regions),
            sha256: crate::Digest::default(),
        };
        manifest.seal()
    }

    fn write_plain(&mut self, mut out: Output<'_>) -> Result<FileSum> {
        write_tables(self.plan, self.shape, &mut out)?;
        let (disk, bits) = (self.disk, self.shape.bits);
        let read = |clusters| {
            let region = Region::read(disk, clusters, bits)?;
            let sum = region.sum();
            Ok((region, sum))
        };
        self.run(read, |(region, sum)| {
            out.put(&region.data)?;
            Ok((region.data.len() as u64, sum))
        })?;
        out.finish()
    }

    fn write_packed(&mut self, draft: &AtomicFile) -> Result<FileSum> {
        let (disk, shape) = (self.disk, self.shape);
        let mut file = PackedFile::new(&draft.file, shape);
        let read = |clusters| PackedRegion::new(Region::read(disk, clusters, shape.bits)?, shape);
        self.run(read, |region| {
            file.put(&region)?;
            Ok((region.data_bytes(), region.sum))
        })?;
        file.finish(shape.size)?;
        sum_of(&draft.file, &[], |_| Ok(()))
    }

    /// Carries out all regions, in order.
    fn run<R: Send>(
        &mut self,
        read: impl Fn(Vec<Planned>) -> Result<R> + Sync,
        mut put: impl FnMut(R) -> Result<(u64, Option<RegionSum>)>,
    ) -> Result<()> {
        let (plan, cluster) = (self.plan, self.plan.bits().size());
        let crew = Crew::new(self.options.threads, self.options.bytes_per_second);
        let read = |clusters: Vec<Planned>| {
            let data = clusters.iter().filter(|cluster| cluster.kind == DiffKind::Data).count();
            crew.wait(data as u64 * cluster);
            read(clusters)
        };
        let total = plan.data_clusters() * cluster;
        in_order(&crew, plan.regions(), read, |region| {
            if let Some(region) = region {
                let (bytes, sum) = put(region)?;
                self.done += bytes;
                self.regions.extend(sum);
            }
            if (self.watch)(self.done.min(total), total) { Ok(()) } else { Err(BackupFault::Stopped.into()) }
        })
    }
}
