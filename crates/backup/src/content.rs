//! What one file of a backup stores, whatever lies below it.

use std::path::Path;
use std::sync::Arc;

use vmstrata_disk::{Error, ErrorKind, Format, FrozenLayer, Resources, Result};
use vmstrata_qcow2::{Geometry, L2Entry};
use vmstrata_types::{GuestOffset, GuestRange};

use crate::REGION_BYTES;
use crate::diff::DiffKind;
use crate::fault::BackupFault;
use crate::manifest::Manifest;
use crate::plan::{Plan, Planned};
use crate::region::Region;

/// L2 tables looked at before it is checked how many there are.
const TABLES_AT_ONCE: u64 = 64;

/// How the file has a cluster.
fn kind_of(entry: L2Entry) -> DiffKind {
    if matches!(entry, L2Entry::Zero { .. }) { DiffKind::Zero } else { DiffKind::Data }
}

/// The file of a backup, open, with its manifest.
#[derive(Debug)]
pub(crate) struct Content {
    layer: FrozenLayer,
    pub(crate) plan: Plan,
    pub(crate) manifest: Manifest,
}

impl Content {
    /// Opens the file, held against writers, and reads its tables.
    ///
    /// # Errors
    /// A file that cannot be read, or is not what the manifest describes.
    pub(crate) fn open(path: &Path, manifest: Manifest, resources: &Arc<Resources>) -> Result<Self> {
        let layer = FrozenLayer::open(path, Some(Format::Qcow2), resources)?;
        let bits = layer.cluster_bits().expect("opened as qcow2");
        let differs = |what| Err(Error::from(BackupFault::Header { what }).in_file(path));
        if layer.size() != manifest.disk_bytes {
            return differs("disk size");
        }
        if bits.size() != manifest.cluster_bytes {
            return differs("cluster size");
        }
        if layer.geometry() != Some(Geometry::new(bits)) {
            return differs("kind of L2 entries");
        }
        let plan = Plan::new(bits, layer.size());
        let mut content = Self { layer, plan, manifest };
        content.read_plan().map_err(|error| error.in_file(path))?;
        Ok(content)
    }

    /// Notes which clusters the file has.
    fn read_plan(&mut self) -> Result<()> {
        let (bits, size) = (self.plan.bits(), self.size());
        let tables_max = self.layer.identity().len >> bits.get();
        let span = Geometry::new(bits).l2_span() * TABLES_AT_ONCE;
        let mut plan = Plan::new(bits, size);
        let mut at = 0;
        while at < size {
            let len = span.min(size - at);
            let mut marked = Ok(());
            self.scan(GuestRange::new(GuestOffset::new(at), len), |at, entry| {
                if marked.is_ok() {
                    marked = plan.mark(GuestRange::new(at, bits.size()), kind_of(entry));
                }
            })?;
            marked?;
            // Entries that share a table would make it as large as they like.
            if plan.table_count() as u64 > tables_max {
                return Err(BackupFault::Tables.into());
            }
            at += len;
        }
        self.plan = plan;
        Ok(())
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        self.layer.path()
    }

    /// Virtual size of the disk at that time.
    pub(crate) fn size(&self) -> u64 {
        self.layer.size()
    }

    /// Calls `visit` for each cluster in `range` that the file has, in order.
    fn scan(&self, range: GuestRange, mut visit: impl FnMut(GuestOffset, L2Entry)) -> Result<()> {
        let mut damaged = None;
        self.layer.entries(range, |at, entry| match entry {
            Ok(L2Entry::Unallocated) => {}
            Ok(entry) => visit(at, entry),
            Err(entry) => damaged = Some(ErrorKind::Entry { table: "L2 table", entry }),
        })?;
        damaged.map_or(Ok(()), |kind| Err(Error::from(kind).in_file(self.path())))
    }

    /// What the file stores in the region at `start`, compared with the manifest.
    ///
    /// # Errors
    /// What cannot be read, or is not what was stored.
    pub(crate) fn region(&self, start: GuestOffset) -> Result<Region> {
        let bits = self.plan.bits();
        let len = REGION_BYTES.min(self.size().saturating_sub(start.get()));
        let mut clusters = Vec::new();
        let mut data = Vec::new();
        let mut entries = Vec::new();
        self.scan(GuestRange::new(start, len), |at, entry| entries.push((at, entry)))?;
        for (at, entry) in entries {
            let kind = kind_of(entry);
            clusters.push(Planned { at, kind });
            if kind == DiffKind::Data {
                let from = data.len();
                data.resize(from + bits.size() as usize, 0);
                self.layer.read_cluster(at, entry, &mut data[from..])?;
            }
        }
        let region = Region::new(clusters, data, bits);
        if region.sum().map(|sum| sum.sha256) != self.manifest.region(start.get()) {
            return Err(Error::from(BackupFault::RegionSum { start }).in_file(self.path()));
        }
        Ok(region)
    }

    /// The regions that the file or its manifest names, sorted.
    pub(crate) fn regions(&self) -> Vec<u64> {
        let planned = self.plan.regions().map(|region| region[0].at.get() / REGION_BYTES * REGION_BYTES);
        let mut starts: Vec<u64> =
            planned.chain(self.manifest.regions.iter().map(|region| region.start)).collect();
        starts.sort_unstable();
        starts.dedup();
        starts
    }
}
