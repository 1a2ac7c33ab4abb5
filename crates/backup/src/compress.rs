//! Compressing clusters as QEMU expects them.

use vmstrata_disk::{IoContext as _, Result};
use vmstrata_qcow2::CompressionType;

/// The window that QEMU decompresses with, 4 KiB: a stream made with a larger one it cannot read.
const WINDOW_BITS: u8 = 12;
const ZSTD_LEVEL: i32 = 3;

/// Compresses one cluster after the other, for one thread.
pub(crate) enum Packer {
    Zlib(flate2::Compress),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Packer {
    /// # Errors
    /// A host without memory.
    pub(crate) fn new(kind: CompressionType) -> Result<Self> {
        Ok(match kind {
            CompressionType::Zlib => {
                let level = flate2::Compression::default();
                Self::Zlib(flate2::Compress::new_with_window_bits(level, false, WINDOW_BITS))
            }
            CompressionType::Zstd => {
                Self::Zstd(zstd::bulk::Compressor::new(ZSTD_LEVEL).while_trying("begin to compress")?)
            }
        })
    }

    /// Puts the compressed bytes of a cluster at the beginning of `into`, which is as long as that; how many there are, or
    /// `None` when they would not be fewer.
    pub(crate) fn pack(&mut self, cluster: &[u8], into: &mut [u8]) -> Option<usize> {
        let into = &mut into[..cluster.len() - 1];
        match self {
            Self::Zstd(zstd) => zstd.compress_to_buffer(cluster, into).ok(),
            Self::Zlib(zlib) => {
                zlib.reset();
                let status = zlib.compress(cluster, into, flate2::FlushCompress::Finish).ok()?;
                let done = status == flate2::Status::StreamEnd;
                done.then(|| usize::try_from(zlib.total_out()).expect("no longer than the buffer"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(kind: CompressionType, cluster: &[u8]) -> Option<Vec<u8>> {
        let mut packed = vec![0; cluster.len()];
        let len = Packer::new(kind).unwrap().pack(cluster, &mut packed)?;
        packed.truncate(len);
        Some(packed)
    }

    #[test]
    fn noise_is_not_packed() {
        let mut state = 1u64;
        let noise: Vec<u8> = (0..65536)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        assert_eq!(pack(CompressionType::Zlib, &noise), None);
        assert_eq!(pack(CompressionType::Zstd, &noise), None);
    }

    #[test]
    fn a_cluster_is_packed_alike_whatever_was_before_it() {
        let clusters = [vec![1; 65536], (0..65536u32).map(|at| (at / 7) as u8).collect()];
        for kind in [CompressionType::Zlib, CompressionType::Zstd] {
            let mut packer = Packer::new(kind).unwrap();
            for cluster in &clusters {
                let mut packed = vec![0; cluster.len()];
                let len = packer.pack(cluster, &mut packed).unwrap();
                assert_eq!(Some(&packed[..len]), pack(kind, cluster).as_deref());
            }
        }
    }

    /// A stream that refers back further than 4 KiB would be refused here as it is by QEMU.
    #[test]
    fn deflated_clusters_need_only_the_window_that_qemu_has() {
        let far: Vec<u8> = (0..65536u32).map(|at| (at % 5000 / 3) as u8).collect();
        let packed = pack(CompressionType::Zlib, &far).unwrap();
        let mut plain = vec![0; far.len()];
        let mut stream = flate2::Decompress::new_with_window_bits(false, WINDOW_BITS);
        let status = stream.decompress(&packed, &mut plain, flate2::FlushDecompress::Finish).unwrap();
        assert!(status == flate2::Status::StreamEnd && plain == far);
    }
}
