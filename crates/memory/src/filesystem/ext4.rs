//! ext4: block groups, inode tables, extent trees and block maps. Source: Linux `Documentation/filesystems/ext4`.

use super::field::{le16, le32};
use super::{Extent, ReadDevice, is_regular};

const SUPER_OFFSET: u64 = 1024;
const SUPER_BYTES: usize = 1024;
const MAGIC: u16 = 0xef53;
/// `INCOMPAT_META_BG`: group descriptors all over the device.
const META_BG: u32 = 0x10;
/// `INCOMPAT_64BIT`: larger group descriptors.
const WIDE: u32 = 0x80;
/// `EXT4_EXTENTS_FL`: the inode's root is of an extent tree, not of a block map.
const FLAG_EXTENTS: u32 = 0x8_0000;
/// `EXT4_INLINE_DATA_FL`, `EXT4_ENCRYPT_FL`: the content is in the inode, or is not what is on disk.
const FLAGS_LEFT_OUT: u32 = 0x1000_0000 | 0x800;
const ROOT_OFFSET: usize = 40;
const ROOT_BYTES: usize = 60;
const EXTENT_MAGIC: u16 = 0xf30a;
const ENTRY_BYTES: usize = 12;
/// The kernel's `EXT4_MAX_EXTENT_DEPTH`.
const DEPTH_MAX: u16 = 5;
/// Longer extents hold no data yet.
const EXTENT_BLOCKS_MAX: u64 = 32_768;
/// Blocks that an inode names itself, before those of one, two and three levels of tables.
const DIRECT: u64 = 12;

/// The geometry of a file system.
#[derive(Debug)]
pub(super) struct Ext4 {
    block_bits: u32,
    blocks: u64,
    inodes: u32,
    inodes_per_group: u32,
    inode_bytes: u16,
    group_bytes: u16,
    /// Where the group descriptors begin.
    groups: u64,
}

/// What an inode says of its blocks.
#[derive(Debug)]
pub(super) struct Inode {
    has_extents: bool,
    root: [u8; ROOT_BYTES],
}

impl Ext4 {
    pub(super) fn open(device: &mut dyn ReadDevice) -> Option<Self> {
        let mut bytes = [0; SUPER_BYTES];
        device.read(SUPER_OFFSET, &mut bytes)?;
        let incompatible = le32(&bytes, 96)?;
        let block_bits = 10 + le32(&bytes, 24).filter(|&log| log <= 6)?;
        let is_wide = incompatible & WIDE != 0;
        let high = if is_wide { le32(&bytes, 336)? } else { 0 };
        let is_dynamic = le32(&bytes, 76)? > 0;
        let inode_bytes = if is_dynamic { le16(&bytes, 88)? } else { 128 };
        let group_bytes = if is_wide { le16(&bytes, 254)? } else { 32 };
        let first = u64::from(le32(&bytes, 20)?);
        let sound = le16(&bytes, 56)? == MAGIC
            && incompatible & META_BG == 0
            && inode_bytes.is_power_of_two()
            && (128..=1 << block_bits).contains(&u32::from(inode_bytes))
            && group_bytes.is_power_of_two()
            && (32..=1024).contains(&group_bytes);
        sound.then_some(Self {
            block_bits,
            blocks: u64::from(high) << 32 | u64::from(le32(&bytes, 4)?),
            inodes: le32(&bytes, 0)?,
            inodes_per_group: le32(&bytes, 40).filter(|&inodes| inodes > 0)?,
            inode_bytes,
            group_bytes,
            groups: (first + 1) << block_bits,
        })
    }

    pub(super) fn block_bits(&self) -> u32 {
        self.block_bits
    }

    pub(super) fn inode(&self, device: &mut dyn ReadDevice, number: u64) -> Option<Inode> {
        let index = u32::try_from(number).ok()?.checked_sub(1).filter(|&index| index < self.inodes)?;
        let (group, within) = (index / self.inodes_per_group, index % self.inodes_per_group);
        let mut descriptor = [0; 64];
        let descriptor = &mut descriptor[..usize::from(self.group_bytes.min(64))];
        device.read(self.groups + u64::from(group) * u64::from(self.group_bytes), descriptor)?;
        let high = le32(descriptor, 40).unwrap_or(0);
        let table = u64::from(high) << 32 | u64::from(le32(descriptor, 8)?);
        let at = self.offset(table)?.checked_add(u64::from(within) * u64::from(self.inode_bytes))?;
        let mut bytes = [0; 128];
        device.read(at, &mut bytes)?;
        let flags = le32(&bytes, 32)?;
        let fit = is_regular(le16(&bytes, 0)?) && flags & FLAGS_LEFT_OUT == 0;
        let root = *bytes.get(ROOT_OFFSET..)?.first_chunk()?;
        fit.then_some(Inode { has_extents: flags & FLAG_EXTENTS != 0, root })
    }

    pub(super) fn find(&self, device: &mut dyn ReadDevice, inode: &Inode, block: u64) -> Option<Extent> {
        if inode.has_extents {
            self.find_in_tree(device, &inode.root, u32::try_from(block).ok()?)
        } else {
            self.find_in_map(device, &inode.root, block)
        }
    }

    /// Down from the root, one block a level.
    fn find_in_tree(&self, device: &mut dyn ReadDevice, root: &[u8], block: u32) -> Option<Extent> {
        let mut node = root.to_vec();
        let mut depth = le16(&node, 6).filter(|&depth| depth <= DEPTH_MAX)?;
        loop {
            if le16(&node, 0)? != EXTENT_MAGIC || le16(&node, 6)? != depth {
                return None;
            }
            // What is named past the node's end is not there.
            let entries = node[ENTRY_BYTES..].chunks_exact(ENTRY_BYTES).take(le16(&node, 2)?.into());
            let entry =
                entries.take_while(|entry| le32(entry, 0).is_some_and(|first| first <= block)).last()?;
            if depth == 0 {
                return self.extent(entry);
            }
            let child = u64::from(le16(entry, 8)?) << 32 | u64::from(le32(entry, 4)?);
            node = self.block(device, child)?;
            depth -= 1;
        }
    }

    fn extent(&self, entry: &[u8]) -> Option<Extent> {
        let blocks = u64::from(le16(entry, 4)?);
        let start = u64::from(le16(entry, 6)?) << 32 | u64::from(le32(entry, 8)?);
        let sound = (1..=EXTENT_BLOCKS_MAX).contains(&blocks) && start.checked_add(blocks)? <= self.blocks;
        let offset = self.offset(start)?;
        sound.then_some(Extent { first: le32(entry, 0)?.into(), offset, blocks })
    }

    /// Down from the inode's own blocks: each level's table has a number for each block, or for each table below.
    fn find_in_map(&self, device: &mut dyn ReadDevice, root: &[u8], block: u64) -> Option<Extent> {
        let per_table_bits = self.block_bits - 2;
        let mut within = block;
        let mut number = le32(root, usize::try_from(block).ok()?.checked_mul(4)?);
        if block >= DIRECT {
            within -= DIRECT;
            let mut levels = 1;
            while within >> (per_table_bits * levels) != 0 {
                within -= 1 << (per_table_bits * levels);
                levels += 1;
            }
            let slot = (levels <= 3).then_some(DIRECT as usize - 1 + levels as usize)?;
            number = le32(root, slot * 4);
            for level in (0..levels).rev() {
                let table = self.block(device, number.filter(|&number| number != 0)?.into())?;
                let slot = within >> (per_table_bits * level) & ((1 << per_table_bits) - 1);
                number = le32(&table, slot as usize * 4);
            }
        }
        let offset = self.offset(number.filter(|&number| number != 0)?.into())?;
        Some(Extent { first: block, offset, blocks: 1 })
    }

    fn block(&self, device: &mut dyn ReadDevice, number: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; 1 << self.block_bits];
        device.read(self.offset(number)?, &mut bytes)?;
        Some(bytes)
    }

    fn offset(&self, block: u64) -> Option<u64> {
        (block < self.blocks).then_some(block)?.checked_mul(1 << self.block_bits)
    }
}
