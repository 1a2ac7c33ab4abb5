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

/// Clean pages of a file that follow one another, in memory as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePages {
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
    /// Whether the guest's kernel keeps them longer than others.
    pub is_hot: bool,
}

impl FilePages {
    /// These and those behind them, which `next` are; `None` if `next` are others.
    pub(super) fn and(self, next: Self) -> Option<Self> {
        let len = u64::from(self.pages);
        let of_file = |pages: Self| (pages.device, pages.system, pages.inode, pages.is_hot);
        let follow = of_file(self) == of_file(next)
            && self.first.get().checked_add(len) == Some(next.first.get())
            && self.index.checked_add(len) == Some(next.index);
        let pages = self.pages.checked_add(next.pages).filter(|_| follow)?;
        Some(Self { pages, ..self })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_go_on_where_memory_and_file_both_do() {
        let pages = |first: u64, pages: u32, index: u64| {
            let (device, system) = (DeviceIndex(0), FileSystem::Ext4);
            FilePages { first: Frame::new(first), pages, device, system, inode: 12, index, is_hot: false }
        };
        assert_eq!(pages(10, 2, 5).and(pages(12, 4, 7)), Some(pages(10, 6, 5)));
        for next in [
            pages(13, 1, 7),
            pages(12, 1, 8),
            FilePages { inode: 13, ..pages(12, 1, 7) },
            FilePages { is_hot: true, ..pages(12, 1, 7) },
        ] {
            assert_eq!(pages(10, 2, 5).and(next), None);
        }
        assert_eq!(pages(10, 2, u64::MAX - 1).and(pages(12, 1, 0)), None);
        assert_eq!(pages(0, u32::MAX, 0).and(pages(u32::MAX.into(), 1, u32::MAX.into())), None);
    }
}
