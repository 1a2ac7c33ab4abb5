//! Copying up at once what the host has in memory.
//!
//! ```text
//!   first write ──► what lies below is in the page cache ──► new cluster written, nothing is put off
//!              └──► it is not ──► new cluster written with zeros, the copying put off ([`super::part`])
//! ```
//!
//! A new cluster of ordinary size is written all at once, whatever is known of it. Filled from below it costs one more read,
//! which does not wait, and it is done: nobody has to write it again later, when that thread and the one that writes for the
//! guest would wait for each other at the file's lock.
//!
//! A read that finds nothing is not free, as the host begins to fetch the bytes. So after misses it is tried more and
//! more rarely, and a disk whose lower layers lie on something slow is not held up.

use vmstrata_store::{Segment, copy_to_slice, total_len};
use vmstrata_types::{GuestOffset, HostOffset};

use super::with_scratch;
use crate::active::Active;
use crate::error::{IoContext as _, Result};
use crate::layers::Layers;
use crate::map::Source;

impl Layers {
    /// Writes a new cluster to `host`: `from`, beginning `within` bytes into it, and around that what lies below the guest's
    /// cluster at `start`. False, and nothing is written, when that takes waiting.
    ///
    /// # Errors
    /// The active layer's file cannot be written.
    pub(super) fn write_copied_up(
        &self,
        active: &Active,
        start: GuestOffset,
        host: HostOffset,
        (within, from): (usize, &[Segment<'_>]),
    ) -> Result<bool> {
        if !active.copy_up_backoff.tries() {
            return Ok(false);
        }
        let size = active.tables.geometry.cluster_bits.size() as usize;
        with_scratch(size, |bytes| {
            let is_there = self.read_below_now(start, bytes);
            is_there.iter().for_each(|is_there| active.copy_up_backoff.found(*is_there));
            if is_there != Some(true) {
                return Ok(false);
            }
            copy_to_slice(from, &mut bytes[within..within + total_len(from)]);
            let written = active.store.write_all(bytes, host).while_trying("write");
            written.map(|()| true).map_err(|error| error.at(host).in_file(&active.path))
        })
    }

    /// Fills `into` with what lies below, from memory; false when the host does not have all of it there, `None` when it need
    /// not be asked, as more than bytes is missing.
    fn read_below_now(&self, at: GuestOffset, into: &mut [u8]) -> Option<bool> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let run = self.below(at + done as u64, rest.len() as u64)?;
            let bytes = &mut rest[..run.len as usize];
            match run.source {
                Source::Hole | Source::Zero(_) => bytes.fill(0),
                Source::Data(layer, host) => {
                    if !self.open_store_of(layer)?.read_now(bytes, host) {
                        return Some(false);
                    }
                }
                Source::Compressed(_) | Source::Damaged(_) => return None,
            }
            done += run.len as usize;
        }
        Some(true)
    }
}
