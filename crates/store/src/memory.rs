//! A store in memory, for tests.
//!
//! Place in the data flow: stands where a [`crate::FileStore`] stands in production. It promises the least a
//! medium may promise: no raw descriptor, no alignment, and a flush that has nothing to do.
//!
//! Invariant: one operation sees and leaves whole states; a write never interleaves with a read.

use std::io;

use parking_lot::RwLock;
use vmstrata_types::HostOffset;

use crate::{Segment, Store, copy_from_slice, copy_to_slice, slice, total_len};

/// A growable vector of bytes.
#[derive(Default)]
pub struct MemoryStore {
    bytes: RwLock<Vec<u8>>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// A store that holds `bytes`.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self { bytes: RwLock::new(bytes) }
    }

    /// A copy of everything in the store.
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes.read().clone()
    }
}

/// `value` as an index into memory; larger ones are refused as a file system refuses them.
fn index(value: Option<u64>) -> io::Result<usize> {
    value
        .and_then(|value| usize::try_from(value).ok())
        .filter(|&value| value <= isize::MAX as usize)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))
}

impl Store for MemoryStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        let bytes = self.bytes.read();
        let Some(available) = usize::try_from(at.get()).ok().and_then(|at| bytes.get(at..)) else {
            return Ok(0);
        };
        let len = available.len().min(total_len(segments));
        copy_from_slice(segments, &available[..len]);
        Ok(len)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        let len = total_len(segments);
        if len == 0 {
            return Ok(());
        }
        let end = index(at.get().checked_add(len as u64))?;
        let mut bytes = self.bytes.write();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        copy_to_slice(&slice(segments, 0, len), &mut bytes[end - len..end]);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        let mut bytes = self.bytes.write();
        let total = bytes.len() as u64;
        let end = at.get().saturating_add(len).min(total);
        if at.get() < end {
            bytes[at.get() as usize..end as usize].fill(0);
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.read().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes.write().resize(index(Some(len))?, 0);
        Ok(())
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MemoryStore({} bytes)", self.bytes.read().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_with_zeros_and_reads_short_at_the_end() {
        let store = MemoryStore::new();
        store.write_all(b"xyz", HostOffset::new(5)).unwrap();
        assert_eq!(store.to_vec(), b"\0\0\0\0\0xyz");
        let mut buf = [0xff; 8];
        let read = store.read_segments(&[Segment::from_mut(&mut buf)], HostOffset::new(6)).unwrap();
        assert_eq!((read, &buf[..2]), (2, &b"yz"[..]));
        store.read_padded(&mut buf, HostOffset::new(7)).unwrap();
        assert_eq!(&buf, b"z\0\0\0\0\0\0\0");
        assert_eq!(
            store.read_exact(&mut buf, HostOffset::new(7)).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn holes_and_cuts_leave_zeros() {
        let store = MemoryStore::from_vec(b"abcdef".to_vec());
        store.punch_hole(HostOffset::new(4), 100).unwrap();
        store.punch_hole(HostOffset::new(100), 4).unwrap();
        assert_eq!(store.to_vec(), b"abcd\0\0");
        store.set_len(2).unwrap();
        store.set_len(4).unwrap();
        assert_eq!(store.to_vec(), b"ab\0\0");
        assert_eq!(store.extent(HostOffset::new(1)).unwrap(), (true, HostOffset::new(4)));
    }

    #[test]
    fn writes_past_what_memory_can_address_are_refused() {
        let store = MemoryStore::new();
        for at in [u64::MAX, i64::MAX as u64] {
            let error = store.write_all(b"x", HostOffset::new(at)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
        }
        assert!(store.to_vec().is_empty());
        assert_eq!(store.read_segments(&[], HostOffset::new(u64::MAX)).unwrap(), 0);
    }
}
