//! Compressing clusters as QEMU expects them.

use vmstrata_qcow2::CompressionType;

/// The window that QEMU decompresses with, 4 KiB: a stream made with a larger one it cannot read.
const WINDOW_BITS: u8 = 12;
const ZSTD_LEVEL: i32 = 3;

/// The compressed bytes of a cluster; `None` when they would not be fewer.
pub(crate) fn pack(kind: CompressionType, cluster: &[u8]) -> Option<Vec<u8>> {
    let mut packed = vec![0; cluster.len() - 1];
    let len = match kind {
        CompressionType::Zlib => deflate(cluster, &mut packed)?,
        CompressionType::Zstd => zstd::bulk::compress_to_buffer(cluster, &mut packed, ZSTD_LEVEL).ok()?,
    };
    packed.truncate(len);
    Some(packed)
}

fn deflate(cluster: &[u8], packed: &mut [u8]) -> Option<usize> {
    let level = flate2::Compression::default();
    let mut stream = flate2::Compress::new_with_window_bits(level, false, WINDOW_BITS);
    let status = stream.compress(cluster, packed, flate2::FlushCompress::Finish).ok()?;
    let done = status == flate2::Status::StreamEnd;
    done.then(|| usize::try_from(stream.total_out()).expect("no longer than the buffer"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
