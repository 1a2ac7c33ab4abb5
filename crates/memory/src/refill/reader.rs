//! Reading many pages from disks: in order of their place there, in large pieces, by several threads.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use vmstrata_store::on_threads;

use crate::address::{Frame, PAGE_BYTES};
use crate::disk::ReadDisk;
use crate::vault::DiskPiece;

/// Pages put together at once: their pieces are read and kept together.
const BATCH_PAGES: usize = 256;
/// Bytes between two pieces that are read rather than left out.
const GAP_BYTES: u64 = 16 << 10;
/// The most bytes of one read.
const SPAN_BYTES: u64 = 1 << 20;
/// More threads wait for the same disk.
const THREADS_MAX: usize = 8;

/// Disks by their index among those of a snapshot; some may be missing.
pub(super) type Disks<'a> = [Option<&'a dyn ReadDisk>];

/// A page, and where its bytes are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) frame: Frame,
    /// From the page's first byte on; what they leave of it is zeros.
    pub(super) pieces: &'a [DiskPiece],
}

/// Bytes of a disk that are read at once.
struct Span {
    disk: u16,
    start: u64,
    end: u64,
    /// Empty if they cannot be read.
    bytes: Vec<u8>,
}

/// Gives each page that can be put together to `give`, from several threads, in no order; nothing is read from a
/// disk after `until`.
///
/// # Errors
/// The first that `give` returns; not all pages were given then.
pub(super) fn read<E: Send>(
    disks: &Disks<'_>,
    mut wanted: Vec<Wanted<'_>>,
    until: Option<Instant>,
    give: impl Fn(&Wanted<'_>, &[u8; PAGE_BYTES]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    wanted.sort_unstable_by_key(|page| page.pieces.first().map(|piece| (piece.disk, piece.offset)));
    let batches: Vec<&[Wanted<'_>]> = wanted.chunks(BATCH_PAGES).collect();
    let next = AtomicUsize::new(0);
    let is_over = || until.is_some_and(|until| Instant::now() >= until);
    let work = || {
        while !is_over()
            && let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed))
        {
            if let Err(error) = read_batch(disks, batch, &is_over, &mut &give) {
                next.store(batches.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(THREADS_MAX).min(batches.len());
    on_threads(threads, work).into_iter().collect()
}

/// Gives each page of a batch that can be put together; nothing is read once `is_over`.
///
/// # Errors
/// The first that `give` returns.
pub(super) fn read_batch<E>(
    disks: &Disks<'_>,
    batch: &[Wanted<'_>],
    is_over: &impl Fn() -> bool,
    give: &mut impl FnMut(&Wanted<'_>, &[u8; PAGE_BYTES]) -> Result<(), E>,
) -> Result<(), E> {
    let mut spans = spans(batch);
    spans.iter_mut().take_while(|_| !is_over()).for_each(|span| span.read(disks));
    // A part of a span that cannot be read must not take the rest with it.
    let alone = |pieces: &[DiskPiece]| if is_over() { None } else { alone(disks, pieces).ok() };
    let page = |wanted: &Wanted<'_>| page(&spans, wanted.pieces).or_else(|| alone(wanted.pieces));
    batch.iter().try_for_each(|wanted| match page(wanted) {
        Some(page) => give(wanted, &page),
        None => Ok(()),
    })
}

/// `[page]`: whether its bytes can be read, as far as [`ReadDisk::check`] tells. What lies side by side is looked up once.
pub(super) fn readable(disks: &Disks<'_>, pages: &[Wanted<'_>]) -> Vec<bool> {
    let can_read = |disk: u16, start: u64, end: u64| {
        let disk = disks.get(usize::from(disk)).copied().flatten();
        disk.is_some_and(|disk| disk.check(start, end - start).is_ok())
    };
    let spans = spans(pages);
    let sound: Vec<bool> = spans.iter().map(|span| can_read(span.disk, span.start, span.end)).collect();
    let is_sound = |piece: &DiskPiece| {
        let after = spans.partition_point(|span| (span.disk, span.start) <= (piece.disk, piece.offset));
        // What is wrong with a span may lie beside the piece.
        sound[after - 1] || can_read(piece.disk, piece.offset, piece.offset.saturating_add(piece.len.into()))
    };
    pages.iter().map(|page| page.pieces.iter().all(is_sound)).collect()
}

/// What covers all pieces of a batch, in order.
fn spans(batch: &[Wanted<'_>]) -> Vec<Span> {
    let mut pieces: Vec<&DiskPiece> = batch.iter().flat_map(|wanted| wanted.pieces).collect();
    pieces.sort_unstable_by_key(|piece| (piece.disk, piece.offset));
    let mut spans: Vec<Span> = Vec::new();
    for piece in pieces {
        let DiskPiece { disk, offset: start, len } = *piece;
        let end = start.saturating_add(len.into());
        match spans.last_mut() {
            Some(last)
                if last.disk == disk
                    && start <= last.end.saturating_add(GAP_BYTES)
                    && (end <= last.end || end - last.start <= SPAN_BYTES) =>
            {
                last.end = last.end.max(end);
            }
            _ => spans.push(Span { disk, start, end, bytes: Vec::new() }),
        }
    }
    spans
}

/// The bytes of a page; `None` if some cannot be had.
fn page(spans: &[Span], pieces: &[DiskPiece]) -> Option<[u8; PAGE_BYTES]> {
    let mut page = [0; PAGE_BYTES];
    let mut rest = &mut page[..];
    for piece in pieces {
        let after = spans.partition_point(|span| (span.disk, span.start) <= (piece.disk, piece.offset));
        let span = spans.get(after.checked_sub(1)?)?;
        let from = usize::try_from(piece.offset - span.start).ok()?;
        let (into, later) = rest.split_at_mut_checked(piece.len.into())?;
        into.copy_from_slice(span.bytes.get(from..)?.get(..into.len())?);
        rest = later;
    }
    Some(page)
}

/// The bytes of a page, read for itself.
///
/// # Errors
/// A disk that is not there, or cannot be read there.
pub(super) fn alone(disks: &Disks<'_>, pieces: &[DiskPiece]) -> io::Result<[u8; PAGE_BYTES]> {
    let absent = || io::Error::new(io::ErrorKind::NotFound, "the disk is not there");
    let mut page = [0; PAGE_BYTES];
    let mut rest = &mut page[..];
    for piece in pieces {
        let disk = disks.get(usize::from(piece.disk)).copied().flatten().ok_or_else(absent)?;
        let (into, later) = rest.split_at_mut_checked(piece.len.into()).ok_or(io::ErrorKind::InvalidData)?;
        disk.read_at(piece.offset, into)?;
        rest = later;
    }
    Ok(page)
}

impl Span {
    fn read(&mut self, disks: &Disks<'_>) {
        let Some(Some(disk)) = disks.get(usize::from(self.disk)) else { return };
        // A span is at most SPAN_BYTES long, or one piece.
        self.bytes.resize((self.end - self.start) as usize, 0);
        if let Err(error) = disk.read_at(self.start, &mut self.bytes) {
            tracing::debug!("{} bytes of disk {} at {}: {error}", self.bytes.len(), self.disk, self.start);
            self.bytes.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;

    use super::*;

    const DISK_BYTES: usize = 8 << 20;

    /// Each word of 8 bytes is its offset.
    fn disk() -> File {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..DISK_BYTES as u64).step_by(8).flat_map(u64::to_le_bytes).collect();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    fn word(page: &[u8; PAGE_BYTES], at: usize) -> u64 {
        u64::from_le_bytes(*page[at..].first_chunk().unwrap())
    }

    fn read_all(disks: &Disks<'_>, pages: &[Vec<DiskPiece>]) -> Vec<(u64, [u8; PAGE_BYTES])> {
        let wanted = pages.iter().zip(0..).map(|(pieces, at)| Wanted { frame: Frame::new(at), pieces });
        let read = Mutex::new(Vec::new());
        let give = |wanted: &Wanted<'_>, page: &[u8; PAGE_BYTES]| {
            read.lock().unwrap().push((wanted.frame.get(), *page));
            Ok::<(), ()>(())
        };
        super::read(disks, wanted.collect(), None, give).unwrap();
        let mut read = read.into_inner().unwrap();
        read.sort_unstable_by_key(|(frame, _)| *frame);
        read
    }

    #[test]
    fn pages_are_put_together_from_pieces_anywhere() {
        let (first, second) = (disk(), disk());
        second.write_all_at(&[7; 512], 4096).unwrap();
        let piece = |disk, offset, len| DiskPiece { disk, offset, len };
        // 600 pages from the end to the start, then scattered pieces of two disks.
        let mut pages: Vec<Vec<DiskPiece>> =
            (0..600).map(|page| vec![piece(0, (1900 - 3 * page) * 4096, 4096)]).collect();
        pages.push(vec![piece(0, 1 << 20, 1024), piece(1, 4096, 512), piece(0, 8, 1024)]);
        pages.push(vec![]);
        let read = read_all(&[Some(&first), Some(&second)], &pages);
        assert_eq!(read.len(), pages.len());
        for (frame, page) in &read[..600] {
            let at = (1900 - 3 * frame) * 4096;
            assert_eq!((word(page, 0), word(page, 4088)), (at, at + 4088));
        }
        let mixed = &read[600].1;
        assert_eq!((word(mixed, 0), word(mixed, 1536)), (1 << 20, 8));
        assert_eq!(mixed[1024..1536], [7; 512]);
        assert_eq!(mixed[2560..], [0; 1536]);
        assert_eq!(read[601].1, [0; PAGE_BYTES]);
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let first = disk();
        let piece = |disk, offset| vec![DiskPiece { disk, offset, len: 4096 }];
        let pages = [piece(0, 4096), piece(0, DISK_BYTES as u64 - 100), piece(1, 0), piece(2, 0)];
        let pages = [&pages[..], &[piece(0, u64::MAX - 5)]].concat();
        let read = read_all(&[Some(&first), None], &pages);
        assert_eq!(read.iter().map(|(frame, _)| *frame).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn an_error_ends_the_reading() {
        let first = disk();
        let pieces = [DiskPiece { disk: 0, offset: 0, len: 4096 }];
        let wanted = (0..5000).map(|frame| Wanted { frame: Frame::new(frame), pieces: &pieces }).collect();
        assert_eq!(super::read(&[Some(&first)], wanted, None, |_, _| Err("full")), Err("full"));
    }
}
