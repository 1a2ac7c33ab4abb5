//! What a request needs and is not on this host yet.
//!
//! Who carries a request out asks first ([`Layers::absent_for`]), has that fetched, and begins anew when it is here: the request
//! waits without a thread. It is a look ahead, not a promise: a read that meets absent bytes nevertheless waits in its store. Tables
//! are not looked at.

use std::sync::Arc;

use vmstrata_qcow2::L2Entry;
use vmstrata_store::{Hold, OpenStore};
use vmstrata_types::{GuestRange, HostOffset, LayerIndex};

use crate::absent::Absent;
use crate::layers::{Layers, Top};
use crate::map::Source;
use crate::request::{Op, Request};

/// Pieces fetched for a request at a time; then it looks for more.
const AT_ONCE: usize = 256;

impl Layers {
    /// Keeps a piece of a layer here, where it may be elsewhere.
    ///
    /// # Errors
    /// What has to be fetched first.
    #[inline]
    pub(crate) fn hold_piece(
        &self,
        file: &Arc<OpenStore>,
        layer: LayerIndex,
        at: HostOffset,
        len: u64,
    ) -> Result<Option<Hold>, Absent> {
        if !file.may_be_absent() {
            return Ok(None);
        }
        let hold = file.fetch().expect("its bytes may be absent").hold(at, len);
        let absent =
            || Absent { file: Arc::clone(file), path: self.path_of(layer).to_owned(), layer, at, len };
        hold.map(Some).ok_or_else(absent)
    }

    /// What a piece of a layer lacks; `None` if all of it is here.
    fn absent_piece(
        &self,
        file: &Arc<OpenStore>,
        layer: LayerIndex,
        at: HostOffset,
        len: u64,
    ) -> Option<Absent> {
        self.hold_piece(file, layer, at, len).err()
    }

    /// Pieces that a request has to wait for, some of them if there are many. What cannot be found out is none: carrying the request
    /// out will say why.
    pub(crate) fn absent_for(&self, request: &Request) -> Vec<Absent> {
        let mut absent = Vec::new();
        let range = request.range;
        match request.op {
            Op::Read | Op::Prefetch => self.add_absent(range, &mut absent),
            Op::Write { .. } | Op::WriteZeroes { .. } => self.add_absent_around(range, &mut absent),
            Op::Flush | Op::Discard => {}
        }
        absent
    }

    /// What a read of a range lacks.
    fn add_absent(&self, range: GuestRange, absent: &mut Vec<Absent>) {
        let mut done = 0;
        while done < range.len && absent.len() < AT_ONCE {
            let at = range.start + done;
            let Ok(run) = self.locate(at, range.len - done) else { return };
            match run.source {
                Source::Data(layer, host) => {
                    let Ok(file) = self.file_of(layer) else { return };
                    absent.extend(self.absent_piece(&file, layer, host, run.len));
                }
                Source::Compressed(layer) => {
                    self.add_absent_compressed(layer, GuestRange::new(at, run.len), absent);
                }
                Source::Hole | Source::Zero(_) | Source::Damaged(_) => {}
            }
            done += run.len;
        }
    }

    /// What compressed clusters of a layer lack.
    fn add_absent_compressed(&self, layer: LayerIndex, range: GuestRange, absent: &mut Vec<Absent>) {
        let Ok(file) = self.file_of(layer) else { return };
        let Some(tables) = self.layer(layer).tables().filter(|_| file.may_be_absent()) else { return };
        let bits = tables.geometry.cluster_bits;
        let mut at = range.start;
        while at < range.end() && absent.len() < AT_ONCE {
            let Ok(raw) = self.raw_entry(layer, at) else { return };
            if let Ok(L2Entry::Compressed { host, len }) = tables.entries.l2(raw) {
                absent.extend(self.absent_piece(&file, layer, host, len));
            }
            at = at.align_down(bits) + bits.size();
        }
    }

    /// What a write of a range copies up, in its first and its last cluster or subcluster.
    fn add_absent_around(&self, range: GuestRange, absent: &mut Vec<Absent>) {
        let Top::Qcow2(active) = &self.top else { return };
        let unit = active.tables.geometry.unit();
        let mut last = None;
        for edge in [range.start, range.end()] {
            let start = edge.align_down(unit);
            if edge != start && last.replace(start) != Some(start) {
                let len = unit.size().min(self.size.saturating_sub(start.get()));
                self.add_absent(GuestRange::new(start, len), absent);
            }
        }
    }
}
