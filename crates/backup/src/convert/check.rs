//! Comparing a target with the disk that it was made from: the target's bytes come from its storage.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmstrata_disk::{
    Disk, Format, IoContext as _, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources,
    Result, Role,
};
use vmstrata_store::{FileId, FileIdentity, Gate, LocalFile, Segment, Store};
use vmstrata_types::{GuestOffset, GuestRange};

use super::pieces::{Job, PIECE, of_disk};
use super::{BLOCK, ConvertOptions};
use crate::Watch;
use crate::fault::BackupFault;
use crate::pipeline::Crew;
use crate::restore::RestoreFormat;
use crate::turns::in_turns;

/// Opens a target that has no name yet, or is open already.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    store: Arc<dyn Store>,
}

impl Opener for Made {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened> {
        if path != self.path {
            return LocalFiles.open(path, role, gate);
        }
        // No file has such a number: what is known of it is of no use afterwards.
        let file = FileId { dev: u64::MAX, ino: u64::MAX };
        let len = self.store.len().while_trying("read the target's length")?;
        let identity = FileIdentity { file, len, mtime_ns: 0, ctime_ns: 0 };
        Ok(Opened { store: Arc::clone(&self.store), identity })
    }

    fn sidecar(&self, layer: &Path, gate: &Gate) -> Option<PathBuf> {
        if layer == self.path { None } else { LocalFiles.sidecar(layer, gate) }
    }
}

/// Makes sure that the target reads as the disk. Everything is on stable storage.
///
/// # Errors
/// [`BackupFault::ReadsOtherwise`]; what cannot be read.
pub(super) fn compare(
    disk: &Disk,
    path: &Path,
    store: &Arc<dyn Store>,
    options: &ConvertOptions,
    watch: Watch<'_>,
) -> Result<()> {
    if let Some(raw) = store.local().and_then(LocalFile::raw) {
        let dropped = rustix::fs::fadvise(raw, 0, None, rustix::fs::Advice::DontNeed);
        dropped.map_err(std::io::Error::from).while_trying("drop the target from memory")?;
    }
    let format = match options.format {
        RestoreFormat::Qcow2 => Format::Qcow2,
        RestoreFormat::Raw => Format::Raw,
    };
    let opener = Arc::new(Made { path: path.to_owned(), store: Arc::clone(store) });
    let open = OpenOptions {
        read_only: true,
        format: Some(format),
        format_is_exact: true,
        opener: Arc::clone(&opener) as Arc<dyn Opener>,
        allow_backing: disk.layers().iter().map(|layer| layer.path.clone()).collect(),
        ..OpenOptions::default()
    };
    let resources = Resources::start_with(ResourceOptions::default(), opener)?;
    let made = Disk::open(path, &open, &resources)?;
    // A device may be larger.
    let fits = if format == Format::Raw { made.size() >= disk.size() } else { made.size() == disk.size() };
    if !fits {
        let at = GuestOffset::new(made.size().min(disk.size()));
        return Err(BackupFault::ReadsOtherwise { at }.into());
    }
    let crew = Crew::new(options.threads, options.bytes_per_second);
    let done = AtomicU64::new(0);
    in_turns(
        &crew,
        of_disk(disk, BLOCK, None),
        || Ok([vec![0; PIECE as usize], vec![0; PIECE as usize]]),
        |job, [expected, found], _| {
            let len = job.len();
            match job {
                Job::Piece(piece) => {
                    crew.wait(piece.len as u64);
                    disk.read(piece.at, &[Segment::from_mut(&mut expected[..piece.len])])?;
                    read_same(&made, piece.at, &expected[..piece.len], &mut found[..piece.len])?;
                }
                Job::Hole(range) => {
                    expected.fill(0);
                    reads_zero(&made, range, expected, found)?;
                }
            }
            done.fetch_add(len, Ordering::Relaxed);
            Ok(())
        },
        || {
            if watch(done.load(Ordering::Relaxed), disk.size()) {
                Ok(())
            } else {
                Err(BackupFault::Stopped.into())
            }
        },
    )
}

/// Makes sure that a range is zeros; what the target has no data for is.
fn reads_zero(made: &Disk, range: GuestRange, zeros: &[u8], found: &mut [u8]) -> Result<()> {
    let mut rest = range;
    while rest.len > 0 {
        let extent = made.extents(rest, 1)?[0];
        let mut len = extent.range.len;
        if !extent.kind.reads_zero() {
            len = len.min(PIECE);
            read_same(made, rest.start, &zeros[..len as usize], &mut found[..len as usize])?;
        }
        rest = GuestRange::new(rest.start + len, rest.len - len);
    }
    Ok(())
}

/// Reads `found` and makes sure that it is what was expected.
fn read_same(made: &Disk, at: GuestOffset, expected: &[u8], found: &mut [u8]) -> Result<()> {
    made.read(at, &[Segment::from_mut(found)])?;
    if expected == found {
        return Ok(());
    }
    let first = expected.iter().zip(&*found).take_while(|(one, other)| one == other).count();
    Err(BackupFault::ReadsOtherwise { at: at + first as u64 }.into())
}
