//! Pages of a layer's entries: reading them, and taking them whole.

use std::io;

use vmstrata_types::HostOffset;

use super::{Active, EntryGuard, Partial};
use crate::cache::PAGE_WORDS;
use crate::error::{IoContext as _, Result};
use crate::layer::{table_of, words};

/// Reads a part of a table.
type ReadTable<'a> = dyn Fn(&mut [u8], HostOffset) -> io::Result<()> + 'a;

impl Active {
    /// The raw entries of the page that holds the cluster, if they are in memory or there are no tables for any of them.
    pub(crate) fn page_now(&self, cluster: u64) -> Option<[u64; PAGE_WORDS]> {
        let mut entries = [0; PAGE_WORDS];
        let first = cluster - cluster % PAGE_WORDS as u64;
        let mut tables = (first..first + PAGE_WORDS as u64).step_by(1 << self.tables.geometry.l2_bits);
        if !tables.any(|cluster| self.has_table(cluster)) {
            return Some(entries);
        }
        self.cache.copy(self.key(cluster).0, &mut entries).then_some(entries)
    }

    /// As [`Active::page_now`], from the image if need be.
    ///
    /// # Errors
    /// As [`Active::entry`].
    pub(crate) fn page(&self, cluster: u64) -> Result<[u64; PAGE_WORDS]> {
        loop {
            if let Some(entries) = self.page_now(cluster) {
                return Ok(entries);
            }
            self.entry(cluster)?;
        }
    }

    /// A cluster's raw entry from the image; fills the page if all of it is locked.
    pub(super) fn read_entry(
        &self,
        cluster: u64,
        guard: &EntryGuard<'_>,
        read: &ReadTable<'_>,
    ) -> Result<u64> {
        let (key, slot) = self.key(cluster);
        let first = cluster - slot as u64;
        // Changes are looked at before the image: one that a commit writes meanwhile, and then forgets, is seen in
        // one of the two places. (No others of what is locked can be noted.)
        let mut changed: Vec<(u64, u64)> = Vec::new();
        self.changes.overlay(first..first + PAGE_WORDS as u64, |cluster, raw| changed.push((cluster, raw)));
        let mut page = [0; PAGE_WORDS];
        self.read_entries(first, &mut page, read).map_err(|e| e.in_layer(self.index).in_file(&self.path))?;
        for (cluster, raw) in changed {
            page[(cluster - first) as usize] = raw;
        }
        if guard.is_of_page() {
            self.cache.fill(key, &page);
        }
        Ok(page[slot])
    }

    /// What the image says of the clusters from `first` on.
    fn read_entries(&self, first: u64, page: &mut [u64; PAGE_WORDS], read: &ReadTable<'_>) -> Result<()> {
        let l2_bits = self.tables.geometry.l2_bits;
        let mut bytes = [0; PAGE_WORDS * 8];
        let mut done = 0;
        while done < PAGE_WORDS {
            let cluster = first + done as u64;
            let within = cluster & ((1 << l2_bits) - 1);
            let count = (PAGE_WORDS - done).min((1 << l2_bits) - within as usize);
            let raw = self.l1_entry(cluster >> l2_bits).unwrap_or(0);
            let table = table_of(&self.tables, raw, u64::MAX)?;
            if let Some(table) = table {
                let bytes = &mut bytes[..count * 8];
                let at = table + within * 8;
                read(bytes, at).while_trying("read an L2 table").map_err(|e| e.at(at))?;
                let found = words(bytes).map(Partial::never_from_an_image);
                page[done..done + count].iter_mut().zip(found).for_each(|(to, raw)| *to = raw);
            }
            done += count;
        }
        Ok(())
    }
}
