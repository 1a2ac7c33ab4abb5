//! Reading, one request at a time: runs from the map, bytes from the files.

use vmstrata_store::{Segment, copy_from_slice, fill_zero, slice, total_len};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset, LayerIndex};

use crate::active::Active;
use crate::compressed::Key;
use crate::disk::Disk;
use crate::epoch::thread_shard;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::Tables;
use crate::layers::{Layers, Top};
use crate::map::{Run, Source};

impl Disk {
    /// Fills `into` with the disk's bytes from `at` on.
    ///
    /// # Errors
    /// A range that does not fit the disk; a layer that is damaged or cannot be read.
    pub fn read(&self, at: GuestOffset, into: &[Segment<'_>]) -> Result<()> {
        self.read_noted(at, into, |_, _| {})
    }

    /// The same for someone who uses the disk: it counts from which layers.
    pub(crate) fn read_counted(&self, at: GuestOffset, into: &[Segment<'_>]) -> Result<()> {
        self.read_noted(at, into, |depth, len| self.stats.worker_read(depth, len))
    }

    /// Reads; `note` is told how far below the active layer each run lies, if any layer has data for it, and its bytes.
    fn read_noted(
        &self,
        at: GuestOffset,
        into: &[Segment<'_>],
        note: impl Fn(Option<u16>, u64),
    ) -> Result<()> {
        let _guard = self.epochs.guard(thread_shard());
        self.check_range(GuestRange::new(at, total_len(into) as u64))?;
        let layers = self.layers_now();
        layers.read_runs(at, into, |at, len| {
            let run = layers.locate(at, len)?;
            match run.source {
                Source::Hole | Source::Zero(_) => note(None, run.len),
                Source::Data(layer, _) | Source::Compressed(layer) => {
                    note(Some(layers.depth_of(layer)), run.len);
                }
                Source::Damaged(_) => {}
            }
            Ok(run)
        })
    }
}

impl Layers {
    /// Fills `into` from runs that `locate` gives.
    pub(crate) fn read_runs(
        &self,
        at: GuestOffset,
        into: &[Segment<'_>],
        locate: impl Fn(GuestOffset, u64) -> Result<Run>,
    ) -> Result<()> {
        let len = total_len(into);
        let mut done = 0;
        while done < len {
            let from = at + done as u64;
            let run = locate(from, (len - done) as u64)?;
            let part = run.len as usize;
            self.read_run(from, run, &slice(into, done, part))?;
            done += part;
        }
        Ok(())
    }

    fn read_run(&self, at: GuestOffset, run: Run, into: &[Segment<'_>]) -> Result<()> {
        match run.source {
            Source::Hole | Source::Zero(_) => {
                fill_zero(into);
                Ok(())
            }
            Source::Data(layer, host) => self.read_data(layer, host, into),
            Source::Compressed(layer) => self
                .read_compressed(layer, at, into)
                .map_err(|error| error.in_layer(layer).in_file(self.path_of(layer))),
            Source::Damaged(layer) => {
                Err(self.damage(layer, at).in_layer(layer).in_file(self.path_of(layer)))
            }
        }
    }

    fn read_data(&self, layer: LayerIndex, host: HostOffset, into: &[Segment<'_>]) -> Result<()> {
        let store = self.store_of(layer)?;
        let read = store.read_segments(into, host).while_trying("read");
        let read = read.map_err(|error| error.at(host).in_layer(layer).in_file(self.path_of(layer)))?;
        let len = total_len(into);
        if read < len {
            // The file's last cluster need not be whole; what is not there was never written.
            fill_zero(&slice(into, read, len - read));
        }
        Ok(())
    }

    /// The tables of a qcow2 layer.
    fn tables_of(&self, layer: LayerIndex) -> &Tables {
        match (&self.top, &self.frozen) {
            (Top::Qcow2(active), _) if layer == active.index => &active.tables,
            (_, Some(map)) => map.layer(layer).tables.as_ref().expect("only qcow2 layers have entries"),
            _ => unreachable!("a layer above the frozen ones is the active one"),
        }
    }

    /// The raw L2 entry that a layer has for `at`.
    fn raw_entry(&self, layer: LayerIndex, at: GuestOffset) -> Result<u64> {
        match (&self.top, &self.frozen) {
            (Top::Qcow2(active), _) if layer == active.index => active.entry(active.cluster_of(at)),
            (_, Some(map)) => map.layer(layer).l2_entry(&**self.store_of(layer)?, at),
            _ => unreachable!("a layer above the frozen ones is the active one"),
        }
    }

    fn read_compressed(&self, layer: LayerIndex, at: GuestOffset, into: &[Segment<'_>]) -> Result<()> {
        let raw = self.raw_entry(layer, at)?;
        self.read_compressed_entry(layer, raw, at, into)
    }

    fn read_compressed_entry(
        &self,
        layer: LayerIndex,
        raw: u64,
        at: GuestOffset,
        into: &[Segment<'_>],
    ) -> Result<()> {
        let tables = self.tables_of(layer);
        let bits = tables.geometry.cluster_bits;
        let store = self.store_of(layer)?;
        let file = match (&self.top, &self.frozen) {
            (Top::Qcow2(active), _) if layer == active.index => active.identity,
            (_, Some(map)) => map.layer(layer).identity,
            _ => unreachable!("a layer above the frozen ones is the active one"),
        };
        let mut done = 0;
        let len = total_len(into);
        while done < len {
            // A run may go on over several clusters.
            let from = at + done as u64;
            let raw = if done == 0 { raw } else { self.raw_entry(layer, from)? };
            let key = Key { file, guest: from.align_down(bits), raw };
            let cluster = self.resources.clusters().read(key, &**store, tables)?;
            let within = from.within(bits) as usize;
            let part = (cluster.len() - within).min(len - done);
            copy_from_slice(&slice(into, done, part), &cluster[within..within + part]);
            done += part;
        }
        Ok(())
    }

    /// What is wrong with a layer's entry for `at`.
    fn damage(&self, layer: LayerIndex, at: GuestOffset) -> Error {
        let raw = match self.raw_entry(layer, at) {
            Ok(raw) => raw,
            Err(error) => return error,
        };
        match self.tables_of(layer).entries.l2(raw) {
            Err(entry) => ErrorKind::Entry { table: "L2 table", entry }.into(),
            Ok(vmstrata_qcow2::L2Entry::Data { host, .. }) => {
                let file_len =
                    self.store_of(layer).and_then(|store| store.len().while_trying("read the file's length"));
                match file_len {
                    Ok(file_len) => {
                        ErrorKind::Truncated { what: "a data cluster", at: host, file_len }.into()
                    }
                    Err(error) => error,
                }
            }
            // Damaged when the map was made, and not any more.
            Ok(_) => ErrorKind::Changed.into(),
        }
    }

    /// Fills `into` with what the cluster held before, given its raw entry in the active layer. For copy-on-write,
    /// under the lock of the cluster or its page.
    pub(crate) fn read_old(
        &self,
        active: &Active,
        raw: u64,
        at: GuestOffset,
        into: &[Segment<'_>],
    ) -> Result<()> {
        use vmstrata_qcow2::L2Entry;
        match active.decode(raw)? {
            L2Entry::Unallocated => self.read_runs(at, into, |at, len| self.locate_below(at, len)),
            L2Entry::Zero { .. } => {
                fill_zero(into);
                Ok(())
            }
            L2Entry::Data { host, .. } => {
                let within = at.within(active.tables.geometry.cluster_bits);
                self.read_data(active.index, host + within, into)
            }
            L2Entry::Compressed { .. } => self
                .read_compressed_entry(active.index, raw, at, into)
                .map_err(|error| error.in_layer(active.index).in_file(&active.path)),
        }
    }
}
