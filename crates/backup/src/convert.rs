//! Converting a disk into an image or a raw disk: all of it, or what its own layer says.
//!
//! ```text
//!   Disk::extents ─► pieces ─► threads: read, find zeros, compress ─► in turn: claim host clusters, write ─► tables, header
//!   or a stream
//! ```
//!
//! A new image is written in the order of the disk, without a journal and without counting references on the way: tables follow the
//! clusters that they are about, and the header comes last. A new file gets its name when it is whole.
//!
//! A piece is read and written by one thread, so that its bytes stay in the processor's cache in between.

mod check;
mod pieces;
mod target;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_disk::create::reserve;
use vmstrata_disk::{AtomicFile, Disk, Error, IoContext as _, Result, copy_access, let_owner_write};
use vmstrata_qcow2::{CompressionType, NewBacking};
use vmstrata_store::Store;
use vmstrata_types::{ClusterBits, LayerIndex};

use crate::Watch;
use crate::before::stands_on;
use crate::fault::BackupFault;
use crate::head::{self, Shape};
use crate::packed::PackedFile;
use crate::pipeline::Crew;
use crate::raw_disk::{check_room, is_device, open_device, store_of};
use crate::restore::RestoreFormat;
use crate::turns::in_turns;
use check::compare;
use pieces::{Job, Mark, of_disk, of_stream};
use target::{Scratch, Target};

/// Zeros in a raw file are left out by blocks of a file system.
const BLOCK: ClusterBits = ClusterBits::new(12).expect("4 KiB");

/// What is converted.
pub enum ConvertSource<'a> {
    /// A disk that nothing writes meanwhile.
    Disk(Arc<Disk>),
    /// A raw disk's bytes, in order.
    Stream(&'a mut (dyn Read + Send)),
}

/// Where it goes.
pub enum ConvertTarget<'a> {
    /// A new file, or a block device.
    Path(PathBuf),
    /// Something else that holds a raw disk, and what to call it. It keeps its size.
    Store(PathBuf, Arc<dyn Store>),
    /// Anything that takes bytes in order.
    Stream(&'a mut (dyn Write + Send)),
}

/// How to convert.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Into what; the options down to `backing` are an image's.
    pub format: RestoreFormat,
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Give each cluster 32 subclusters.
    pub subclusters: bool,
    /// Compress clusters.
    pub compression: Option<CompressionType>,
    /// Store only what the disk's newest layer says, on this backing file, which reads as what lies below that layer. The layers
    /// of the disk must be in place.
    pub backing: Option<NewBacking>,
    /// Replace what is at the target.
    pub replace: bool,
    /// Bring everything to stable storage before the target gets its name.
    pub sync: bool,
    /// Read the target again, from its storage, and compare it with the disk. Needs `sync`.
    pub verify: bool,
    /// Bytes read per second at most.
    pub bytes_per_second: Option<u64>,
    /// Threads; 0 for as many as suit the host.
    pub threads: usize,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            format: RestoreFormat::Qcow2,
            cluster_bits: ClusterBits::DEFAULT,
            subclusters: false,
            compression: None,
            backing: None,
            replace: false,
            sync: true,
            verify: false,
            bytes_per_second: None,
            threads: 0,
        }
    }
}

/// What a conversion did.
#[derive(Clone, Copy, Debug)]
pub struct ConvertReport {
    /// Virtual size of the disk.
    pub disk_bytes: u64,
    /// Bytes of the disk that are stored in the target, before any compression.
    pub data_bytes: u64,
    /// How long it took.
    pub took: Duration,
}

/// Bytes of a disk that are data as far as its tables tell: all of it, or with `alone` what its newest layer says.
///
/// # Errors
/// Tables that cannot be read; [`BackupFault::Stopped`].
pub fn data_bytes(disk: &Disk, alone: bool, watch: Watch<'_>) -> Result<u64> {
    let (mut done, mut data) = (0, 0);
    for job in of_disk(disk, BLOCK, alone.then(|| newest_of(disk))) {
        let job = job?;
        (done, data) = (done + job.len(), data + job.to_read());
        if !watch(done, disk.size()) {
            return Err(BackupFault::Stopped.into());
        }
    }
    Ok(data)
}

/// Converts a disk.
///
/// # Errors
/// Options that do not go together; a disk that cannot be read; a target that is there already (unless it may be replaced) or cannot
/// be written, or that reads otherwise than the disk. A new file does not appear then, and what it was to replace is
/// unchanged; what is written in place holds a part of the disk.
pub fn convert(
    source: ConvertSource<'_>,
    target: ConvertTarget<'_>,
    options: &ConvertOptions,
    watch: Watch<'_>,
) -> Result<ConvertReport> {
    let started = Instant::now();
    check_options(&source, &target, options)?;
    let disk = match &source {
        ConvertSource::Disk(disk) => Some(Arc::clone(disk)),
        ConvertSource::Stream(_) => None,
    };
    let size = disk.as_ref().map_or(0, |disk| disk.size());
    let mut job = Conversion { source, options, started, watch };
    match target {
        ConvertTarget::Path(path) if !is_device(&path) => {
            job.write_file(disk.as_deref(), &path).map_err(|error| error.in_file(&path))
        }
        ConvertTarget::Path(path) => {
            let device = open_device(&path, size).map_err(|error| error.in_file(&path))?;
            job.write_store(disk.as_deref(), &path, Arc::new(device)).map_err(|error| error.in_file(&path))
        }
        ConvertTarget::Store(name, store) => {
            check_room(&*store, size).map_err(|error| error.in_file(&name))?;
            job.write_store(disk.as_deref(), &name, store).map_err(|error| error.in_file(&name))
        }
        ConvertTarget::Stream(stream) => job.run(Target::Stream(Mutex::new(stream)), None),
    }
}

/// The layer that is on top of a disk.
fn newest_of(disk: &Disk) -> LayerIndex {
    disk.layers().last().expect("a disk has a layer").index
}

fn check_options(
    source: &ConvertSource<'_>,
    target: &ConvertTarget<'_>,
    options: &ConvertOptions,
) -> Result<()> {
    let is_raw = options.format == RestoreFormat::Raw;
    let is_file = matches!(target, ConvertTarget::Path(path) if !is_device(path));
    let is_stream = matches!(source, ConvertSource::Stream(_));
    let fault = match target {
        _ if is_raw && options.compression.is_some() => BackupFault::CompressedRaw,
        _ if is_raw && options.backing.is_some() => BackupFault::RawOnBacking,
        _ if is_stream && options.backing.is_some() => BackupFault::StreamOnBacking,
        ConvertTarget::Stream(_) if options.verify => BackupFault::StreamVerified,
        _ if is_stream && options.verify => BackupFault::StreamVerified,
        _ if is_stream && !is_file && !matches!(target, ConvertTarget::Stream(_)) => BackupFault::SizeUnknown,
        ConvertTarget::Path(_) if is_file => return Ok(()),
        _ if !is_raw => BackupFault::ImageOnDevice,
        ConvertTarget::Stream(_) => return Ok(()),
        _ if !options.replace => BackupFault::DeviceNotReplaced,
        _ => return Ok(()),
    };
    let error = Error::from(fault);
    Err(match target {
        ConvertTarget::Path(name) | ConvertTarget::Store(name, _) => error.in_file(name),
        ConvertTarget::Stream(_) => error,
    })
}

/// A conversion under way.
struct Conversion<'a, 's, 'w> {
    source: ConvertSource<'s>,
    options: &'a ConvertOptions,
    started: Instant,
    watch: Watch<'w>,
}

impl Conversion<'_, '_, '_> {
    fn write_file(&mut self, disk: Option<&Disk>, path: &Path) -> Result<ConvertReport> {
        let options = self.options;
        if options.replace
            && disk.is_some_and(|disk| stands_on(disk.path(), path) || stands_on(path, disk.path()))
        {
            return Err(BackupFault::OntoItself.into());
        }
        let shape = Shape {
            bits: options.cluster_bits,
            subclusters: options.subclusters,
            size: disk.map_or(0, Disk::size),
            backing: options.backing.clone(),
            compression: options.compression,
            index_room: true,
        };
        if options.format == RestoreFormat::Qcow2 {
            head::check(&shape)?;
        }
        let (replaced, draft) = reserve(path, options.replace)?;
        // A copy of a file is for those who may use the file.
        if let Some(file) = disk.map(Disk::path).filter(|file| replaced.is_none() && file.is_file()) {
            copy_access(file, &draft.file)?;
            let_owner_write(&draft.file)?;
        }
        let store = Arc::new(store_of(&draft, path)?);
        let done = match options.format {
            RestoreFormat::Qcow2 => {
                let file = Box::new(Mutex::new(PackedFile::new(&draft.file, &shape)));
                self.run(Target::Image { file, shape: &shape, store: &*store }, Some(&shape))?
            }
            RestoreFormat::Raw => self.run(Target::New(&*store), None)?,
        };
        self.end(disk, path, &(store as Arc<dyn Store>))?;
        self.name(draft, path)?;
        Ok(ConvertReport { took: self.started.elapsed(), ..done })
    }

    fn name(&self, draft: AtomicFile, path: &Path) -> Result<()> {
        if self.options.sync {
            draft.publish(path, self.options.replace)
        } else {
            draft.publish_unsynced(path, self.options.replace)
        }
    }

    fn write_store(
        &mut self,
        disk: Option<&Disk>,
        name: &Path,
        store: Arc<dyn Store>,
    ) -> Result<ConvertReport> {
        let done = self.run(Target::Used(&*store), None)?;
        self.end(disk, name, &store)?;
        Ok(ConvertReport { took: self.started.elapsed(), ..done })
    }

    /// Brings the target to stable storage, and compares it, as far as that is wanted.
    fn end(&mut self, disk: Option<&Disk>, path: &Path, store: &Arc<dyn Store>) -> Result<()> {
        if self.options.sync {
            store.flush().while_trying("flush the target")?;
        }
        match disk.filter(|_| self.options.verify) {
            // The second half of the work.
            Some(disk) => compare(disk, path, store, self.options, &mut |read, size| {
                (self.watch)(size.saturating_add(read), size.saturating_mul(2))
            }),
            None => Ok(()),
        }
    }

    fn run(&mut self, target: Target<'_>, shape: Option<&Shape>) -> Result<ConvertReport> {
        let options = self.options;
        let unit = match shape {
            // Nothing smaller than a cluster is compressed.
            Some(shape) if shape.compression.is_some() => shape.bits,
            Some(shape) => shape.geometry().unit(),
            None if matches!(target, Target::Used(_)) => ClusterBits::DEFAULT,
            None => BLOCK,
        };
        let zeros = if options.backing.is_some() { Mark::Zero } else { Mark::Absent };
        let crew = Crew::new(options.threads, options.bytes_per_second);
        let (done, data) = (AtomicU64::new(0), AtomicU64::new(0));
        let (disk, jobs, total): (_, Box<dyn Iterator<Item = Result<Job>> + Send>, _) = match &mut self.source
        {
            ConvertSource::Disk(disk) => {
                let alone = options.backing.as_ref().map(|_| newest_of(disk));
                (Some(&**disk), Box::new(of_disk(disk, unit, alone)), Some(disk.size()))
            }
            ConvertSource::Stream(stream) => (None, Box::new(of_stream(&mut **stream, unit)), None),
        };
        in_turns(
            &crew,
            jobs,
            || Scratch::new(shape),
            |job, scratch, turn| {
                let len = job.len();
                match job {
                    Job::Hole(range) => target.put_hole(range, turn)?,
                    Job::Piece(mut piece) => {
                        crew.wait(piece.to_read());
                        piece.read(disk, &mut scratch.bytes, zeros)?;
                        data.fetch_add(target.put(&piece, scratch, turn)?, Ordering::Relaxed);
                    }
                }
                done.fetch_add(len, Ordering::Relaxed);
                Ok(())
            },
            || {
                let done = done.load(Ordering::Relaxed);
                let times = if options.verify { 2 } else { 1 };
                let goes_on = (self.watch)(done, total.unwrap_or(done).saturating_mul(times));
                if goes_on { Ok(()) } else { Err(BackupFault::Stopped.into()) }
            },
        )?;
        let (size, data_bytes) = (total.unwrap_or(done.into_inner()), data.into_inner());
        target.finish(size)?;
        Ok(ConvertReport { disk_bytes: size, data_bytes, took: self.started.elapsed() })
    }
}
