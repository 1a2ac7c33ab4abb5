//! Reading compressed clusters.
//!
//! A compressed cluster is decompressed whole; the last few are kept, because guests read them a page at a time.
//! Compressed clusters are never written to: a write copies them up like any other.

use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_qcow2::{CompressionType, L2Entry, RawEntry};
use vmstrata_store::{FileIdentity, Store};
use vmstrata_types::{GuestOffset, HostOffset};

use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::Tables;

/// Bytes of decompressed clusters kept by a process.
const KEPT_BYTES: usize = 4 << 20;

/// The clusters decompressed last, of all disks.
#[derive(Debug, Default)]
pub(crate) struct ClusterCache {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Most recently used last.
    clusters: Vec<(Key, Arc<[u8]>)>,
    bytes: usize,
}

/// Names a compressed cluster: its file as it was opened, and its descriptor (compressed clusters are never
/// changed in place).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) file: FileIdentity,
    pub(crate) guest: GuestOffset,
    pub(crate) raw: RawEntry,
}

impl ClusterCache {
    /// The cluster's bytes, from memory or from `store`.
    ///
    /// # Errors
    /// A file that cannot be read, or bytes that are not a compressed cluster.
    pub(crate) fn read(&self, key: Key, store: &dyn Store, tables: &Tables) -> Result<Arc<[u8]>> {
        if let Some(cluster) = self.find(key) {
            return Ok(cluster);
        }
        let cluster: Arc<[u8]> = decompress(store, tables, key.raw)?.into();
        let mut kept = self.kept.lock();
        kept.bytes += cluster.len();
        kept.clusters.push((key, Arc::clone(&cluster)));
        while kept.bytes > KEPT_BYTES && kept.clusters.len() > 1 {
            let (_, oldest) = kept.clusters.remove(0);
            kept.bytes -= oldest.len();
        }
        Ok(cluster)
    }

    fn find(&self, key: Key) -> Option<Arc<[u8]>> {
        let mut kept = self.kept.lock();
        let place = kept.clusters.iter().rposition(|(name, _)| *name == key)?;
        let found = kept.clusters.remove(place);
        let cluster = Arc::clone(&found.1);
        kept.clusters.push(found);
        Some(cluster)
    }
}

/// Reads and decompresses the cluster whose L2 entry is `raw`.
fn decompress(store: &dyn Store, tables: &Tables, raw: RawEntry) -> Result<Vec<u8>> {
    let entry = tables.entries.l2(raw).map_err(|entry| ErrorKind::Entry { table: "L2 table", entry })?;
    let L2Entry::Compressed { host, len } = entry else { return Err(ErrorKind::Decompress.into()) };
    let mut packed = vec![0; usize::try_from(len).expect("at most two clusters")];
    // The descriptor counts whole sectors; the last one may not be in the file.
    store.read_padded(&mut packed, host).while_trying("read a compressed cluster").map_err(|e| e.at(host))?;
    let mut cluster = vec![0; usize::try_from(tables.geometry.cluster_bits.size()).expect("at most 2 MiB")];
    let whole = match tables.compression {
        CompressionType::Zlib => inflate(&packed, &mut cluster),
        CompressionType::Zstd => unpack_zstd(&packed, &mut cluster),
    };
    if whole { Ok(cluster) } else { Err(damaged(host)) }
}

fn damaged(host: HostOffset) -> crate::Error {
    crate::Error::from(ErrorKind::Decompress).at(host)
}

/// Raw deflate; true if it gave a whole cluster. Bytes after the stream are padding.
fn inflate(packed: &[u8], cluster: &mut [u8]) -> bool {
    let mut stream = flate2::Decompress::new(false);
    let done = stream.decompress(packed, cluster, flate2::FlushDecompress::Finish);
    done.is_ok() && stream.total_out() == cluster.len() as u64
}

/// One or more zstd frames; true if they gave a whole cluster. Bytes after that are padding.
fn unpack_zstd(packed: &[u8], cluster: &mut [u8]) -> bool {
    use zstd::stream::raw::{Decoder, Operation as _};
    let Ok(mut decoder) = Decoder::new() else { return false };
    let (mut read, mut written) = (0, 0);
    while written < cluster.len() && read < packed.len() {
        let Ok(status) = decoder.run_on_buffers(&packed[read..], &mut cluster[written..]) else {
            return false;
        };
        if status.bytes_read == 0 && status.bytes_written == 0 {
            return false;
        }
        read += status.bytes_read;
        written += status.bytes_written;
    }
    written == cluster.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deflate_with_padding_gives_the_cluster_and_damage_gives_none() {
        let plain: Vec<u8> = (0..4096u32).map(|byte| (byte / 7) as u8).collect();
        let mut stream = flate2::Compress::new(flate2::Compression::default(), false);
        let mut packed = Vec::with_capacity(8192);
        stream.compress_vec(&plain, &mut packed, flate2::FlushCompress::Finish).unwrap();
        packed.resize(packed.len() + 100, 0xAA);
        let mut cluster = vec![0; 4096];
        assert!(inflate(&packed, &mut cluster) && cluster == plain);
        assert!(!inflate(&packed[..20], &mut cluster));
        assert!(!inflate(&[0xFF; 64], &mut cluster));
    }

    #[test]
    fn zstd_with_padding_gives_the_cluster_and_damage_gives_none() {
        let plain: Vec<u8> = (0..4096u32).map(|byte| (byte / 7) as u8).collect();
        let mut packed = zstd::bulk::compress(&plain, 3).unwrap();
        packed.resize(packed.len().next_multiple_of(512), 0);
        let mut cluster = vec![0; 4096];
        assert!(unpack_zstd(&packed, &mut cluster) && cluster == plain);
        assert!(!unpack_zstd(&packed[..10], &mut cluster));
        assert!(!unpack_zstd(&[0xFF; 64], &mut cluster));
    }
}
