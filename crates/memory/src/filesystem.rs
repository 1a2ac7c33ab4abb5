//! Where the bytes of files lie, read from the structures of their file systems on disk.
//!
//! ```text
//!   FileSystem + Device ──► Files::open: geometry ──► find: inode, byte ──► Run of bytes on the device
//! ```
//!
//! For pages of cache that say only which file they are of. The file system is in use while it is looked at, and may not
//! have written back its latest changes: whoever asks compares bytes before believing an answer.
//!
//! Invariants: a device is hostile. A lookup reads at most a few blocks, whatever they say; nothing is kept but the inode
//! and the run found last.

mod ext4;
mod xfs;

use crate::introspect::FileSystem;

/// A file system's device.
pub trait ReadDevice {
    /// Fills `into` from `offset` on; `None` when that cannot be read.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Option<()>;
}

/// Any bytes are a device.
impl ReadDevice for &[u8] {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Option<()> {
        let from = self.get(usize::try_from(offset).ok()?..)?;
        into.copy_from_slice(from.get(..into.len())?);
        Some(())
    }
}

/// Bytes of a file that lie on the device in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first byte on the device.
    pub offset: u64,
    /// Their number, at least 1.
    pub len: u64,
}

/// The blocks of a file that follow one another both in the file and on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    /// The first block in the file.
    first: u64,
    /// The first byte on the device.
    offset: u64,
    /// Number of blocks.
    blocks: u64,
}

impl Extent {
    fn holds(&self, block: u64) -> bool {
        block.checked_sub(self.first).is_some_and(|within| within < self.blocks)
    }
}

/// Whether an inode's mode is that of a regular file.
const fn is_regular(mode: u16) -> bool {
    const KIND: u16 = 0o170_000;
    const REGULAR: u16 = 0o100_000;
    mode & KIND == REGULAR
}

enum Kind {
    Ext4(ext4::Ext4),
    Xfs(xfs::Xfs),
}

enum Inode {
    Ext4(ext4::Inode),
    Xfs(xfs::Inode),
}

/// The files of a file system. Questions in order of inodes and bytes are answered fastest.
pub struct Files<D> {
    device: D,
    kind: Kind,
    /// The inode found last, or `None` for one that is of no use.
    inode: Option<(u64, Option<Inode>)>,
    /// The extent found last, of that inode.
    extent: Option<Extent>,
}

impl<D: ReadDevice> Files<D> {
    /// Reads the geometry; `None` where there is no such file system, or one of a kind that is not understood.
    pub fn open(system: FileSystem, mut device: D) -> Option<Self> {
        let kind = match system {
            FileSystem::Ext4 => Kind::Ext4(ext4::Ext4::open(&mut device)?),
            FileSystem::Xfs => Kind::Xfs(xfs::Xfs::open(&mut device)?),
        };
        Some(Self { device, kind, inode: None, extent: None })
    }

    /// Where the bytes from `at` on of the regular file `inode` lie; `None` for holes and what cannot be found out.
    pub fn find(&mut self, inode: u64, at: u64) -> Option<Run> {
        if self.inode.as_ref().is_none_or(|(known, _)| *known != inode) {
            self.extent = None;
            self.inode = Some((inode, self.read_inode(inode)));
        }
        let bits = self.block_bits();
        let block = at >> bits;
        if !self.extent.is_some_and(|extent| extent.holds(block)) {
            self.extent = self.find_extent(block).filter(|extent| extent.holds(block));
        }
        let extent = self.extent?;
        let within = at.checked_sub(extent.first.checked_mul(1 << bits)?)?;
        let len = extent.blocks.checked_mul(1 << bits)?.checked_sub(within)?;
        let offset = extent.offset.checked_add(within)?;
        offset.checked_add(len).map(|_| Run { offset, len })
    }

    fn block_bits(&self) -> u32 {
        match &self.kind {
            Kind::Ext4(ext4) => ext4.block_bits(),
            Kind::Xfs(xfs) => xfs.block_bits(),
        }
    }

    fn read_inode(&mut self, number: u64) -> Option<Inode> {
        Some(match &self.kind {
            Kind::Ext4(ext4) => Inode::Ext4(ext4.inode(&mut self.device, number)?),
            Kind::Xfs(xfs) => Inode::Xfs(xfs.inode(&mut self.device, number)?),
        })
    }

    fn find_extent(&mut self, block: u64) -> Option<Extent> {
        let (_, inode) = self.inode.as_ref()?;
        match (&self.kind, inode.as_ref()?) {
            (Kind::Ext4(ext4), Inode::Ext4(inode)) => ext4.find(&mut self.device, inode, block),
            (Kind::Xfs(xfs), Inode::Xfs(inode)) => xfs.find(&mut self.device, inode, block),
            _ => None,
        }
    }
}

/// Numbers in bytes; `None` past their end.
mod field {
    fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
        bytes.get(at..)?.first_chunk().copied()
    }

    pub(super) fn le16(bytes: &[u8], at: usize) -> Option<u16> {
        array(bytes, at).map(u16::from_le_bytes)
    }

    pub(super) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
        array(bytes, at).map(u32::from_le_bytes)
    }

    pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
        array(bytes, at).map(u16::from_be_bytes)
    }

    pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
        array(bytes, at).map(u32::from_be_bytes)
    }

    pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
        array(bytes, at).map(u64::from_be_bytes)
    }
}
