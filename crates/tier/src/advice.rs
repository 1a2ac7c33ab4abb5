//! What of a guest's disk need not be published: swap, and journals of file systems.
//!
//! Nothing depends on this: it says what a user may want to change. The guest writes what is read here, so every place is checked against
//! the size of the disk, and few blocks are read, each once. The size of a journal is what the guest says.
//!
//! Sources: UEFI 2.10, 5.3 (GPT); `mkswap(8)`; Linux `Documentation/filesystems/ext4/super.rst`.

use vmstrata_disk::{Disk, Extent};
use vmstrata_store::Segment;
use vmstrata_types::{GuestOffset, GuestRange};

use crate::cached_files::CachedFiles;

/// Bytes of a sector, in which partition tables count.
const SECTOR: u64 = 512;
/// Bytes read at the beginning of a partition: a page of swap has its signature at the end, and a file system of ext4 its
/// superblock within.
const PAGE: usize = 4096;
/// Partitions that are looked at.
const PARTITIONS_MAX: usize = 32;
/// Entries of a GPT that are looked at, and bytes of one.
const ENTRIES_MAX: usize = 128;
const ENTRY: usize = 128;
/// Parts of a read that may lie in different layers: blocks of 512 bytes of a table of partitions.
const EXTENTS_MAX: usize = 64;
/// A smaller journal is not worth a disk of its own.
const JOURNAL_BYTES_MIN: u64 = 64 << 20;

/// A part of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    /// Its number in the table; `None` for the disk itself.
    number: Option<u32>,
    start: u64,
    bytes: u64,
}

/// What there is to say of a disk, one line each, as far as its bytes are on this host: as a rule nothing is fetched for that.
pub(crate) fn of_disk(disk: &Disk, files: &CachedFiles) -> Vec<String> {
    let is_here = |extent: &Extent| {
        let Some(number) = extent.layer else { return true };
        let layers = disk.layers();
        let Some(layer) = layers.get(number.index()) else { return false };
        match (files.layer_at(&layer.path), extent.host) {
            (Ok(None), _) => true,
            (Ok(Some(layer)), Some(host)) => {
                layer.cached().chunks_of(host, extent.range.len).all(|chunk| layer.cached().is_here(chunk))
            }
            _ => false,
        }
    };
    advice(disk.size(), |at, into| {
        let range = GuestRange::new(GuestOffset::new(at), into.len() as u64);
        let extents = disk.extents_by_place(range, EXTENTS_MAX).unwrap_or_default();
        extents.last().is_some_and(|last| last.range.end() == range.end())
            && extents.iter().all(is_here)
            && disk.read(range.start, &[Segment::from_mut(into)]).is_ok()
    })
}

/// What there is to say of a disk of this size. `read` fills a buffer from a place of the disk; false where it cannot.
fn advice(size: u64, mut read: impl FnMut(u64, &mut [u8]) -> bool) -> Vec<String> {
    let whole = Part { number: None, start: 0, bytes: size };
    let mut parts = vec![whole];
    parts.extend(partitions(size, &mut read));
    parts.into_iter().filter_map(|part| part.advice(&mut read)).collect()
}

impl Part {
    fn advice(&self, read: &mut impl FnMut(u64, &mut [u8]) -> bool) -> Option<String> {
        let mut page = [0; PAGE];
        if self.bytes < PAGE as u64 || !read(self.start, &mut page) {
            return None;
        }
        let of = match self.number {
            Some(number) => format!("partition {number} ({} MiB)", self.bytes >> 20),
            None => format!("the disk ({} MiB)", self.bytes >> 20),
        };
        let see = "docs/operations.md, Swap and journals";
        if page.ends_with(b"SWAPSPACE2") {
            return Some(format!(
                "{of} is swap, and all that the guest swaps is published: give it a disk with role=swap ({see})"
            ));
        }
        match journal(&page)? {
            Journal::Device => Some(format!(
                "{of} is the journal of a file system, and is published: on a disk with role=local it stays on this host ({see})"
            )),
            Journal::Internal { bytes } => Some(format!(
                "{of} has an ext4 journal of {} MiB, which is published: on a disk with role=local it would stay on this host ({see})",
                bytes >> 20
            )),
        }
    }
}

enum Journal {
    /// The partition is one.
    Device,
    /// The file system in the partition has one.
    Internal { bytes: u64 },
}

/// What the superblock of ext4 says of a journal that may be worth a disk of its own.
fn journal(page: &[u8; PAGE]) -> Option<Journal> {
    const HAS_JOURNAL: u32 = 0x4;
    const JOURNAL_DEVICE: u32 = 0x8;
    /// `s_jnl_blocks` has a copy of the journal's inode.
    const BACKED_UP: u8 = 1;
    let superblock = &page[1024..2048];
    let word = |at: usize| u32::from_le_bytes(*superblock[at..].first_chunk().expect("within"));
    if superblock[0x38..0x3a] != [0x53, 0xef] {
        return None;
    }
    if word(0x60) & JOURNAL_DEVICE != 0 {
        return Some(Journal::Device);
    }
    let is_inside = word(0x5c) & HAS_JOURNAL != 0 && word(0xe0) != 0 && superblock[0xfd] == BACKED_UP;
    // The last two words of `s_jnl_blocks` are the size.
    let bytes = u64::from(word(0x10c + 15 * 4)) << 32 | u64::from(word(0x10c + 16 * 4));
    (is_inside && bytes >= JOURNAL_BYTES_MIN).then_some(Journal::Internal { bytes })
}

/// The partitions of a disk, as far as its table is one.
fn partitions(size: u64, read: &mut impl FnMut(u64, &mut [u8]) -> bool) -> Vec<Part> {
    let mut first = [0; 2 * SECTOR as usize];
    if !read(0, &mut first) {
        return Vec::new();
    }
    let (mbr, header) = first.split_at(SECTOR as usize);
    let mut parts = if header.starts_with(b"EFI PART") { gpt(header, read) } else { dos(mbr, size, read) };
    parts.retain(|part| {
        let end = part.start.checked_add(part.bytes);
        part.start > 0 && end.is_some_and(|end| end <= size)
    });
    parts.truncate(PARTITIONS_MAX);
    parts
}

fn gpt(header: &[u8], read: &mut impl FnMut(u64, &mut [u8]) -> bool) -> Vec<Part> {
    let long = |bytes: &[u8], at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("within"));
    let (entries, count_and_len) = (long(header, 72), long(header, 80));
    let (count, len) = (count_and_len as u32 as usize, (count_and_len >> 32) as usize);
    let mut table = vec![0; count.min(ENTRIES_MAX) * ENTRY];
    let is_read = entries.checked_mul(SECTOR).is_some_and(|at| read(at, &mut table));
    if len != ENTRY || !is_read {
        return Vec::new();
    }
    let entries = table.as_chunks::<ENTRY>().0.iter().zip(1..);
    let used = entries.filter(|(entry, _)| entry[..16] != [0; 16]);
    let part = |(entry, number): (&[u8; ENTRY], u32)| {
        let (first, last) = (long(entry, 32), long(entry, 40));
        let sectors = last.checked_sub(first)?.checked_add(1)?;
        Some(Part {
            number: Some(number),
            start: first.checked_mul(SECTOR)?,
            bytes: sectors.checked_mul(SECTOR)?,
        })
    };
    used.filter_map(part).collect()
}

/// A partition table of a PC: four entries, of which one may lead to a list of more.
fn dos(mbr: &[u8], size: u64, read: &mut impl FnMut(u64, &mut [u8]) -> bool) -> Vec<Part> {
    const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
    /// What a table has of an entry: what it is, from which sector, and how many.
    fn entries(table: &[u8]) -> [(u8, u64, u64); 4] {
        let is_table = table[510..512] == [0x55, 0xaa];
        std::array::from_fn(|number| {
            let entry = &table[446 + 16 * number..][..16];
            let word = |at: usize| u64::from(u32::from_le_bytes(*entry[at..].first_chunk().expect("within")));
            if is_table { (entry[4], word(8), word(12)) } else { (0, 0, 0) }
        })
    }
    let part = |number, first: u64, sectors: u64| Part {
        number: Some(number),
        start: first * SECTOR,
        bytes: sectors * SECTOR,
    };
    let (mut parts, mut list) = (Vec::new(), None);
    for ((kind, first, sectors), number) in entries(mbr).into_iter().zip(1..) {
        match kind {
            0 => {}
            kind if EXTENDED.contains(&kind) => list = Some(first),
            _ => parts.push(part(number, first, sectors)),
        }
    }
    let Some(extended) = list else { return parts };
    let (mut at, mut table) = (extended, [0; SECTOR as usize]);
    for number in (5..).take(PARTITIONS_MAX) {
        if at * SECTOR >= size || !read(at * SECTOR, &mut table) {
            break;
        }
        let [(kind, first, sectors), (next_kind, next, _), ..] = entries(&table);
        if kind != 0 {
            parts.push(part(number, at + first, sectors));
        }
        if !EXTENDED.contains(&next_kind) {
            break;
        }
        at = extended + next;
    }
    parts
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    const MIB: usize = 1 << 20;

    fn looked_at(disk: &[u8]) -> Vec<String> {
        advice(disk.len() as u64, |at, into| {
            let found = usize::try_from(at).ok().and_then(|at| disk.get(at..)?.get(..into.len()));
            found.inspect(|found| into.copy_from_slice(found)).is_some()
        })
    }

    /// The first bytes of what a stock tool makes of a file.
    fn made(tool: &str, args: &[&str], mib: usize) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len((mib * MIB) as u64).unwrap();
        let output = Command::new(tool)
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .args(args)
            .arg(file.path())
            .output();
        let output = output.unwrap_or_else(|error| panic!("{tool}: {error}"));
        assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
        fs::read(file.path()).unwrap()[..PAGE].to_vec()
    }

    fn put(disk: &mut [u8], at: usize, bytes: &[u8]) {
        disk[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A disk with these partitions in a GPT: in MiB, where and how large.
    fn gpt_disk(parts: &[(usize, usize)]) -> Vec<u8> {
        let mut disk = vec![0; 64 * MIB];
        put(&mut disk, 512, b"EFI PART");
        put(&mut disk, 512 + 72, &2u64.to_le_bytes());
        put(&mut disk, 512 + 80, &128u32.to_le_bytes());
        put(&mut disk, 512 + 84, &128u32.to_le_bytes());
        for (number, (at, mib)) in parts.iter().enumerate() {
            let (entry, sectors) = (1024 + number * 128, MIB as u64 / 512);
            disk[entry] = 1;
            put(&mut disk, entry + 32, &(*at as u64 * sectors).to_le_bytes());
            put(&mut disk, entry + 40, &((at + mib) as u64 * sectors - 1).to_le_bytes());
        }
        disk
    }

    fn dos_entry(disk: &mut [u8], table: usize, number: usize, (kind, first, sectors): (u8, u32, u32)) {
        disk[table + 510..table + 512].copy_from_slice(&[0x55, 0xaa]);
        let entry = table + 446 + 16 * number;
        disk[entry + 4] = kind;
        put(disk, entry + 8, &first.to_le_bytes());
        put(disk, entry + 12, &sectors.to_le_bytes());
    }

    #[test]
    fn swap_and_journals_are_found_in_a_gpt() {
        let mut disk = gpt_disk(&[(1, 8), (9, 30), (40, 4), (44, 8), (60, 100)]);
        let ext4 = ["-q", "-F", "-t", "ext4", "-b", "4096"];
        put(&mut disk, MIB, &made("mkswap", &["-q"], 8));
        put(&mut disk, 9 * MIB, &made("mke2fs", &[&ext4[..], &["-J", "size=128"]].concat(), 1024));
        put(&mut disk, 40 * MIB, &made("mke2fs", &["-q", "-F", "-b", "4096", "-O", "journal_dev"], 8));
        put(&mut disk, 44 * MIB, &made("mke2fs", &[&ext4[..], &["-J", "size=32"]].concat(), 512));
        put(&mut disk, 60 * MIB, &made("mkswap", &["-q"], 8));
        let found = looked_at(&disk);
        let [swap, internal, device] = &found[..] else { panic!("{found:?}") };
        assert!(swap.starts_with("partition 1 (8 MiB) is swap") && swap.contains("role=swap"), "{swap}");
        assert!(internal.starts_with("partition 2 (30 MiB) has an ext4 journal of 128 MiB"), "{internal}");
        assert!(device.starts_with("partition 3 (4 MiB) is the journal of a file system"), "{device}");
    }

    #[test]
    fn swap_is_found_in_a_logical_partition_and_on_a_whole_disk() {
        let swap = made("mkswap", &["-q"], 8);
        let mut disk = vec![0; 64 * MIB];
        dos_entry(&mut disk, 0, 0, (0x83, 2048, 2048));
        dos_entry(&mut disk, 0, 1, (0x05, 8192, 65536));
        dos_entry(&mut disk, 8192 * 512, 0, (0x83, 2048, 4096));
        dos_entry(&mut disk, 8192 * 512, 1, (0x05, 16384, 32768));
        dos_entry(&mut disk, (8192 + 16384) * 512, 0, (0x82, 2048, 16384));
        put(&mut disk, (8192 + 16384 + 2048) * 512, &swap);
        let found = looked_at(&disk);
        assert!(matches!(&found[..], [swap] if swap.starts_with("partition 6 (8 MiB) is swap")), "{found:?}");
        // A list that leads back to its beginning.
        dos_entry(&mut disk, (8192 + 16384) * 512, 1, (0x05, 0, 32768));
        assert!(!looked_at(&disk).is_empty());
        put(&mut disk, 0, &swap);
        let found = looked_at(&disk);
        assert!(found[0].starts_with("the disk (64 MiB) is swap"), "{found:?}");
    }

    #[test]
    fn noise_in_tables_and_superblocks_is_read_within_the_disk() {
        let mut random = SmallRng::seed_from_u64(7);
        let whole = {
            let mut disk = gpt_disk(&[(1, 8), (9, 30)]);
            put(&mut disk, MIB, &made("mkswap", &["-q"], 8));
            put(&mut disk, 9 * MIB, &made("mke2fs", &["-q", "-F", "-t", "ext4"], 512));
            dos_entry(&mut disk, 0, 0, (0x05, 2048, 2048));
            disk.truncate(16 * MIB);
            disk
        };
        let mut disk = whole.clone();
        for round in 0..2000 {
            let mut changed = Vec::new();
            for _ in 0..16 {
                let at = [0, MIB, 9 * MIB][random.random_range(0..3)] + random.random_range(0..2 * PAGE);
                disk[at] = if round % 2 == 0 { random.random() } else { 0xff };
                changed.push(at);
            }
            let (mut reads, mut bytes) = (0, 0);
            let size = disk.len() as u64;
            advice(size, |at, into| {
                (reads, bytes) = (reads + 1, bytes + into.len());
                let is_within = at.checked_add(into.len() as u64).is_some_and(|end| end <= size);
                if is_within {
                    into.copy_from_slice(&disk[at as usize..][..into.len()]);
                }
                is_within
            });
            assert!(reads <= 3 + 2 * PARTITIONS_MAX && bytes <= 256 << 10, "{reads} reads, {bytes} bytes");
            changed.into_iter().for_each(|at| disk[at] = whole[at]);
        }
    }
}
