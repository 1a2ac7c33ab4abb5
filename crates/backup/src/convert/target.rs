//! Where converted bytes go: a new qcow2 image, a raw store, or a pipe.
//!
//! A file is written in turn, from front to back: its clusters have the order of the disk, and a file system lets one thread write at a time
//! anyway. What is written in place, a device or an export, is written by all threads at once.

use std::io::Write;
use std::ops::Range;

use parking_lot::Mutex;
use vmstrata_disk::{IoContext as _, Result};
use vmstrata_qcow2::{L2Entry, SubclusterState, Subclusters};
use vmstrata_store::Store;
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use super::pieces::{Mark, PIECE, Piece};
use crate::compress::Packer;
use crate::head::Shape;
use crate::packed::PackedFile;
use crate::raw_disk::make_zeros;
use crate::turns::Turn;

/// What a thread works with.
pub(super) struct Scratch {
    /// The bytes of a piece.
    pub(super) bytes: Vec<u8>,
    /// The compressed ones.
    packed: Vec<u8>,
    packer: Option<Packer>,
}

impl Scratch {
    /// # Errors
    /// As [`Packer::new`].
    pub(super) fn new(shape: Option<&Shape>) -> Result<Self> {
        let packer = shape.and_then(|shape| shape.compression).map(Packer::new).transpose()?;
        let packed = if packer.is_some() { PIECE as usize } else { 0 };
        Ok(Self { bytes: vec![0; PIECE as usize], packed: vec![0; packed], packer })
    }
}

/// See the module documentation.
pub(super) enum Target<'a> {
    Image {
        file: Box<Mutex<PackedFile<'a>>>,
        shape: &'a Shape,
        store: &'a dyn Store,
    },
    /// A raw disk that is zeros so far.
    New(&'a dyn Store),
    /// One that may have other bytes.
    Used(&'a dyn Store),
    Stream(Mutex<&'a mut (dyn Write + Send)>),
}

/// A cluster that is stored.
struct Cluster {
    at: GuestOffset,
    states: Subclusters,
    /// Where its bytes begin in the piece.
    from: usize,
    /// Its compressed bytes, if it has any.
    packed: Option<Range<usize>>,
}

/// Bytes of a thread, and where they go.
struct Move {
    to: HostOffset,
    from: Range<usize>,
    is_packed: bool,
}

impl Target<'_> {
    /// Stores a piece that was read into `scratch`; returns the bytes of data in it.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(super) fn put(&self, piece: &Piece, scratch: &mut Scratch, turn: Turn<'_>) -> Result<u64> {
        let data: usize = piece.runs(Mark::Data).map(|run| run.end.min(piece.len) - run.start).sum();
        match self {
            Self::Image { file, shape, store } => {
                let clusters = clusters_of(piece, shape, scratch);
                turn.take(|| write(*store, &place(&mut file.lock(), &clusters, shape)?, scratch))?;
            }
            Self::New(store) => turn.take(|| write_runs(*store, piece, scratch))?,
            Self::Used(store) => {
                write_runs(*store, piece, scratch)?;
                for run in piece.runs(Mark::Absent) {
                    let len = run.end.min(piece.len) - run.start;
                    make_zeros(*store, piece.at.get() + run.start as u64, len as u64)?;
                }
            }
            Self::Stream(stream) => {
                piece.runs(Mark::Absent).for_each(|run| scratch.bytes[run].fill(0));
                turn.take(|| {
                    stream.lock().write_all(&scratch.bytes[..piece.len]).while_trying("write the disk")
                })?;
            }
        }
        Ok(data as u64)
    }

    /// Stores zeros.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(super) fn put_hole(&self, range: GuestRange, turn: Turn<'_>) -> Result<()> {
        match self {
            Self::Image { .. } | Self::New(_) => turn.take(|| Ok(())),
            Self::Used(store) => make_zeros(*store, range.start.get(), range.len),
            Self::Stream(stream) => turn.take(|| {
                let zeros = vec![0; range.len.min(PIECE) as usize];
                let mut rest = range.len;
                while rest > 0 {
                    let len = rest.min(PIECE);
                    stream.lock().write_all(&zeros[..len as usize]).while_trying("write the disk")?;
                    rest -= len;
                }
                Ok(())
            }),
        }
    }

    /// Ends a disk of `size` bytes.
    ///
    /// # Errors
    /// A size that the format does not allow; whatever the host reports.
    pub(super) fn finish(self, size: u64) -> Result<()> {
        match self {
            Self::Image { file, .. } => file.into_inner().finish(size),
            Self::New(store) => store.set_len(size).while_trying("write the disk"),
            Self::Used(_) => Ok(()),
            Self::Stream(stream) => stream.into_inner().flush().while_trying("write the disk"),
        }
    }
}

/// Writes the data of a raw disk.
fn write_runs(store: &dyn Store, piece: &Piece, scratch: &Scratch) -> Result<()> {
    for run in piece.runs(Mark::Data) {
        let at = HostOffset::new(piece.at.get() + run.start as u64);
        let bytes = &scratch.bytes[run.start..run.end.min(piece.len)];
        store.write_all(bytes, at).while_trying("write the disk")?;
    }
    Ok(())
}

/// The clusters of a piece that are stored, compressed as far as that helps.
fn clusters_of(piece: &Piece, shape: &Shape, scratch: &mut Scratch) -> Vec<Cluster> {
    let Scratch { bytes, packed, packer } = scratch;
    let cluster = shape.bits.size() as usize;
    let per_cluster = cluster / piece.unit_size();
    let mut filled = 0;
    let mut stored = Vec::new();
    for (number, marks) in piece.marks.chunks(per_cluster).enumerate() {
        let bits = |mark| {
            let bit = |(at, found): (u32, &Mark)| u32::from(*found == mark) << at;
            if per_cluster == 1 && marks[0] == mark { u32::MAX } else { (0..).zip(marks).map(bit).sum() }
        };
        let states = Subclusters { allocated: bits(Mark::Data), zero: bits(Mark::Zero) };
        if states == Subclusters::NOTHING {
            continue;
        }
        let from = number * cluster;
        let packed = packer.as_mut().filter(|_| states.allocated != 0).and_then(|packer| {
            let len = packer.pack(&bytes[from..from + cluster], &mut packed[filled..])?;
            filled += len;
            Some(filled - len..filled)
        });
        stored.push(Cluster { at: piece.at + from as u64, states, from, packed });
    }
    stored
}

/// Gives clusters their places, and enters them; what is to be written.
fn place(file: &mut PackedFile<'_>, clusters: &[Cluster], shape: &Shape) -> Result<Vec<Move>> {
    let part = shape.bits.size() / u64::from(Subclusters::COUNT);
    let mut moves = Vec::with_capacity(clusters.len());
    for cluster in clusters {
        let entry = if let Some(packed) = &cluster.packed {
            let to = file.claim_packed(packed.len());
            moves.push(Move { to, from: packed.clone(), is_packed: true });
            L2Entry::Compressed { host: to, len: packed.len() as u64 }
        } else if cluster.states.allocated == 0 {
            L2Entry::of_subclusters(None, false, cluster.states)
        } else {
            let host = file.claim(1);
            let runs = cluster.states.runs().filter(|(.., state)| *state == SubclusterState::Allocated);
            moves.extend(runs.map(|(first, count, _)| {
                let skip = u64::from(first) * part;
                let start = cluster.from + skip as usize;
                let from = start..start + (u64::from(count) * part) as usize;
                Move { to: host + skip, from, is_packed: false }
            }));
            L2Entry::of_subclusters(Some(host), true, cluster.states)
        };
        file.enter(cluster.at, entry)?;
    }
    Ok(moves)
}

/// Writes neighbours that go to neighbouring places at once.
fn write(store: &dyn Store, moves: &[Move], scratch: &Scratch) -> Result<()> {
    let goes_on = |one: &Move, next: &Move| {
        let is_next = one.from.end == next.from.start && one.to + one.from.len() as u64 == next.to;
        one.is_packed == next.is_packed && is_next
    };
    for run in moves.chunk_by(goes_on) {
        let (first, end) = (&run[0], run[run.len() - 1].from.end);
        let bytes = if first.is_packed { &scratch.packed } else { &scratch.bytes };
        let written = store.write_all(&bytes[first.from.start..end], first.to);
        written.while_trying("write the image").map_err(|error| error.at(first.to))?;
    }
    Ok(())
}
