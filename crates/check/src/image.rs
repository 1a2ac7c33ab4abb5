//! The image under check: its store, its header, and what is needed to find everything else.
//!
//! Unlike opening a disk, a check wants to see a file that was cut short: tables that the header puts past the
//! end of the file read as zeros here, and are found out when their clusters are counted.

use vmstrata_qcow2::bitmap::BitmapsExtension;
use vmstrata_qcow2::entry::HOST_OFFSET_LIMIT;
use vmstrata_qcow2::{Autoclear, Header, ParseError, ParseErrorKind};
use vmstrata_store::Store;
use vmstrata_types::{ClusterBits, HostOffset};

use crate::counts::{Counts, Use};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::finding::FindingKind;
use crate::report::Tally;
use crate::{Options, Phase, Progress};

/// Most clusters of a file that can be checked; QEMU's limit too.
pub(crate) const CLUSTERS_MAX: u64 = i32::MAX as u64;
const PROBE: u64 = 4096;

/// An image file with its parsed header.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) options: &'a Options,
    pub(crate) file_len: u64,
    pub(crate) header: Header,
    /// `None` also where the image says that its bitmaps are out of date: they hold nothing then.
    pub(crate) bitmaps: Option<Result<BitmapsExtension, ParseError>>,
}

impl<'a> Image<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// Not a qcow2 image, or one whose header no one could use; more clusters than [`CLUSTERS_MAX`].
    pub(crate) fn read(store: &'a dyn Store, options: &'a Options) -> Result<Self> {
        let file_len = store.len().while_trying("read the length of the file")?;
        let mut bytes = vec![0; file_len.min(PROBE) as usize];
        store.read_exact(&mut bytes, HostOffset::ZERO).while_trying("read the header")?;
        let header = parse_header(&bytes, file_len)?;
        let mut first_cluster = vec![0; header.cluster_bits.size() as usize];
        store.read_padded(&mut first_cluster, HostOffset::ZERO).while_trying("read the header")?;
        let extensions = header.extensions(&first_cluster)?;
        let bitmaps = extensions.bitmaps().filter(|_| header.autoclear.contains(Autoclear::BITMAPS));
        let lenient = file_len.saturating_add(header.cluster_bits.size() - 1);
        let bitmaps = bitmaps
            .map(|data| BitmapsExtension::parse(data, u64::from(header.header_length), &header, lenient));
        let clusters = file_len.div_ceil(header.cluster_bits.size());
        if clusters > CLUSTERS_MAX {
            return Err(ErrorKind::TooLarge { clusters, max: CLUSTERS_MAX }.into());
        }
        Ok(Self { store, options, file_len, header, bitmaps })
    }

    pub(crate) fn bits(&self) -> ClusterBits {
        self.header.cluster_bits
    }

    /// Clusters of the file, the last one perhaps not whole.
    pub(crate) fn clusters(&self) -> u64 {
        self.file_len.div_ceil(self.bits().size())
    }

    /// Counters for every cluster that [`Image::count`] may count.
    pub(crate) fn new_counts(&self) -> Counts {
        // One more than the file has: the last structure may end in a cluster that the file does not reach.
        Counts::new(self.clusters() + 1, self.options.memory_bytes_max)
    }

    /// Counts `weight` references to every cluster of a structure; false when it lies past the end of the file.
    ///
    /// The last cluster of an image need not be whole, so up to a cluster less a byte may be missing.
    pub(crate) fn count(&self, counts: &Counts, region: Region, weight: u64, what: Use) -> bool {
        let end = region.start.get().saturating_add(region.len);
        if end >= self.file_len.saturating_add(self.bits().size()) {
            return false;
        }
        if region.len > 0 {
            let last = (end - 1) >> self.bits().get();
            (region.start.get() >> self.bits().get()..=last)
                .for_each(|cluster| counts.add(cluster, weight, what));
        }
        true
    }

    /// Counts one reference to a structure that shares its clusters with nothing; notes when it lies past the end.
    pub(crate) fn count_exclusive(
        &self,
        counts: &Counts,
        tally: &mut Tally,
        region: Region,
        what: &'static str,
    ) {
        if !self.count(counts, region, 1, Use::Exclusive) {
            let (start, len) = (region.start, region.len);
            tally.add(start, FindingKind::PastEnd { what, start, len });
        }
    }

    /// An empty tally that keeps as many findings as were asked for.
    pub(crate) fn new_tally(&self) -> Tally {
        Tally::new(self.options.findings_max)
    }

    pub(crate) fn report_progress(&self, phase: Phase, done: u64, total: u64) {
        if let Some(progress) = &self.options.progress {
            progress(Progress { phase, done, total });
        }
    }

    /// Whether nothing but zeros can be read in `start..start + len`: a hole, or past the end.
    pub(crate) fn is_hole(&self, start: HostOffset, len: u64) -> Result<bool> {
        if start.get() >= self.file_len {
            return Ok(true);
        }
        let (is_data, end) = self.store.extent(start).while_trying("look for holes")?;
        Ok(!is_data && end.get() >= start.get().saturating_add(len).min(self.file_len))
    }
}

/// Bytes of a structure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) start: HostOffset,
    pub(crate) len: u64,
}

/// Parses a header, also where tables lie past the end of the file.
fn parse_header(bytes: &[u8], file_len: u64) -> Result<Header> {
    let strict = Header::parse(bytes, file_len);
    let Err(error) = &strict else { return Ok(strict?) };
    if !matches!(error.kind, ParseErrorKind::PastEndOfFile { .. }) {
        return Ok(strict?);
    }
    let header = Header::parse(bytes, u64::MAX)?;
    let offsets = [header.l1_table_offset, header.refcount_table_offset, header.snapshots_offset];
    if offsets.iter().any(|offset| offset.get() >= HOST_OFFSET_LIMIT) { Ok(strict?) } else { Ok(header) }
}
