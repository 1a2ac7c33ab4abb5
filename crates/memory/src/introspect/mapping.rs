//! Which file a page of cache belongs to, and whether the rules for clean pages hold for that file.
//!
//! The answer is the same for all pages of a file, so it is kept for the length of a pass, by the mapping's address.

use std::collections::HashMap;

use super::origin::FileSystem;
use super::shapes::Files;
use super::view::View;
use crate::address::Virtual;

/// What a mapping stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A regular file whose pages may be clean.
    File(FileCache),
    /// The block device there, or what a file system keeps through it; where it lies may not be known.
    BlockDevice(Option<Virtual>),
    /// tmpfs, shared memory, the kernel's own temporary files.
    Shmem,
    /// Any other file system, or a file that the rules leave out.
    Other,
}

/// A regular file on ext4 or XFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileCache {
    /// Which of the two.
    pub system: FileSystem,
    /// Base-2 logarithm of the file system's block size.
    pub block_bits: u32,
    /// The file system's block device.
    pub device: Virtual,
    /// The number of the file's inode.
    pub inode: u64,
}

/// `S_IFMT` and `S_IFREG`.
const MODE_KIND: u16 = 0o170_000;
const MODE_REGULAR: u16 = 0o100_000;
/// `S_SWAPFILE`, `S_DAX`, `S_ENCRYPTED`, `S_VERITY`: reading again is not plain reading.
const INODE_FLAGS_LEFT_OUT: u32 = 1 << 8 | 1 << 13 | 1 << 14 | 1 << 16;
/// `AS_EIO`, `AS_ENOSPC`, `AS_MM_ALL_LOCKS`, `AS_UNEVICTABLE`, `AS_EXITING`: errors, pinned pages, a file on its way out.
const MAPPING_FLAGS_LEFT_OUT: u64 = 0b1_1111;
/// Lower numbers are ext4's journal, quotas and the like.
const EXT4_FIRST_INODE: u64 = 11;
/// 512 bytes to 64 KiB.
const BLOCK_BITS: std::ops::RangeInclusive<u8> = 9..=16;
/// Mappings kept in mind: beyond this, a guest with that many files is asked again.
const OWNERS_MAX: usize = 1 << 20;

/// The owners known so far.
pub(super) struct Owners {
    files: Files,
    known: HashMap<Virtual, Owner>,
    /// The mapping asked for last: neighbours mostly belong to one file.
    last: Option<(Virtual, Owner)>,
}

impl Owners {
    /// None known yet.
    pub(super) fn new(files: Files) -> Self {
        Self { files, known: HashMap::new(), last: None }
    }

    /// What the mapping at `mapping` stands for; what cannot be read is [`Owner::Other`].
    pub(super) fn of(&mut self, view: &mut View<'_>, mapping: Virtual) -> Owner {
        if let Some((_, owner)) = self.last.filter(|(last, _)| *last == mapping) {
            return owner;
        }
        let owner = match self.known.get(&mapping) {
            Some(&owner) => owner,
            None => self.learn(view, mapping),
        };
        self.last = Some((mapping, owner));
        owner
    }

    fn learn(&mut self, view: &mut View<'_>, mapping: Virtual) -> Owner {
        if self.known.len() == OWNERS_MAX {
            self.known.clear();
        }
        let owner = self.files.owner(view, mapping).unwrap_or(Owner::Other);
        self.known.insert(mapping, owner);
        owner
    }
}

impl Files {
    fn owner(&self, view: &mut View<'_>, mapping: Virtual) -> Option<Owner> {
        let member = |at: Virtual, offset: usize| at.checked_add(offset as u64);
        let inode = view.pointer(member(mapping, self.host)?)?;
        let super_block = view.pointer(member(inode, self.super_block)?)?;
        let kind = view.pointer(member(super_block, self.kind)?)?;
        let name = view.pointer(member(kind, self.name)?)?;
        let name = view.bytes::<8>(name)?;
        let is = |wanted: &[u8]| name.starts_with(wanted) && name.get(wanted.len()) == Some(&0);
        let system = match () {
            () if is(b"ext4") => FileSystem::Ext4,
            () if is(b"xfs") => FileSystem::Xfs,
            () if is(b"bdev") => {
                let before = self.device_inode.and_then(|before| inode.get().checked_sub(before as u64));
                return Some(Owner::BlockDevice(before.map(Virtual::new)));
            }
            () if is(b"tmpfs") || name == *b"devtmpfs" => return Some(Owner::Shmem),
            () => return Some(Owner::Other),
        };
        let mode = u16::from_le_bytes(view.bytes(member(inode, self.mode)?)?);
        let inode_flags = view.u32(member(inode, self.inode_flags)?)?;
        let mapping_flags = view.u64(member(mapping, self.mapping_flags)?)?;
        let number = view.u64(member(inode, self.number)?)?;
        let [block_bits] = view.bytes(member(inode, self.block_bits)?)?;
        let device = view.pointer(member(super_block, self.device)?)?;
        let internal = system == FileSystem::Ext4 && number < EXT4_FIRST_INODE;
        let plain = mode & MODE_KIND == MODE_REGULAR
            && view.pointer(member(inode, self.mapping)?)? == mapping
            && inode_flags & INODE_FLAGS_LEFT_OUT == 0
            && mapping_flags & MAPPING_FLAGS_LEFT_OUT == 0
            && BLOCK_BITS.contains(&block_bits)
            && device.get() != 0
            && !internal;
        let file = FileCache { system, block_bits: u32::from(block_bits), device, inode: number };
        Some(if plain { Owner::File(file) } else { Owner::Other })
    }
}
