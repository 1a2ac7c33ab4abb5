//! Writing committed entries to the image: see [`crate::changes`] for when.

use std::collections::BTreeMap;

use vmstrata_types::HostOffset;

use super::Active;
use crate::changes::CommitTarget;
use crate::error::{IoContext as _, Result};
use crate::journal::Slot;
use crate::layer::table_of;

impl CommitTarget for Active {
    fn flush(&self) -> Result<()> {
        self.flusher.flush().while_trying("flush").map_err(|error| error.in_file(&self.path))
    }

    fn write_entries(&self, entries: &BTreeMap<Slot, u64>) -> Result<()> {
        let mut run: Vec<u8> = Vec::new();
        let mut run_at = HostOffset::ZERO;
        let write = |run: &mut Vec<u8>, at: HostOffset| -> Result<()> {
            if !run.is_empty() {
                let written = self.store.write_all(run, at).while_trying("write table entries");
                written.map_err(|error| error.at(at).in_file(&self.path))?;
                run.clear();
            }
            Ok(())
        };
        for (&slot, raw) in entries {
            let at = self.place_of(slot)?;
            if run_at + run.len() as u64 != at {
                write(&mut run, run_at)?;
                run_at = at;
            }
            run.extend_from_slice(&raw.to_be_bytes());
        }
        write(&mut run, run_at)
    }
}

impl Active {
    /// Where an entry lies in the image.
    fn place_of(&self, slot: Slot) -> Result<HostOffset> {
        match slot {
            Slot::L1(index) => Ok(self.l1.load().at + index * 8),
            Slot::L2(cluster) => {
                let l2_bits = self.tables.geometry.l2_bits;
                let raw = self.l1_entry(cluster >> l2_bits);
                let table = table_of(&self.tables, raw.unwrap_or(0), u64::MAX)?;
                let table = table.expect("a change was published only after its table existed");
                Ok(table + (cluster & ((1 << l2_bits) - 1)) * 8)
            }
        }
    }
}
