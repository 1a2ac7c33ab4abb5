//! Holes in layers' files: bytes that the host has no room for, and that read as zeros.
//!
//! A cluster that was allocated and never written (`preallocation=metadata`, a sparse raw file, `fallocate -d`) is data to
//! the tables. Copied as data it would take room on the host.

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::Mutex;
use vmstrata_types::{HostOffset, LayerIndex};

use crate::map::{Run, Source};

/// The last run of data or of a hole that was found in each layer's file: to look for one may take the host as long as the
/// file has extents. Holds while the layers are frozen.
#[derive(Debug, Default)]
pub(crate) struct Holes(Mutex<HashMap<LayerIndex, Found>>);

#[derive(Clone, Debug)]
struct Found {
    range: Range<u64>,
    is_data: bool,
}

impl Holes {
    /// Cuts `run` where data and holes of its file meet; a hole is zeros of its layer. `extent` is as
    /// [`vmstrata_store::Store::extent`] of the layer's file; what it does not know is data.
    pub(crate) fn cut(
        &self,
        run: Run,
        extent: impl FnOnce(LayerIndex, HostOffset) -> Option<(bool, HostOffset)>,
    ) -> Run {
        let Source::Data(layer, host) = run.source else { return run };
        let known = self.0.lock().get(&layer).filter(|found| found.range.contains(&host.get())).cloned();
        let found = known.unwrap_or_else(|| {
            let (is_data, end) = extent(layer, host).unwrap_or((true, host));
            // Nothing is there past the end, and reading says so.
            let end = if end > host { end } else { host + run.len };
            let found = Found { range: host.get()..end.get(), is_data };
            self.0.lock().insert(layer, found.clone());
            found
        });
        let source = if found.is_data { run.source } else { Source::Zero(layer) };
        Run { source, len: run.len.min(found.range.end - host.get()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_cut_where_a_hole_begins_and_the_host_is_asked_once() {
        let (holes, layer) = (Holes::default(), LayerIndex::new(3));
        let run = |at, len| Run { source: Source::Data(layer, HostOffset::new(at)), len };
        let data = holes.cut(run(10, 100), |_, _| Some((true, HostOffset::new(50))));
        assert_eq!(data, run(10, 40));
        assert_eq!(holes.cut(run(20, 10), |_, _| unreachable!("known")), run(20, 10));
        let hole = holes.cut(run(50, 60), |_, _| Some((false, HostOffset::new(200))));
        assert_eq!(hole, Run { source: Source::Zero(layer), len: 60 });
        assert_eq!(holes.cut(run(300, 8), |_, at| Some((true, at))), run(300, 8), "past the end");
        assert_eq!(holes.cut(run(400, 8), |_, _| None), run(400, 8), "not known");
        let zeros = Run { source: Source::Hole, len: 5 };
        assert_eq!(holes.cut(zeros, |_, _| unreachable!("no data")), zeros);
    }
}
