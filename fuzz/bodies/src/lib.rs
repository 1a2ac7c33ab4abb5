//! What hostile bytes are fed to, and what must hold whatever they are.
//!
//! ```text
//!   seeds, mutated ──► tests/bodies.rs (stable) ──┐
//!                                                 ├──► a body ──► qcow2, disk, export, memory
//!   libFuzzer ──► fuzz/targets (nightly) ─────────┘
//! ```
//!
//! | body | its bytes are | they reach |
//! |---|---|---|
//! | [`qcow2_header`] | the first cluster of an image | header, extensions, backing file name |
//! | [`qcow2_tables`] | entries of tables | L1, L2, refcounts, snapshots, bitmaps |
//! | [`image_open`] | a whole image | the engine and the check |
//! | [`index`](fn@index) | changes to an index on disk | its reader, and the map that it makes |
//! | [`journal`] | what a killed process left beside an image | the journal's recovery |
//! | [`nbd_decode`] | one message | the decoders of the NBD server |
//! | [`nbd_client`] | all that a client says | an NBD server on a disk |
//! | [`vault`](fn@vault) | changes to a snapshot of memory | the reader of the store of snapshots |
//! | [`vmcoreinfo`](fn@vmcoreinfo) | the start of a guest's memory | the search for its kernel |
//! | [`btf`](fn@btf) | the types of a guest's kernel | their reader |
//! | [`migration_stream`](fn@migration_stream) | what QEMU says of a guest | what takes pages out of it |
//! | [`filesystem`](fn@filesystem) | sectors of a guest's disk | the readers of its file systems |
//! | [`vhost_request`] | guest memory, and what is written to it meanwhile | a vhost-user queue on a disk |
//!
//! Invariants: a body panics only when what it feeds is wrong, needs at most some tens of MiB and, on an idle machine,
//! some tens of milliseconds, and leaves nothing behind that changes what it does next time.

#![forbid(unsafe_code)]

mod filesystem;
mod header;
mod image;
mod index;
mod introspect;
mod journal;
mod memory_file;
mod migration_stream;
mod nbd_client;
mod nbd_decode;
mod scratch;
mod tables;
mod vault;
mod vhost;

pub use filesystem::filesystem;
pub use header::qcow2_header;
pub use image::image_open;
pub use index::index;
pub use introspect::{btf, vmcoreinfo};
pub use journal::journal;
pub use migration_stream::migration_stream;
pub use nbd_client::nbd_client;
pub use nbd_decode::nbd_decode;
pub use tables::qcow2_tables;
pub use vault::vault;
pub use vhost::vhost_request;

/// A body with its name, which is also that of its target and of its directory of seeds.
pub type Body = (&'static str, fn(&[u8]));

/// All of them.
pub const BODIES: [Body; 13] = [
    ("qcow2_header", qcow2_header),
    ("qcow2_tables", qcow2_tables),
    ("image_open", image_open),
    ("index", index),
    ("journal", journal),
    ("nbd_decode", nbd_decode),
    ("nbd_client", nbd_client),
    ("vhost_request", vhost_request),
    ("vault", vault),
    ("vmcoreinfo", vmcoreinfo),
    ("btf", btf),
    ("migration_stream", migration_stream),
    ("filesystem", filesystem),
];
