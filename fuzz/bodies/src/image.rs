//! A whole image from a stranger: opened, read, written to, and checked.

use std::sync::Arc;

use vmstrata_check::{Options, Report};
use vmstrata_disk::{Disk, Error};
use vmstrata_store::Segment;
use vmstrata_types::{GuestOffset, GuestRange};

use crate::memory_file::MemoryFile;

/// Images longer than this are passed over: all that can be wrong fits in less.
const LEN_MAX: usize = 1 << 20;
/// Bytes read in one go.
const READ: u64 = 64 << 10;
/// Runs looked at.
const RUNS: usize = 64;
/// Bytes written in one go: parts of clusters of most sizes.
const WRITE: usize = 3 << 10;

/// Opens `data` as an image for reading and for writing, and does all a guest can do to it.
///
/// # Panics
/// When the two ways of opening read different bytes; when an image that was sound does not read as written, or
/// is not sound in the end.
pub fn image_open(data: &[u8]) {
    if data.len() > LEN_MAX {
        return;
    }
    let file = MemoryFile::new(data.to_vec());
    let before = check(&file);
    let frozen = file.open(true, None).map(|disk| look(&disk));
    assert!(file.bytes() == data, "reading wrote");
    let Ok(disk) = file.open(false, None) else { return };
    if let Ok(frozen) = frozen {
        compare(&frozen, &look(&disk));
    }
    let sound = before.is_ok_and(|report| report.is_clean());
    let kept = write(&disk, sound);
    let closed = disk.close();
    drop(disk);
    if sound {
        closed.expect("an image that was sound can be closed");
        let after = check(&file).expect("an image that was sound can be checked");
        // Clusters of bitmaps leak: a writer that does not keep bitmaps lets go of them.
        assert!(after.is_safe(), "{after:#?}");
        let disk = file.open(true, None).expect("an image that was closed can be opened");
        for (at, byte) in kept {
            assert!(
                read(&disk, at, WRITE).unwrap() == vec![byte; WRITE],
                "what was written at {at:#x} is lost"
            );
        }
    }
}

pub(crate) fn check(file: &MemoryFile) -> Result<Report, vmstrata_check::Error> {
    vmstrata_check::check(&*file.store, &Options { memory_bytes_max: 16 << 20, ..Options::default() })
}

fn read(disk: &Disk, at: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0xee; len];
    disk.read(GuestOffset::new(at), &[Segment::from_mut(&mut bytes)])?;
    Ok(bytes)
}

/// What the guest finds: the start of the disk, its end, and of each of the first runs the start.
pub(crate) fn look(disk: &Arc<Disk>) -> Vec<Option<Vec<u8>>> {
    let size = disk.size();
    let whole = GuestRange::new(GuestOffset::ZERO, size);
    let mut starts = vec![0, size.saturating_sub(READ)];
    if let Ok(runs) = disk.extents(whole, RUNS) {
        let mut end = 0;
        for run in &runs {
            assert!(run.range.start.get() == end && run.range.len > 0, "runs follow one another: {runs:?}");
            end += run.range.len;
            starts.push(run.range.start.get());
        }
        assert!(end <= size);
    }
    starts.sort_unstable();
    starts.dedup();
    let piece = |at: u64| read(disk, at, READ.min(size - at) as usize).ok();
    starts.into_iter().take(RUNS).map(piece).collect()
}

/// The list of runs may differ where one of the two meets damage, so only what both could read is compared.
fn compare(frozen: &[Option<Vec<u8>>], active: &[Option<Vec<u8>>]) {
    if frozen.len() != active.len() {
        return;
    }
    for (number, (one, other)) in frozen.iter().zip(active).enumerate() {
        if let (Some(one), Some(other)) = (one, other)
            && one.len() == other.len()
        {
            assert!(one == other, "piece {number} reads differently once the image is open for writing");
        }
    }
}

/// Writes here and there, and takes some of it back; returns what must be there in the end, as offset and byte.
pub(crate) fn write(disk: &Arc<Disk>, sound: bool) -> Vec<(u64, u8)> {
    let size = disk.size();
    let Some(last) = size.checked_sub(WRITE as u64) else { return Vec::new() };
    let mut kept: Vec<(u64, u8)> = Vec::new();
    for (number, at) in [0, last / 3 + 77, (last / 2) & !511, last].into_iter().enumerate() {
        let byte = 0x40 + number as u8;
        let written = disk.write(GuestOffset::new(at), &[Segment::from_mut(&mut [byte; WRITE])]);
        let apart = kept.iter().all(|(other, _)| other.abs_diff(at) >= WRITE as u64);
        if sound && written.is_ok() && apart {
            let found = read(disk, at, WRITE).expect("what was just written can be read");
            assert!(found == [byte; WRITE], "a write at {at:#x} reads as something else");
            kept.push((at, byte));
        }
    }
    let quarter = GuestRange::new(GuestOffset::new(size / 4), READ.min(size - size / 4));
    let _ = disk.discard(quarter);
    let _ = disk.write_zeroes(GuestRange::new(GuestOffset::new(size / 5), READ.min(size / 5)), false);
    let _ = disk.write_zeroes(GuestRange::new(GuestOffset::new(size / 7), READ.min(size / 7)), true);
    let flushed = disk.flush();
    assert!(!sound || flushed.is_ok(), "{flushed:?}");
    let untouched = |&(at, _): &(u64, u8)| {
        let end = at + WRITE as u64;
        [(size / 4, READ), (size / 5, READ), (size / 7, READ)]
            .iter()
            .all(|(start, len)| end <= *start || at >= start + len)
    };
    kept.retain(untouched);
    kept
}
