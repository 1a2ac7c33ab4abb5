//! Where a file has data, and where holes: `lseek(2)` with SEEK_DATA and SEEK_HOLE.

use rustix::io::Errno;
use vmstrata_disk::Disk;
use vmstrata_types::{GuestOffset, GuestRange};

/// Bytes that are looked at in one go: others have their turn in between.
const WINDOW: u64 = 1 << 30;
/// Runs of one layer looked at in one go.
const EXTENTS: usize = 64;

/// The first byte from `offset` on that is data, or in a hole. The end of the disk counts as a hole.
///
/// # Errors
/// ENXIO from the end on, and where no data follows; EINVAL for another `whence`; EIO for tables that cannot be read.
pub(super) fn seek(disk: &Disk, offset: i64, whence: i32) -> Result<u64, Errno> {
    let for_data = match whence {
        libc::SEEK_DATA => true,
        libc::SEEK_HOLE => false,
        _ => return Err(Errno::INVAL),
    };
    let size = disk.size();
    let mut at = u64::try_from(offset).ok().filter(|at| *at < size).ok_or(Errno::NXIO)?;
    while at < size {
        let range = GuestRange::new(GuestOffset::new(at), (size - at).min(WINDOW));
        let extents = disk.extents(range, EXTENTS).map_err(|error| {
            tracing::error!(disk = %disk.path().display(), %error, "cannot tell where data is");
            Errno::from_raw_os_error(error.errno())
        })?;
        for extent in extents {
            if extent.kind.reads_zero() != for_data {
                return Ok(at);
            }
            at = extent.range.end().min(range.end()).get();
        }
    }
    if for_data { Err(Errno::NXIO) } else { Ok(size) }
}
