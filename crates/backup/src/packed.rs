//! An image of which shows only in the making how much it stores: clusters are compressed, or dropped when they turn out to be
//! zeros.
//!
//! ```text
//!   header │ clusters as they come, and each L2 table after its last cluster │ L1 table │ refcount table, blocks
//! ```
//!
//! How long a compressed cluster is shows when it is made, so tables follow what they are about. The header is written
//! last: a file cut off in the making is no qcow2 image.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use vmstrata_disk::{IoContext as _, Result};
use vmstrata_qcow2::create::Places;
use vmstrata_qcow2::{EntryFormat, Geometry, L1Entry, L2Entry, RawEntry};
use vmstrata_types::{GuestOffset, HostOffset};

use crate::compress::Packer;
use crate::head::{Shape, check, first_cluster, refcounts};
use crate::manifest::RegionSum;
use crate::region::Region;

/// A region, its data clusters compressed as far as that helps.
#[derive(Debug)]
pub(crate) struct PackedRegion {
    region: Region,
    /// For each data cluster, in order; `None` is stored as it is.
    packed: Vec<Option<Vec<u8>>>,
    pub(crate) sum: Option<RegionSum>,
}

impl PackedRegion {
    /// Finds zeros, compresses, and hashes.
    ///
    /// # Errors
    /// As [`Packer::new`].
    pub(crate) fn new(mut region: Region, shape: &Shape) -> Result<Self> {
        region.drop_zeros(shape.backing.is_some());
        let mut packer = shape.compression.map(Packer::new).transpose()?;
        let mut buf = vec![0; shape.bits.size() as usize];
        let mut pack = |data: &[u8]| {
            let len = packer.as_mut()?.pack(data, &mut buf)?;
            Some(buf[..len].to_vec())
        };
        let packed = region.stored().filter_map(|(_, data)| data).map(&mut pack).collect();
        let sum = region.sum();
        Ok(Self { region, packed, sum })
    }

    /// What it stores, before it was packed.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of the disk in it.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.region.data.len() as u64
    }
}

/// Writes a packed file.
pub(crate) struct PackedFile<'a> {
    file: &'a File,
    shape: Shape,
    geometry: Geometry,
    entries: EntryFormat,
    /// Refcounts of the clusters up to the end.
    counts: Vec<u16>,
    /// The part of a cluster that compressed ones have left: from where to where.
    room: (u64, u64),
    l1: Vec<u64>,
    /// The L2 table being filled.
    table: Option<(usize, Vec<RawEntry>)>,
}

impl<'a> PackedFile<'a> {
    pub(crate) fn new(file: &'a File, shape: &Shape) -> Self {
        Self {
            file,
            geometry: shape.geometry(),
            entries: shape.entries(),
            // The header's cluster.
            counts: vec![1],
            room: (0, 0),
            l1: Vec::new(),
            table: None,
            shape: shape.clone(),
        }
    }

    /// Writes the next region.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn put(&mut self, region: &PackedRegion) -> Result<()> {
        let mut packed = region.packed.iter();
        for (at, data) in region.region.stored() {
            let entry = match data {
                None => L2Entry::Zero { host: None, copied: false },
                Some(data) => match packed.next().expect("one for each data cluster") {
                    Some(packed) => {
                        let host = self.claim_packed(packed.len());
                        self.write(packed, host)?;
                        L2Entry::Compressed { host, len: packed.len() as u64 }
                    }
                    None => {
                        let host = self.claim(1);
                        self.write(data, host)?;
                        L2Entry::Data { host, copied: true }
                    }
                },
            };
            self.enter(at, entry)?;
        }
        Ok(())
    }

    /// Claims whole clusters at the end.
    pub(crate) fn claim(&mut self, clusters: usize) -> HostOffset {
        let at = HostOffset::new((self.counts.len() as u64) << self.shape.bits.get());
        self.counts.resize(self.counts.len() + clusters, 1);
        at
    }

    fn write(&self, bytes: &[u8], at: HostOffset) -> Result<()> {
        self.file.write_all_at(bytes, at.get()).while_trying("write the image")
    }

    /// Claims room for a compressed cluster where the last one ended, if it fits or the file goes on there.
    pub(crate) fn claim_packed(&mut self, len: usize) -> HostOffset {
        let (bits, len) = (self.shape.bits, len as u64);
        let (mut at, mut limit) = self.room;
        let end = (self.counts.len() as u64) << bits.get();
        if at + len > limit {
            if limit != end {
                at = end;
            }
            let missing = (at + len - end).div_ceil(bits.size());
            self.counts.resize(self.counts.len() + missing as usize, 0);
            limit = end + (missing << bits.get());
        }
        for cluster in at >> bits.get()..=(at + len - 1) >> bits.get() {
            self.counts[cluster as usize] += 1;
        }
        self.room = (at + len, limit);
        HostOffset::new(at)
    }

    /// Notes an entry; tables that are passed are written.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn enter(&mut self, at: GuestOffset, entry: L2Entry) -> Result<()> {
        let l1_index = self.geometry.l1_index(at);
        if self.table.as_ref().is_some_and(|(index, _)| *index != l1_index) {
            self.end_table()?;
        }
        let entries = self.geometry.l2_entries();
        let (_, table) = self.table.get_or_insert_with(|| (l1_index, vec![RawEntry::EMPTY; entries]));
        table[self.geometry.l2_index(at)] = self.entries.encode_l2(entry);
        Ok(())
    }

    fn end_table(&mut self) -> Result<()> {
        let Some((l1_index, table)) = self.table.take() else { return Ok(()) };
        let mut bytes = Vec::with_capacity(self.shape.bits.size() as usize);
        table.into_iter().for_each(|entry| self.entries.put_raw(entry, &mut bytes));
        let at = self.claim(1);
        self.write(&bytes, at)?;
        self.l1.resize(l1_index + 1, 0);
        self.l1[l1_index] = self.entries.encode_l1(L1Entry { table: Some(at), copied: true });
        Ok(())
    }

    /// Writes the tables that are left, and the header of a disk of `size` bytes.
    ///
    /// # Errors
    /// A shape that the format does not allow; whatever the host reports.
    pub(crate) fn finish(mut self, size: u64) -> Result<()> {
        self.shape.size = size;
        check(&self.shape)?;
        self.end_table()?;
        let bits = self.shape.bits;
        self.l1.resize(usize::try_from(self.geometry.l1_entries(size)).expect("no more than bytes"), 0);
        let l1_clusters = (self.l1.len() as u64 * 8).div_ceil(bits.size());
        let l1 = self.claim(l1_clusters as usize);
        self.write(&big_endian(&self.l1), l1)?;
        let first = self.counts.len() as u64;
        let refcounts = refcounts(bits, first, first);
        let end = first + refcounts.clusters();
        let count = |cluster: u64| match self.counts.get(cluster as usize) {
            Some(count) => u64::from(*count),
            None => u64::from(cluster < end),
        };
        for (number, bytes) in refcounts.bytes(bits, count).enumerate() {
            self.write(&bytes, HostOffset::new((first + number as u64) << bits.get()))?;
        }
        self.file.set_len(end << bits.get()).while_trying("write the image")?;
        let head = first_cluster(&self.shape, &Places { l1, refcounts })?;
        self.write(&head, HostOffset::ZERO)
    }
}

fn big_endian(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}
