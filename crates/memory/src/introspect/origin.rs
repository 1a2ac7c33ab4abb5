//! What leads to the bytes of clean pages on the guest's disks: buffer heads, which say it, and files, whose file systems do.

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

/// Index into [`super::Pages::devices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceIndex(pub u32);

/// What a file system lies on: a disk, or a partition of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// The disk.
    pub disk: DiskIndex,
    /// Where it begins on the disk, in bytes.
    pub start: u64,
}

/// A file system whose way with its page cache, and whose structures on disk, are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileSystem {
    /// ext4: buffer heads.
    Ext4,
    /// XFS: iomap.
    Xfs,
}

/// Clean pages of a file that the guest manages as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileFolio {
    /// The first page.
    pub first: Frame,
    /// Their number, at least 1.
    pub pages: u32,
    /// What the file system lies on.
    pub device: DeviceIndex,
    /// The file system.
    pub system: FileSystem,
    /// The number of the file's inode.
    pub inode: u64,
    /// Which page of the file the first one is.
    pub index: u64,
}

/// Pages of a device itself, as the guest caches them: structures of file systems that it may not have written back yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFolio {
    /// The first page.
    pub first: Frame,
    /// Their number, at least 1.
    pub pages: u32,
    /// The device.
    pub device: DeviceIndex,
    /// Which page of the device the first one is.
    pub index: u64,
}

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
