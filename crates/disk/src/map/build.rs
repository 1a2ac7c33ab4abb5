//! Making the map of a long chain at once, from the tables of all layers.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use vmstrata_store::on_threads;
use vmstrata_types::{GuestOffset, GuestRange};

use super::FrozenMap;
use crate::cache::{PAGE_BYTES, PAGE_WORDS};
use crate::error::Result;
use crate::fold::Merge;
use crate::layer::Scratch;

/// Shorter chains are not read ahead: filling one of their pages costs a few reads.
pub(super) const BUILD_FROM_LAYERS: usize = 16;

impl FrozenMap {
    /// Reads all tables of a long chain at once, by all processors, if the whole map fits half of the cache.
    ///
    /// # Errors
    /// The first table, in any order, that cannot be read.
    pub(crate) fn build(&self) -> Result<()> {
        let pages = self.page_count();
        if self.layers.len() < BUILD_FROM_LAYERS || pages > self.cache.capacity_pages() / 2 {
            return Ok(());
        }
        // Without room for all of it, pages are made when they are asked for.
        let words = bytemuck::try_zeroed_slice_box(pages as usize * PAGE_WORDS);
        let Ok(words): Result<Box<[AtomicU64]>, ()> = words else { return Ok(()) };
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        on_threads(std::thread::available_parallelism().map_or(1, usize::from).min(8), || {
            let mut scratch = Scratch::default();
            while let index = next.fetch_add(1, Ordering::Relaxed)
                && index < self.layers.len()
            {
                if let Err(error) = self.merge_layer(index, &words, &mut scratch) {
                    failed.lock().get_or_insert(error);
                    next.store(self.layers.len(), Ordering::Relaxed);
                }
            }
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let mut page = [0; PAGE_WORDS];
        for (number, words) in words.chunks(PAGE_WORDS).enumerate() {
            page.iter_mut().zip(words).for_each(|(word, merged)| *word = merged.load(Ordering::Relaxed));
            self.cache.fill(self.pages.key(number as u64), &page);
        }
        tracing::debug!(layers = self.layers.len(), bytes = pages as usize * PAGE_BYTES, "map built");
        Ok(())
    }

    fn merge_layer(&self, index: usize, words: &[AtomicU64], scratch: &mut Scratch) -> Result<()> {
        let visible = &self.layers[index];
        let Some(merge) = Merge::new(visible, index, self.unit) else { return Ok(()) };
        let store = self.files.store(&visible.layer)?;
        let whole = GuestRange::new(GuestOffset::ZERO, visible.end);
        visible
            .layer
            .scan(&**store, whole, scratch, &mut |cluster, raw| {
                for (unit, entry) in merge.entries(cluster, raw).clip(0..words.len() as u64) {
                    words[unit as usize].fetch_max(entry.word(), Ordering::Relaxed);
                }
            })
            .map_err(|error| error.in_layer(merge.index).in_file(&visible.layer.path))
    }
}
