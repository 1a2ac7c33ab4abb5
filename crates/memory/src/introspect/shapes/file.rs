//! What leads from a page of file cache to its file system, its buffers and its disk.

use super::Find;
use crate::introspect::Unreadable;

/// From a page's mapping to the name of its file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Files {
    /// `address_space.host`, an inode.
    pub host: usize,
    /// `address_space.flags`, eight bytes.
    pub mapping_flags: usize,
    /// `inode.i_mode`, two bytes.
    pub mode: usize,
    /// `inode.i_flags`, four bytes.
    pub inode_flags: usize,
    /// `inode.i_ino`, eight bytes.
    pub number: usize,
    /// `inode.i_blkbits`, one byte.
    pub block_bits: usize,
    /// `inode.i_mapping`.
    pub mapping: usize,
    /// `inode.i_sb`.
    pub super_block: usize,
    /// `super_block.s_bdev`.
    pub device: usize,
    /// `super_block.s_type`.
    pub kind: usize,
    /// `file_system_type.name`, a pointer to text.
    pub name: usize,
    /// Bytes from a block device to the inode of its own cache; kernels may have none.
    pub device_inode: Option<usize>,
}

impl Files {
    pub(super) fn of(find: &Find<'_>) -> Result<Self, Unreadable> {
        Ok(Self {
            host: find.word("address_space", "host")?,
            mapping_flags: find.word("address_space", "flags")?,
            mode: find.sized("inode", "i_mode", 2)?,
            inode_flags: find.half("inode", "i_flags")?,
            number: find.word("inode", "i_ino")?,
            block_bits: find.sized("inode", "i_blkbits", 1)?,
            mapping: find.word("inode", "i_mapping")?,
            super_block: find.word("inode", "i_sb")?,
            device: find.word("super_block", "s_bdev")?,
            kind: find.word("super_block", "s_type")?,
            name: find.word("file_system_type", "name")?,
            device_inode: find.within("bdev_inode", "bdev", "vfs_inode"),
        })
    }
}

/// `struct buffer_head`: the state of one block of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    /// Bytes of it, as far as they are read.
    pub size: usize,
    /// `b_state`, eight bytes.
    pub state: usize,
    /// `b_this_page`: the next of the same folio, in a ring.
    pub next: usize,
    /// `b_page` or `b_folio`: the struct page that it belongs to.
    pub page: usize,
    /// `b_blocknr`, eight bytes.
    pub block: usize,
    /// `b_size`, eight bytes.
    pub bytes: usize,
    /// `b_bdev`.
    pub device: usize,
    /// `b_count`, four bytes.
    pub count: usize,
    /// Mask in the state: the block's content is valid.
    pub uptodate: u64,
    /// Mask: the block has a place on the disk.
    pub mapped: u64,
    /// What a clean buffer's state may have.
    pub harmless: u64,
}

impl Buffers {
    pub(super) fn of(find: &Find<'_>) -> Result<Self, Unreadable> {
        let bit = |name| find.bit("bh_state_bits", name);
        let (uptodate, mapped) = (bit("BH_Uptodate")?, bit("BH_Mapped")?);
        let size = find.btf.size_of("buffer_head").filter(|size| (64..=256).contains(size));
        let buffers = Self {
            size: size.ok_or_else(|| Unreadable::Missing("buffer_head".into()))?,
            state: find.word("buffer_head", "b_state")?,
            next: find.word("buffer_head", "b_this_page")?,
            page: find.word("buffer_head", "b_page")?,
            block: find.word("buffer_head", "b_blocknr")?,
            bytes: find.word("buffer_head", "b_size")?,
            device: find.word("buffer_head", "b_bdev")?,
            count: find.half("buffer_head", "b_count")?,
            uptodate,
            mapped,
            harmless: uptodate | mapped | bit("BH_Req")?,
        };
        let ends = [buffers.state, buffers.next, buffers.page, buffers.block, buffers.bytes, buffers.device];
        let inside = ends.iter().all(|at| at + 8 <= buffers.size) && buffers.count + 4 <= buffers.size;
        inside
            .then_some(buffers)
            .ok_or_else(|| Unreadable::Inconsistent("buffer_head has members outside".into()))
    }
}

/// The state of a folio whose blocks are smaller than it, in file systems on iomap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Iomap {
    /// `read_bytes_pending`, four bytes.
    pub reading: usize,
    /// `write_bytes_pending`, four bytes.
    pub writing: usize,
    /// Words of bits: valid blocks and, behind those, dirty blocks if [`Iomap::has_dirty`].
    pub bits: usize,
    /// Whether there is a second run of bits (since Linux 6.6).
    pub has_dirty: bool,
}

impl Iomap {
    pub(super) fn of(find: &Find<'_>) -> Result<Option<Self>, Unreadable> {
        let named = [("iomap_folio_state", "state", true), ("iomap_page", "uptodate", false)];
        let known = named.into_iter().find(|(of, _, _)| find.btf.size_of(of).is_some());
        let Some((of, bits, has_dirty)) = known else { return Ok(None) };
        let bits = find.btf.member(of, bits).filter(|member| member.offset < 256 && member.offset % 8 == 0);
        Ok(Some(Self {
            reading: find.half(of, "read_bytes_pending")?,
            writing: find.half(of, "write_bytes_pending")?,
            bits: bits.ok_or_else(|| Unreadable::Missing(format!("bits of {of}")))?.offset,
            has_dirty,
        }))
    }
}

/// Block devices and their disks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disks {
    /// `block_device.bd_disk`.
    pub disk: usize,
    /// Where a partition begins, in sectors of 512 bytes.
    pub start: Start,
    /// `gendisk.major`, four bytes.
    pub major: usize,
    /// `gendisk.first_minor`, four bytes.
    pub minor: usize,
    /// `gendisk.disk_name`, 32 bytes of text.
    pub name: usize,
}

/// Where a partition's start is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    /// In the block device.
    Here(usize),
    /// Before Linux 5.11: behind a pointer, in `struct hd_struct`.
    There {
        /// `block_device.bd_part`.
        partition: usize,
        /// `hd_struct.start_sect`.
        start: usize,
    },
}

impl Disks {
    pub(super) fn of(find: &Find<'_>) -> Result<Self, Unreadable> {
        let start = match find.word("block_device", "bd_start_sect") {
            Ok(start) => Start::Here(start),
            Err(_) => Start::There {
                partition: find.word("block_device", "bd_part")?,
                start: find.word("hd_struct", "start_sect")?,
            },
        };
        Ok(Self {
            disk: find.word("block_device", "bd_disk")?,
            start,
            major: find.half("gendisk", "major")?,
            minor: find.half("gendisk", "first_minor")?,
            name: find.sized("gendisk", "disk_name", 32)?,
        })
    }
}
