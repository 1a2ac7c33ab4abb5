//! What a virtio-blk request asks for (virtio 1.2, "Block Device", "Device Operation"). Pure: bytes in,
//! meaning out; every limit the configuration space announces is enforced here.

use vmstrata_types::{GuestOffset, GuestRange};

use super::config::{Limits, MAX_RANGES, SECTOR, SEGMENTS_MAX};
use super::ring::HEADER_LEN;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// Bytes of one entry of a discard or write-zeroes request.
pub(super) const RANGE_LEN: usize = 16;
/// Bytes of the serial number a GET_ID request returns at most.
pub(super) const SERIAL_LEN: usize = 20;

/// Most bytes of a read or write: what firmware asks for at once (OVMF), and far more than operating systems do. The engine
/// carries longer ones out as well, but others would wait long for them.
pub(super) const BYTES_MAX: u64 = 1 << 30;

/// How a request ended, as the driver reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// A well-formed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read(GuestRange),
    Write(GuestRange),
    Flush,
    /// The ranges are in the data the device may read: `count` entries.
    Discard {
        count: usize,
    },
    WriteZeroes {
        count: usize,
    },
    /// `len` bytes of the serial number are wanted.
    GetId {
        len: usize,
    },
}

/// Sizes of what came with a request's header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Bytes the device may read after the header.
    pub(super) readable: u64,
    /// Bytes the device may write before the status.
    pub(super) writable: u64,
    /// Descriptors of the whole request.
    pub(super) descriptors: u16,
}

/// Understands a request from its header and shape.
///
/// # Errors
/// The status to answer with at once.
#[inline]
pub(super) fn parse(header: &[u8; HEADER_LEN], shape: Shape, limits: &Limits) -> Result<Command, Status> {
    let kind = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
    let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
    // One descriptor each for header and status, as drivers lay requests out.
    if u32::from(shape.descriptors) > SEGMENTS_MAX + 2 {
        return Err(Status::IoError);
    }
    if shape.readable.max(shape.writable) > BYTES_MAX {
        return Err(Status::IoError);
    }
    let writes = matches!(kind, OUT | DISCARD | WRITE_ZEROES);
    if writes && limits.read_only {
        return Err(Status::IoError);
    }
    match kind {
        IN => limits.range(sector, shape.writable).map(Command::Read),
        OUT => limits.range(sector, shape.readable).map(Command::Write),
        FLUSH => Ok(Command::Flush),
        GET_ID => Ok(Command::GetId { len: shape.writable.min(SERIAL_LEN as u64) as usize }),
        DISCARD => count_of(shape.readable).map(|count| Command::Discard { count }),
        WRITE_ZEROES => count_of(shape.readable).map(|count| Command::WriteZeroes { count }),
        _ => Err(Status::Unsupported),
    }
}

fn count_of(readable: u64) -> Result<usize, Status> {
    let whole = readable.is_multiple_of(RANGE_LEN as u64);
    let count = readable / RANGE_LEN as u64;
    if whole && count >= 1 && count <= u64::from(MAX_RANGES) {
        Ok(count as usize)
    } else {
        Err(Status::IoError)
    }
}

/// One entry of a write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ZeroRange {
    pub(super) range: GuestRange,
    /// Whether the space may be given back.
    pub(super) unmap: bool,
}

/// Understands one entry of a discard request.
///
/// # Errors
/// The status to answer the whole request with.
pub(super) fn discard_range(entry: &[u8; RANGE_LEN], limits: &Limits) -> Result<GuestRange, Status> {
    let (sector, sectors, flags) = split_entry(entry);
    if flags != 0 {
        return Err(Status::Unsupported);
    }
    if sectors > limits.discard_sectors_max {
        return Err(Status::IoError);
    }
    limits.range(sector, u64::from(sectors) * SECTOR)
}

/// Understands one entry of a write-zeroes request.
///
/// # Errors
/// The status to answer the whole request with.
pub(super) fn zero_range(entry: &[u8; RANGE_LEN], limits: &Limits) -> Result<ZeroRange, Status> {
    const UNMAP: u32 = 1;
    let (sector, sectors, flags) = split_entry(entry);
    if flags & !UNMAP != 0 {
        return Err(Status::Unsupported);
    }
    if sectors > limits.zero_sectors_max {
        return Err(Status::IoError);
    }
    let range = limits.range(sector, u64::from(sectors) * SECTOR)?;
    Ok(ZeroRange { range, unmap: flags & UNMAP != 0 })
}

fn split_entry(entry: &[u8; RANGE_LEN]) -> (u64, u32, u32) {
    let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("four bytes"));
    (u64::from_le_bytes(entry[..8].try_into().expect("eight bytes")), word(8), word(12))
}

impl Limits {
    /// The bytes from `sector` on, if they are whole sectors of the disk.
    #[inline]
    fn range(&self, sector: u64, len: u64) -> Result<GuestRange, Status> {
        let start = sector.checked_mul(SECTOR).ok_or(Status::IoError)?;
        let range = GuestRange::new(GuestOffset::new(start), len);
        let fits = len.is_multiple_of(SECTOR) && range.fits(self.capacity_sectors * SECTOR);
        if fits { Ok(range) } else { Err(Status::IoError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { capacity_sectors: 1000, read_only: false, discard_sectors_max: 500, zero_sectors_max: 400 };

    fn header(kind: u32, sector: u64) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        bytes
    }

    fn entry(sector: u64, sectors: u32, flags: u32) -> [u8; RANGE_LEN] {
        let mut bytes = [0; RANGE_LEN];
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
        bytes[12..].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    fn shape(readable: u64, writable: u64) -> Shape {
        Shape { readable, writable, descriptors: 3 }
    }

    fn range(sector: u64, sectors: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(sector * SECTOR), sectors * SECTOR)
    }

    #[test]
    fn reads_and_writes_cover_whole_sectors_of_the_disk() {
        let read = |sector, len| parse(&header(IN, sector), shape(0, len), &LIMITS);
        assert_eq!(read(7, 4096), Ok(Command::Read(range(7, 8))));
        assert_eq!(read(999, 512), Ok(Command::Read(range(999, 1))));
        assert_eq!(read(1000, 0), Ok(Command::Read(range(1000, 0))));
        assert_eq!(read(999, 1024), Err(Status::IoError));
        assert_eq!(read(0, 513), Err(Status::IoError));
        assert_eq!(read(u64::MAX, 512), Err(Status::IoError));
        assert_eq!(read(u64::MAX / 512, 512), Err(Status::IoError));
        let write = parse(&header(OUT, 3), shape(512, 0), &LIMITS);
        assert_eq!(write, Ok(Command::Write(range(3, 1))));
    }

    #[test]
    fn a_request_has_so_many_bytes_and_no_more() {
        let limits = Limits { capacity_sectors: 1 << 40, ..LIMITS };
        for kind in [IN, OUT] {
            let parse = |len| {
                let (readable, writable) = if kind == OUT { (len, 0) } else { (0, len) };
                parse(&header(kind, 0), shape(readable, writable), &limits)
            };
            assert!(parse(BYTES_MAX).is_ok());
            assert_eq!(parse(BYTES_MAX + SECTOR), Err(Status::IoError));
        }
    }

    #[test]
    fn a_read_only_disk_takes_reads_and_flushes_only() {
        let limits = Limits { read_only: true, ..LIMITS };
        for kind in [OUT, DISCARD, WRITE_ZEROES] {
            assert_eq!(parse(&header(kind, 0), shape(512, 0), &limits), Err(Status::IoError));
        }
        assert!(parse(&header(IN, 0), shape(0, 512), &limits).is_ok());
        assert!(parse(&header(FLUSH, 0), shape(0, 0), &limits).is_ok());
    }

    #[test]
    fn requests_past_the_announced_limits_fail() {
        let many = |descriptors| Shape { readable: 0, writable: 512, descriptors };
        let most = SEGMENTS_MAX as u16 + 2;
        assert!(parse(&header(IN, 0), many(most), &LIMITS).is_ok());
        assert_eq!(parse(&header(IN, 0), many(most + 1), &LIMITS), Err(Status::IoError));
        let ranges = |count: u64| parse(&header(DISCARD, 0), shape(count * 16, 0), &LIMITS);
        assert_eq!(ranges(MAX_RANGES.into()), Ok(Command::Discard { count: MAX_RANGES as usize }));
        assert_eq!(ranges(u64::from(MAX_RANGES) + 1), Err(Status::IoError));
        assert_eq!(ranges(0), Err(Status::IoError));
        assert_eq!(parse(&header(WRITE_ZEROES, 0), shape(17, 0), &LIMITS), Err(Status::IoError));
    }

    #[test]
    fn what_is_not_known_is_unsupported() {
        for kind in [2, 3, 5, 9, 10, 12, 14, u32::MAX] {
            assert_eq!(parse(&header(kind, 0), shape(0, 0), &LIMITS), Err(Status::Unsupported));
        }
    }

    #[test]
    fn the_serial_is_cut_to_the_buffer() {
        let id = |len| parse(&header(GET_ID, 0), shape(0, len), &LIMITS);
        assert_eq!(id(20), Ok(Command::GetId { len: 20 }));
        assert_eq!(id(7), Ok(Command::GetId { len: 7 }));
        assert_eq!(id(4096), Ok(Command::GetId { len: 20 }));
    }

    #[test]
    fn ranges_to_zero_or_discard_are_checked_one_by_one() {
        assert_eq!(discard_range(&entry(10, 500, 0), &LIMITS), Ok(range(10, 500)));
        assert_eq!(discard_range(&entry(10, 501, 0), &LIMITS), Err(Status::IoError));
        assert_eq!(discard_range(&entry(501, 500, 0), &LIMITS), Err(Status::IoError));
        assert_eq!(discard_range(&entry(0, 1, 1), &LIMITS), Err(Status::Unsupported));
        let zero = ZeroRange { range: range(0, 400), unmap: true };
        assert_eq!(zero_range(&entry(0, 400, 1), &LIMITS), Ok(zero));
        assert_eq!(zero_range(&entry(0, 401, 0), &LIMITS), Err(Status::IoError));
        assert_eq!(zero_range(&entry(0, 1, 2), &LIMITS), Err(Status::Unsupported));
        assert_eq!(zero_range(&entry(u64::MAX, 1, 0), &LIMITS), Err(Status::IoError));
    }
}
