//! The qcow2 format: bytes to structs and back.
//!
//! Everything here is a pure function of bytes. The engine (`vmstrata-disk`) reads a file, hands the bytes to
//! this crate, and gets either a struct whose every field was checked or an error that names the field and its
//! byte offset in the file; on the way out it hands over structs and writes the bytes it gets back.
//!
//! | module | on disk |
//! |---|---|
//! | [`header`] | the first 72 to `header_length` bytes |
//! | [`extension`] | what lies between the header and the backing file name |
//! | [`entry`] | entries of L1 and L2 tables |
//! | [`refcount`] | the refcount table and its blocks |
//! | [`geometry`] | which table entry maps a guest offset |
//! | [`snapshot`], [`bitmap`] | the tables through which internal snapshots and bitmaps hold clusters |
//! | [`snapshot_info`] | what an overlay says of the snapshot below it |
//! | [`index`] | vmstrata's own map of a whole chain, outside the tables |
//! | [`create`] | the bytes of an empty image |
//! | [`probe`] | by which first and last bytes a file is known for an image |
//!
//! Invariants: nothing here allocates more than the bytes it was given allow, nothing panics on any input that
//! came from a file, and no value leaves a parser that QEMU's own limits would refuse. Versions 2 and 3 are
//! understood; encryption and external data files are refused by name.
//!
//! ```
//! use vmstrata_qcow2::{CreateOptions, Header, L2Entry, RawEntry, new_image};
//!
//! let image = new_image(&CreateOptions::new(1 << 30))?;
//! let (_, first_cluster) = image.parts.last().expect("the header");
//! let header = Header::parse(first_cluster, image.file_len)?;
//! assert_eq!(header.size, 1 << 30);
//! assert_eq!(header.entry_format().l2(RawEntry::EMPTY)?, L2Entry::Unallocated);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Source: `docs/interop/qcow2.txt` of QEMU (called *the specification* below); limits that it leaves to
//! implementations follow QEMU 7.2.

#![forbid(unsafe_code)]

mod bytes;
mod error;
mod feature;

pub mod bitmap;
pub mod create;
pub mod entry;
pub mod extension;
pub mod geometry;
pub mod header;
pub mod index;
pub mod probe;
pub mod refcount;
pub mod snapshot;
pub mod snapshot_info;

pub use create::{CreateError, CreateOptions, NewBacking, NewImage, new_image};
pub use entry::{EntryError, EntryFormat, L1Entry, L2Entry, RawEntry, SubclusterState, Subclusters};
pub use error::{ParseError, ParseErrorKind};
pub use extension::{Extension, Extensions};
pub use feature::{Autoclear, Compatible, CompressionType, Incompatible};
pub use geometry::Geometry;
pub use header::{BackingName, EncodeError, Header};
pub use probe::ImageFormat;
pub use refcount::RefcountOrder;
pub use snapshot_info::{LayerRecord, SnapshotInfo, SnapshotInfoError};
