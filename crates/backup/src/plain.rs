//! An uncompressed backup, written from front to back, so that a pipe takes it as well as a file.
//!
//! ```text
//!   header │ refcount table, blocks │ L1 table │ L2 tables │ data clusters, in the order of the disk
//! ```
//!
//! Which clusters there are is known beforehand, so all tables can come first; the bytes of data clusters follow
//! without any more to say about them.

use vmstrata_disk::Result;
use vmstrata_qcow2::create::{Places, Refcounts};
use vmstrata_qcow2::{EntryFormat, L1Entry, L2Entry};
use vmstrata_types::HostOffset;

use crate::diff::DiffKind;
use crate::head::{Shape, first_cluster, refcounts};
use crate::plan::Plan;
use crate::target::Output;

/// Bytes of an entry of an L1 or L2 table.
const ENTRY: u64 = 8;

/// In clusters from the beginning of the file.
struct Layout {
    refcounts: Refcounts,
    l1: u64,
    l2: u64,
    data: u64,
    end: u64,
}

impl Layout {
    fn of(plan: &Plan) -> Self {
        let bits = plan.bits();
        let l1_entries = vmstrata_qcow2::Geometry::new(bits).l1_entries(plan.size());
        let l1_clusters = (l1_entries * ENTRY).div_ceil(bits.size());
        let tables = plan.table_count() as u64;
        let refcounts = refcounts(bits, 1, 1 + l1_clusters + tables + plan.data_clusters());
        let l1 = 1 + refcounts.clusters();
        let l2 = l1 + l1_clusters;
        let data = l2 + tables;
        Self { refcounts, l1, l2, data, end: data + plan.data_clusters() }
    }
}

/// Writes everything but the data clusters, which must follow.
///
/// # Errors
/// A shape that the format does not allow; whatever the host reports.
pub(crate) fn write_tables(plan: &Plan, shape: &Shape, out: &mut Output<'_>) -> Result<()> {
    let (bits, layout) = (shape.bits, Layout::of(plan));
    let at = |cluster: u64| HostOffset::new(cluster << bits.get());
    out.put(&first_cluster(shape, &Places { l1: at(layout.l1), refcounts: layout.refcounts })?)?;
    for cluster in layout.refcounts.bytes(bits, |cluster| u64::from(cluster < layout.end)) {
        out.put(&cluster)?;
    }
    let entries = EntryFormat::new(3, bits);
    let mut l1 = vec![0; usize::try_from((layout.l2 - layout.l1) << bits.get()).expect("at most 32 MiB")];
    for (number, (l1_index, _)) in plan.tables().enumerate() {
        let table = Some(at(layout.l2 + number as u64));
        let entry = entries.encode_l1(L1Entry { table, copied: true });
        l1[l1_index * 8..l1_index * 8 + 8].copy_from_slice(&entry.to_be_bytes());
    }
    out.put(&l1)?;
    let geometry = vmstrata_qcow2::Geometry::new(bits);
    let mut data = layout.data;
    for (_, clusters) in plan.tables() {
        let mut table = vec![0; bits.size() as usize];
        for cluster in clusters {
            let entry = match cluster.kind {
                DiffKind::Zero => L2Entry::Zero { host: None, copied: false },
                DiffKind::Data => {
                    data += 1;
                    L2Entry::Data { host: at(data - 1), copied: true }
                }
            };
            let index = geometry.l2_index(cluster.at) * 8;
            table[index..index + 8].copy_from_slice(&entries.encode_l2(entry).word.to_be_bytes());
        }
        out.put(&table)?;
    }
    assert_eq!(data, layout.end, "as many data clusters as were counted");
    Ok(())
}
