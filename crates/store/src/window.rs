//! A part of a store, as a store of its own that is only read.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vmstrata_types::HostOffset;

use crate::{FaultStore, Fetch, Fetched, Hold, LocalFile, Segment, Store, slice, total_len};

/// See the module documentation. Offsets count from its first byte; rings add where that lies ([`LocalFile::start`]). They do not
/// know where it ends: ask them for what lies inside.
#[derive(Debug)]
pub struct WindowStore {
    whole: Arc<dyn Store>,
    start: HostOffset,
    len: u64,
}

impl WindowStore {
    /// The `len` bytes of `whole` from `start` on. Where `whole` ends before, they end there, too.
    pub fn new(whole: Arc<dyn Store>, start: HostOffset, len: u64) -> Self {
        Self { whole, start, len }
    }

    fn in_whole(&self, at: HostOffset) -> HostOffset {
        self.start + at.get()
    }

    /// The file below, which may lack bytes that are elsewhere.
    fn file(&self) -> Option<&dyn LocalFile> {
        self.whole.fetch().map_or_else(|| self.whole.local(), |fetch| Some(fetch.file()))
    }
}

fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "a part of a file is only read")
}

impl Store for WindowStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        let left = usize::try_from(self.len.saturating_sub(at.get())).unwrap_or(usize::MAX);
        let part = slice(segments, 0, left.min(total_len(segments)));
        self.whole.read_segments(&part, self.in_whole(at))
    }

    fn write_segments(&self, _: &[Segment<'_>], _: HostOffset) -> io::Result<()> {
        Err(read_only())
    }

    fn flush(&self) -> io::Result<()> {
        self.whole.flush()
    }

    fn punch_hole(&self, _: HostOffset, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        let (is_data, end) = self.whole.extent(self.in_whole(at))?;
        let end = end.get().saturating_sub(self.start.get()).min(self.len).max(at.get());
        Ok((is_data, HostOffset::new(end)))
    }

    fn local(&self) -> Option<&dyn LocalFile> {
        self.whole.local().map(|_| self as &dyn LocalFile)
    }

    fn fetch(&self) -> Option<&dyn Fetch> {
        self.whole.fetch().map(|_| self as &dyn Fetch)
    }
}

impl LocalFile for WindowStore {
    fn raw(&self) -> Option<BorrowedFd<'_>> {
        self.file()?.raw()
    }

    fn start(&self) -> HostOffset {
        self.start
    }

    fn simulated(&self) -> Option<&FaultStore> {
        self.file()?.simulated()
    }

    fn raw_alignment(&self) -> usize {
        self.file().map_or(1, LocalFile::raw_alignment)
    }

    fn read_now(&self, buf: &mut [u8], at: HostOffset) -> bool {
        let is_inside = at.get().saturating_add(buf.len() as u64) <= self.len;
        is_inside && self.file().is_some_and(|file| file.read_now(buf, self.in_whole(at)))
    }
}

impl Fetch for WindowStore {
    fn hold(&self, at: HostOffset, len: u64) -> Option<Hold> {
        self.whole.fetch()?.hold(self.in_whole(at), len)
    }

    fn fetch(&self, at: HostOffset, len: u64, then: Box<dyn FnOnce(io::Result<Fetched>) + Send>) {
        match self.whole.fetch() {
            Some(fetch) => fetch.fetch(self.in_whole(at), len, then),
            None => then(Ok(Fetched::Here)),
        }
    }

    fn file(&self) -> &dyn LocalFile {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    #[test]
    fn a_window_shows_its_part_and_no_more() {
        let whole = MemoryStore::new();
        whole.write_all(&(0..100).collect::<Vec<u8>>(), HostOffset::ZERO).unwrap();
        let window = WindowStore::new(Arc::new(whole), HostOffset::new(40), 20);
        let read = |at: u64, len: usize| {
            let mut bytes = vec![0xFF; len];
            let read = window.read_segments(&[Segment::from_mut(&mut bytes)], HostOffset::new(at)).unwrap();
            bytes.truncate(read);
            bytes
        };
        assert_eq!(read(5, 3), [45, 46, 47]);
        assert_eq!(read(18, 8), [58, 59], "bytes past its end");
        assert_eq!((read(20, 1), read(1 << 40, 1)), (vec![], vec![]));
        assert_eq!(window.len().unwrap(), 20);
        assert_eq!(window.extent(HostOffset::new(5)).unwrap(), (true, HostOffset::new(20)));
        assert!(window.write_all(&[0], HostOffset::ZERO).is_err() && window.set_len(0).is_err());
    }
}
