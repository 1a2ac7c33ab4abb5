//! Memory of virtual machines: what its pages are for, snapshots of it, and restoring them.
//!
//! ```text
//!   Ram (blocks of guest-physical memory) ──► introspection ──► ClassMap: free, clean or critical
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`address`] | guest-physical and guest-virtual addresses, page frames |
//! | [`ram`] | reading a guest's memory where its hypervisor keeps it |
//! | [`class`] | what a page is worth: a [`ClassMap`] has one class a frame |
//! | [`introspect`] | what a Linux guest uses its pages for |
//! | [`hide`] | how to tell a guest that pages of its cache are gone |
//! | [`disk`], [`filesystem`] | a guest's disks, and where on them the bytes of its files lie |
//! | [`refill`] | pages that need no copy, because the disks have their bytes |
//! | [`capture`] | taking a running guest: memory, devices and disks at one instant |
//! | [`restore`] | bringing it back: files of memory, what was lost hidden, devices |
//! | [`qmp`] | talking to a running QEMU |
//! | [`vault`] | the store of snapshots: copies by class, checksums, deduplication, repair |
//!
//! Invariants: a guest's memory is hostile input, and may change while it is read: every walk is bounded, and what is not
//! understood is [`PageClass::Critical`].

pub mod address;
pub mod capture;
pub mod class;
pub mod disk;
pub mod filesystem;
pub mod hide;
pub mod introspect;
pub mod qmp;
pub mod ram;
pub mod refill;
pub mod restore;
pub mod vault;

pub use address::{Frame, PAGE_BITS, PAGE_BYTES, Physical, Virtual};
pub use class::{ClassMap, FrameMap, PageClass};
pub use introspect::{Introspection, Pages, Unreadable};
pub use ram::{Block, Layout, LayoutError, Ram, RamError};

/// What a caller's own part of a capture or restore fails with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
