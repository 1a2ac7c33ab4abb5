//! Reading, one request at a time: runs from the map, bytes from the files.

mod absent;

use vmstrata_qcow2::{L2Entry, RawEntry};
use vmstrata_store::{Segment, Store, copy_from_slice, fill_zero, slice, total_len};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset, LayerIndex};

use crate::active::Active;
use crate::compressed::Key;
use crate::disk::Disk;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::Tables;
use crate::layers::{LayerRef, Layers};
use crate::map::{Run, Source};
use crate::write::Wait;

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
        let _guard = self.epochs.enter();
        self.check_range(GuestRange::new(at, total_len(into) as u64))?;
        let layers = self.layers_now();
        let read = layers.read_runs(at, into, |at, len| {
            let run = layers.locate(at, len)?;
            match run.source {
                Source::Hole | Source::Zero(_) => note(None, run.len),
                Source::Data(layer, _) | Source::Compressed(layer) => {
                    note(Some(layers.depth_of(layer)), run.len);
                }
                Source::Damaged(_) => {}
            }
            Ok(run)
        });
        read.map_err(|error| self.fail_if_fatal(error))
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
            done += self.read_run(from, run, &slice(into, done, run.len as usize))?;
        }
        Ok(())
    }

    /// Reads a run, or the start of it; returns how many bytes. What is left, and be it all, is somewhere else meanwhile.
    fn read_run(&self, at: GuestOffset, run: Run, into: &[Segment<'_>]) -> Result<usize> {
        match run.source {
            Source::Hole | Source::Zero(_) => fill_zero(into),
            Source::Data(layer, host) => self.read_data(layer, host, into)?,
            Source::Compressed(layer) => {
                let read = self.read_compressed(layer, at, into);
                return read.map_err(|error| error.in_layer(layer).in_file(self.path_of(layer)));
            }
            Source::Damaged(layer) => {
                return Err(self.damage(layer, at).in_layer(layer).in_file(self.path_of(layer)));
            }
        }
        Ok(total_len(into))
    }

    fn read_data(&self, layer: LayerIndex, host: HostOffset, into: &[Segment<'_>]) -> Result<()> {
        let store = self.file_of(layer)?;
        let read = store.read_segments(into, host).while_trying("read");
        let read = read.map_err(|error| error.at(host).in_layer(layer).in_file(self.path_of(layer)))?;
        let len = total_len(into);
        if read < len {
            if self.lacks_a_cluster(layer, host + (len as u64 - 1), &**store) {
                return Err(Error::from(ErrorKind::Changed).in_layer(layer).in_file(self.path_of(layer)));
            }
            // The file's last cluster need not be whole; what is not there was never written.
            fill_zero(&slice(into, read, len - read));
        }
        Ok(())
    }

    /// Whether nothing is there any more of the cluster that has the byte at `last` of a frozen layer's file: when the map was
    /// made, some of it was.
    fn lacks_a_cluster(&self, layer: LayerIndex, last: HostOffset, store: &dyn Store) -> bool {
        let LayerRef::Frozen(frozen) = self.layer(layer) else { return false };
        let Some(tables) = &frozen.tables else { return false };
        let start = last.get() - last.get() % tables.geometry.cluster_bits.size();
        store.len().is_ok_and(|len| len <= start)
    }

    /// The tables of a qcow2 layer.
    fn tables_of(&self, layer: LayerIndex) -> &Tables {
        self.layer(layer).tables().expect("only qcow2 layers have entries")
    }

    /// The raw L2 entry that a qcow2 layer has for `at`.
    fn raw_entry(&self, layer: LayerIndex, at: GuestOffset) -> Result<RawEntry> {
        match self.layer(layer) {
            LayerRef::Active(active) => active.entry(active.cluster_of(at)),
            LayerRef::Raw(_) => Ok(RawEntry::EMPTY),
            LayerRef::Frozen(frozen) => frozen.l2_entry(&**self.file_of(layer)?, at),
        }
    }

    /// Reads compressed clusters up to the first that was written to since the run was found; returns how many bytes.
    fn read_compressed(&self, layer: LayerIndex, at: GuestOffset, into: &[Segment<'_>]) -> Result<usize> {
        let (entries, len) = (self.tables_of(layer).entries, total_len(into));
        let mut done = 0;
        while done < len {
            let from = at + done as u64;
            let raw = self.raw_entry(layer, from)?;
            if !self.is_frozen(layer) && !matches!(entries.l2(raw), Ok(L2Entry::Compressed { .. })) {
                break;
            }
            done += self.read_compressed_cluster(layer, raw, from, &slice(into, done, len - done))?;
        }
        Ok(done)
    }

    /// Reads what of `into` lies in the cluster whose entry is `raw`; returns how many bytes.
    fn read_compressed_cluster(
        &self,
        layer: LayerIndex,
        raw: RawEntry,
        at: GuestOffset,
        into: &[Segment<'_>],
    ) -> Result<usize> {
        let tables = self.tables_of(layer);
        let bits = tables.geometry.cluster_bits;
        let store = self.file_of(layer)?;
        let key = Key { file: self.layer(layer).identity(), guest: at.align_down(bits), raw };
        let cluster = self.resources.clusters().read(key, &**store, tables)?;
        let within = at.within(bits) as usize;
        let len = (cluster.len() - within).min(total_len(into));
        copy_from_slice(&slice(into, 0, len), &cluster[within..within + len]);
        Ok(len)
    }

    /// What is wrong with a layer's entry for `at`.
    fn damage(&self, layer: LayerIndex, at: GuestOffset) -> Error {
        let raw = match self.raw_entry(layer, at) {
            Ok(raw) => raw,
            Err(error) => return error,
        };
        match self.tables_of(layer).entries.l2(raw) {
            Err(entry) => {
                let error = Error::from(ErrorKind::Entry { table: "L2 table", entry });
                let place = match self.layer(layer) {
                    LayerRef::Active(active) => active.entry_place(active.cluster_of(at)),
                    LayerRef::Frozen(frozen) => {
                        self.file_of(layer).and_then(|file| frozen.entry_place(&**file, at))
                    }
                    LayerRef::Raw(_) => Ok(None),
                };
                match place {
                    Ok(Some(place)) => error.at(place),
                    _ => error,
                }
            }
            Ok(L2Entry::Data { host, .. } | L2Entry::Subclusters { host: Some(host), .. }) => {
                let file_len =
                    self.file_of(layer).and_then(|store| store.len().while_trying("read the file's length"));
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

    /// Fills `into` with what clusters held before, given the raw entry that each has in the active layer. For copy-on-write: the
    /// caller has them locked, so no entry is asked for.
    ///
    /// # Errors
    /// An entry that is damaged; a layer that cannot be read.
    pub(crate) fn read_old(
        &self,
        active: &Active,
        raw: impl Fn(u64) -> RawEntry,
        at: GuestOffset,
        into: &[Segment<'_>],
    ) -> Result<()> {
        let first = raw(active.cluster_of(at));
        if let L2Entry::Compressed { .. } = active.decode(active.cluster_of(at), first)? {
            return self
                .read_compressed_cluster(self.top_index(), first, at, into)
                .map(drop)
                .map_err(|error| error.in_layer(self.top_index()).in_file(&active.path));
        }
        self.read_runs(at, into, |at, len| {
            let run = self.find_old(active, &raw, at, len, Wait::May)?;
            Ok(run.expect("it may wait"))
        })
    }

    /// Where the bytes at `at` lie that [`Layers::read_old`] reads; `None` when looking takes waiting and must not.
    ///
    /// # Errors
    /// As [`Layers::read_old`].
    pub(crate) fn find_old(
        &self,
        active: &Active,
        raw: impl Fn(u64) -> RawEntry,
        at: GuestOffset,
        len: u64,
        wait: Wait,
    ) -> Result<Option<Run>> {
        let step = |at, len| self.step_in(active, raw(active.cluster_of(at)), at, len);
        loop {
            let run = Run::of_steps(at, len, step);
            if run.is_some() || wait == Wait::MustNot {
                return Ok(run);
            }
            self.locate_below(at, 1)?;
        }
    }
}
