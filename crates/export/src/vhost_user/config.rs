//! What the device tells a driver about itself: features and the configuration space
//! (virtio 1.2, "Block Device", "Device configuration layout"). Every limit here is the one enforced.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmstrata_types::ClusterBits;

use super::request::SERIAL_LEN;

/// Bytes in a virtio-blk sector, whatever the block size.
pub(super) const SECTOR: u64 = 512;
/// Data segments one request may have: a ring of 128 (QEMU's default) less header and status.
pub(super) const SEGMENTS_MAX: u32 = 126;
/// Ranges one discard or write-zeroes request may name.
pub(super) const MAX_RANGES: u32 = 32;
/// Bytes one such range may cover: what the engine does in one go without delaying others for long.
const RANGE_BYTES_MAX: u64 = 1 << 30;
/// Bytes the frontend may read; the rest of the space reads as zeros.
const SPACE_LEN: usize = 60;
/// The one byte a driver may write: whether writes may be cached.
const WRITEBACK_AT: usize = 32;

/// The limits a request is held to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) capacity_sectors: u64,
    pub(super) read_only: bool,
    pub(super) discard_sectors_max: u32,
    pub(super) zero_sectors_max: u32,
}

/// One device, as its drivers see it.
#[derive(Debug)]
pub(super) struct Device {
    /// As when it was made; see [`Device::limits`].
    limits: Limits,
    capacity_sectors: AtomicU64,
    pub(super) queues: u16,
    pub(super) serial: [u8; SERIAL_LEN],
    cluster_bits: ClusterBits,
    writeback: AtomicBool,
}

/// What a device is made of.
#[derive(Debug)]
pub(super) struct DeviceParts<'a> {
    pub(super) disk_bytes: u64,
    pub(super) cluster_bits: ClusterBits,
    pub(super) read_only: bool,
    pub(super) queues: u16,
    pub(super) serial: &'a str,
}

impl Device {
    /// A disk that ends inside a sector shows its whole sectors only.
    pub(super) fn new(parts: &DeviceParts<'_>) -> Self {
        let mut serial = [0; SERIAL_LEN];
        for (place, byte) in serial.iter_mut().zip(parts.serial.bytes()) {
            *place = byte;
        }
        let range_sectors = (RANGE_BYTES_MAX / SECTOR) as u32;
        let capacity_sectors = parts.disk_bytes / SECTOR;
        let limits = Limits {
            capacity_sectors,
            read_only: parts.read_only,
            discard_sectors_max: range_sectors,
            zero_sectors_max: range_sectors,
        };
        Self {
            limits,
            capacity_sectors: AtomicU64::new(capacity_sectors),
            queues: parts.queues,
            serial,
            cluster_bits: parts.cluster_bits,
            writeback: AtomicBool::new(true),
        }
    }

    /// What requests are held to from now on.
    pub(super) fn limits(&self) -> Limits {
        Limits { capacity_sectors: self.capacity_sectors.load(Ordering::Relaxed), ..self.limits }
    }

    /// The disk has another size.
    pub(super) fn set_size(&self, disk_bytes: u64) {
        self.capacity_sectors.store(disk_bytes / SECTOR, Ordering::Relaxed);
    }

    /// The virtio feature bits offered.
    pub(super) fn features(&self) -> u64 {
        let always = [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            blk::VIRTIO_BLK_F_SEG_MAX,
            blk::VIRTIO_BLK_F_BLK_SIZE,
            blk::VIRTIO_BLK_F_TOPOLOGY,
            blk::VIRTIO_BLK_F_FLUSH,
            blk::VIRTIO_BLK_F_CONFIG_WCE,
            blk::VIRTIO_BLK_F_MQ,
        ];
        let writable = [blk::VIRTIO_BLK_F_DISCARD, blk::VIRTIO_BLK_F_WRITE_ZEROES];
        let by_mode: &[u32] = if self.limits.read_only { &[blk::VIRTIO_BLK_F_RO] } else { &writable };
        always.iter().chain(by_mode).fold(0, |bits, bit| bits | 1 << bit)
    }

    /// Whether a write must be on stable storage before it completes, for a driver that negotiated
    /// `features`: when it switched caching off, or cannot flush.
    pub(super) fn writes_through(&self, features: u64) -> bool {
        features & (1 << blk::VIRTIO_BLK_F_FLUSH) == 0 || !self.writeback.load(Ordering::Relaxed)
    }

    /// Back to how a driver finds a fresh device.
    pub(super) fn reset(&self) {
        self.writeback.store(true, Ordering::Relaxed);
    }

    /// `len` bytes of the configuration space at `offset`.
    pub(super) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let space = self.space();
        (offset..offset.saturating_add(len)).map(|at| space.get(at).copied().unwrap_or(0)).collect()
    }

    /// Writes to the configuration space; whether they were to something writable.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let ours = offset == WRITEBACK_AT && bytes.len() == 1;
        if ours {
            self.writeback.store(bytes[0] != 0, Ordering::Relaxed);
        }
        ours
    }

    /// `struct virtio_blk_config`.
    fn space(&self) -> [u8; SPACE_LEN] {
        let mut space = [0; SPACE_LEN];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let cluster_sectors = (self.cluster_bits.size() / SECTOR) as u32;
        put(0, &self.limits().capacity_sectors.to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        // Topology: physical blocks of 4 KiB (log2 of sectors), aligned; best in whole clusters.
        put(24, &[3, 0]);
        put(26, &8u16.to_le_bytes());
        put(28, &cluster_sectors.max(8).to_le_bytes());
        put(WRITEBACK_AT, &[self.writeback.load(Ordering::Relaxed).into()]);
        put(34, &self.queues.to_le_bytes());
        put(36, &self.limits.discard_sectors_max.to_le_bytes());
        put(40, &MAX_RANGES.to_le_bytes());
        put(44, &cluster_sectors.to_le_bytes());
        put(48, &self.limits.zero_sectors_max.to_le_bytes());
        put(52, &MAX_RANGES.to_le_bytes());
        put(56, &[1]);
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(read_only: bool) -> Device {
        let parts = DeviceParts {
            disk_bytes: 10 * SECTOR + 511,
            cluster_bits: ClusterBits::DEFAULT,
            read_only,
            queues: 4,
            serial: "a-serial-number-longer-than-twenty-bytes",
        };
        Device::new(&parts)
    }

    #[test]
    fn the_space_holds_what_drivers_look_for() {
        let device = device(false);
        let word = |at| u32::from_le_bytes(device.read(at, 4).try_into().unwrap());
        assert_eq!(device.read(0, 8), 10u64.to_le_bytes(), "whole sectors only");
        assert_eq!(word(12), SEGMENTS_MAX);
        assert_eq!(word(20), 512);
        assert_eq!(device.read(34, 2), 4u16.to_le_bytes());
        assert_eq!(word(36), 1 << 21);
        assert_eq!(word(44), 128);
        assert_eq!(device.read(56, 100), [vec![1], vec![0; 99]].concat());
        assert_eq!(device.read(4000, 2), [0, 0]);
        assert_eq!(&device.serial, b"a-serial-number-long");
    }

    #[test]
    fn another_size_shows_at_once() {
        let device = device(false);
        device.set_size(20 * SECTOR);
        assert_eq!(device.read(0, 8), 20u64.to_le_bytes());
        assert_eq!(device.limits().capacity_sectors, 20);
    }

    #[test]
    fn only_the_cache_mode_can_be_written() {
        let device = device(false);
        let flush = 1 << blk::VIRTIO_BLK_F_FLUSH;
        assert!(!device.writes_through(flush));
        assert!(device.writes_through(0), "who cannot flush must not need to");
        assert!(device.write(32, &[0]));
        assert!(device.writes_through(flush));
        assert_eq!(device.read(32, 1), [0]);
        assert!(!device.write(0, &[1; 8]) && !device.write(32, &[1, 1]));
        device.reset();
        assert!(!device.writes_through(flush));
    }

    #[test]
    fn a_read_only_disk_says_so() {
        let has = |device: &Device, bit: u32| device.features() & (1 << bit) != 0;
        assert!(has(&device(true), blk::VIRTIO_BLK_F_RO) && !has(&device(true), blk::VIRTIO_BLK_F_DISCARD));
        assert!(!has(&device(false), blk::VIRTIO_BLK_F_RO) && has(&device(false), blk::VIRTIO_BLK_F_DISCARD));
    }
}
