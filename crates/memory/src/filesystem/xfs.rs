//! XFS: allocation groups, inodes, and their lists and B+trees of extents. Source: "XFS Algorithms & Data Structures".

use super::field::{be16, be32, be64};
use super::{Extent, ReadDevice, is_regular};

const SUPER_BYTES: usize = 256;
const SUPER_MAGIC: u32 = 0x5846_5342;
const INODE_MAGIC: u16 = 0x494e;
/// `XFS_DIFLAG_REALTIME`: the content is on another device.
const FLAG_REALTIME: u16 = 1;
/// `XFS_DIFLAG2_NREXT64`: the number of extents is elsewhere.
const FLAG_MANY_EXTENTS: u64 = 1 << 4;
/// Bytes before the forks of an inode, since version 3 and before.
const CORE_BYTES: usize = 176;
const OLD_CORE_BYTES: usize = 100;
const RECORD_BYTES: usize = 16;
/// The kernel's `XFS_BM_MAXLEVELS` is below that.
const LEVELS_MAX: u16 = 12;
/// `BMA3` and `BMAP`, each with the bytes of the block's header.
const BLOCK_KINDS: [(u32, usize); 2] = [(0x424d_4133, 72), (0x424d_4150, 24)];

/// The geometry of a file system.
#[derive(Debug)]
pub(super) struct Xfs {
    block_bits: u32,
    inode_bits: u32,
    /// Base-2 logarithm of an allocation group's blocks, rounded up.
    group_bits: u32,
    group_blocks: u32,
    groups: u32,
}

/// What an inode says of its blocks.
#[derive(Debug)]
pub(super) enum Inode {
    /// Records of extents, in order.
    List(Vec<u8>),
    /// The root of a tree of them: the inode's own fork.
    Tree(Vec<u8>),
}

impl Xfs {
    pub(super) fn open(device: &mut dyn ReadDevice) -> Option<Self> {
        let mut bytes = [0; SUPER_BYTES];
        device.read(0, &mut bytes)?;
        let bits = |at: usize, range: std::ops::RangeInclusive<u8>| {
            bytes.get(at).copied().filter(|bits| range.contains(bits)).map(u32::from)
        };
        let xfs = Self {
            block_bits: bits(120, 9..=16)?,
            inode_bits: bits(122, 8..=11)?,
            group_bits: bits(124, 1..=31)?,
            group_blocks: be32(&bytes, 84)?,
            groups: be32(&bytes, 88)?,
        };
        let sound = be32(&bytes, 0)? == SUPER_MAGIC
            && be32(&bytes, 4)? == 1 << xfs.block_bits
            && xfs.inode_bits <= xfs.block_bits
            && u64::from(xfs.group_blocks) <= 1 << xfs.group_bits;
        sound.then_some(xfs)
    }

    pub(super) fn block_bits(&self) -> u32 {
        self.block_bits
    }

    pub(super) fn inode(&self, device: &mut dyn ReadDevice, number: u64) -> Option<Inode> {
        let per_block_bits = self.block_bits - self.inode_bits;
        let within = (number & ((1 << per_block_bits) - 1)) << self.inode_bits;
        let at = self.offset(number >> per_block_bits)?.checked_add(within)?;
        let mut bytes = vec![0; 1 << self.inode_bits];
        device.read(at, &mut bytes)?;
        let core = if *bytes.get(4)? >= 3 { CORE_BYTES } else { OLD_CORE_BYTES };
        let fit = be16(&bytes, 0)? == INODE_MAGIC
            && is_regular(be16(&bytes, 2)?)
            && be16(&bytes, 90)? & FLAG_REALTIME == 0;
        let attributes = match usize::from(*bytes.get(82)?) * 8 {
            0 => bytes.len(),
            offset => core + offset,
        };
        let fork = bytes.get(core..attributes).filter(|_| fit)?;
        let has_many = core == CORE_BYTES && be64(&bytes, 120)? & FLAG_MANY_EXTENTS != 0;
        let extents = if has_many { be64(&bytes, 24)? } else { be32(&bytes, 76)?.into() };
        match bytes.get(5)? {
            2 => {
                let len = usize::try_from(extents).ok()?.checked_mul(RECORD_BYTES)?;
                Some(Inode::List(fork.get(..len)?.to_vec()))
            }
            3 => Some(Inode::Tree(fork.to_vec())),
            _ => None,
        }
    }

    pub(super) fn find(&self, device: &mut dyn ReadDevice, inode: &Inode, block: u64) -> Option<Extent> {
        let root = match inode {
            Inode::List(records) => return self.find_in_records(records, block),
            Inode::Tree(root) => root,
        };
        let level = be16(root, 0).filter(|level| (1..=LEVELS_MAX).contains(level))?;
        let mut child = child_of(root.get(4..)?, be16(root, 2)?, block)?;
        for level in (0..level).rev() {
            let mut bytes = vec![0; 1 << self.block_bits];
            device.read(self.offset(child)?, &mut bytes)?;
            let magic = be32(&bytes, 0)?;
            let (_, header) = BLOCK_KINDS.into_iter().find(|(known, _)| *known == magic)?;
            let (is_level, count) = (be16(&bytes, 4)? == level, be16(&bytes, 6)?);
            let body = bytes.get(header..).filter(|_| is_level)?;
            if level == 0 {
                let len = usize::from(count).checked_mul(RECORD_BYTES)?;
                return self.find_in_records(body.get(..len)?, block);
            }
            child = child_of(body, count, block)?;
        }
        None
    }

    /// The last extent that begins at `block` or before.
    fn find_in_records(&self, records: &[u8], block: u64) -> Option<Extent> {
        let first = |record: &[u8]| Some((be64(record, 0)? & (u64::MAX >> 1)) >> 9);
        let records = records.chunks_exact(RECORD_BYTES);
        let record = records.take_while(|record| first(record).is_some_and(|first| first <= block)).last()?;
        let (high, low) = (be64(record, 0)?, be64(record, 8)?);
        let start = (high & 0x1ff) << 43 | low >> 21;
        let blocks = low & ((1 << 21) - 1);
        let is_written = high >> 63 == 0;
        let offset = self.offset(start)?;
        (is_written && blocks > 0).then_some(Extent { first: first(record)?, offset, blocks })
    }

    /// The first byte of a block whose number has the group in its upper bits.
    fn offset(&self, block: u64) -> Option<u64> {
        let (group, within) = (block >> self.group_bits, block & ((1 << self.group_bits) - 1));
        let fit = group < self.groups.into() && within < self.group_blocks.into();
        fit.then_some(group * u64::from(self.group_blocks) + within)?.checked_mul(1 << self.block_bits)
    }
}

/// The block below, of a node with so many keys; its pointers begin where the keys of a full node would end.
fn child_of(node: &[u8], count: u16, block: u64) -> Option<u64> {
    let room = node.len() / 16;
    let keys = node.get(..usize::from(count) * 8).filter(|_| usize::from(count) <= room)?;
    let before = keys.chunks_exact(8).take_while(|key| be64(key, 0).is_some_and(|first| first <= block));
    be64(node, (room + before.count().checked_sub(1)?) * 8)
}
