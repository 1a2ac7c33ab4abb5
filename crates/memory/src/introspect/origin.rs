//! Where the bytes of a clean page lie on the guest's disks, as its buffer heads say.

use crate::address::Frame;

/// A disk as the guest knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name, such as `vda`; as the guest wrote it, with anything but ASCII letters, digits, `-`, `_` and `!`
    /// replaced by `?`.
    pub name: String,
    /// The major number of its device.
    pub major: u32,
    /// The minor number of the whole disk.
    pub minor: u32,
}

/// Index into [`super::Pages::disks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskIndex(pub u32);

/// Bytes of a clean page that equal bytes of a disk, if the guest is to be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The page.
    pub frame: Frame,
    /// The first byte within the page.
    pub within_page: u16,
    /// Number of bytes; ends within the page.
    pub len: u16,
    /// The disk.
    pub disk: DiskIndex,
    /// The first byte on the whole disk (a partition's start is added already).
    pub offset: u64,
}
