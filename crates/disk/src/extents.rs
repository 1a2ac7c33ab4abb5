//! What is where: runs of like allocation, for `vmstrata map` and for NBD's block status.

use vmstrata_types::{GuestRange, HostOffset, LayerIndex};

use crate::disk::Disk;
use crate::error::{IoContext as _, Result};
use crate::layer::Format;
use crate::layers::Layers;
use crate::map::{Run, Source};

/// A run of guest bytes that come from one layer in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which bytes.
    pub range: GuestRange,
    /// In which way.
    pub kind: ExtentKind,
    /// From which layer; `None` for a hole.
    pub layer: Option<LayerIndex>,
    /// Where the first byte lies in the layer's file, for data.
    pub host: Option<HostOffset>,
}

/// How a layer has an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// As plain bytes of its file.
    Data,
    /// In compressed clusters.
    Compressed,
    /// As zeros that hide what lies below.
    Zero,
    /// Not at all, and no other layer either: zeros.
    Hole,
}

impl ExtentKind {
    /// Whether the bytes are zeros without being read.
    pub fn reads_zero(self) -> bool {
        matches!(self, Self::Zero | Self::Hole)
    }
}

impl Disk {
    /// Runs of like allocation from `range.start` on, at most `limit` of them, in order and without gaps.
    ///
    /// Neighbouring clusters of one kind and layer are one extent, wherever in the file they lie: `host` is where
    /// the first byte is, and holds for the whole extent only while the file is contiguous. Use
    /// [`Disk::extents_by_place`] for that.
    ///
    /// # Errors
    /// A range that does not fit the disk, or tables that cannot be read.
    pub fn extents(&self, range: GuestRange, limit: usize) -> Result<Vec<Extent>> {
        self.collect(range, limit, |last, next| last.kind == next.kind && last.layer == next.layer)
    }

    /// As [`Disk::extents`], each extent contiguous in its file.
    ///
    /// # Errors
    /// As [`Disk::extents`].
    pub fn extents_by_place(&self, range: GuestRange, limit: usize) -> Result<Vec<Extent>> {
        self.collect(range, limit, |last, next| {
            let goes_on = last.host.map(|host| host + last.range.len) == next.host;
            last.kind == next.kind && last.layer == next.layer && goes_on
        })
    }

    fn collect(
        &self,
        range: GuestRange,
        limit: usize,
        is_same: impl Fn(&Extent, &Extent) -> bool,
    ) -> Result<Vec<Extent>> {
        let _guard = self.epochs.enter();
        self.check_range(range)?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = range.start;
        let end = range.end();
        let layers = self.layers_now();
        while at < end {
            let run = layers.locate(at, end - at).map_err(|error| self.fail_if_fatal(error))?;
            let extent = layers.extent_of(GuestRange::new(at, run.len), run)?;
            at = at + extent.range.len;
            let full = extents.len() == limit;
            match extents.last_mut() {
                Some(last) if is_same(last, &extent) => last.range.len += extent.range.len,
                _ if full => break,
                _ => extents.push(extent),
            }
        }
        Ok(extents)
    }
}

impl Layers {
    fn extent_of(&self, range: GuestRange, run: Run) -> Result<Extent> {
        let (kind, layer, host) = match run.source {
            Source::Hole => (ExtentKind::Hole, None, None),
            Source::Zero(layer) => (ExtentKind::Zero, Some(layer), None),
            Source::Compressed(layer) => (ExtentKind::Compressed, Some(layer), None),
            Source::Data(layer, host) if self.layer(layer).format() == Format::Raw => {
                return self.raw_extent(range, layer, host);
            }
            Source::Data(layer, host) => (ExtentKind::Data, Some(layer), Some(host)),
            // Reading it will say what is wrong.
            Source::Damaged(layer) => (ExtentKind::Data, Some(layer), None),
        };
        Ok(Extent { range, kind, layer, host })
    }

    /// Holes in a raw file are zeros of its layer.
    fn raw_extent(&self, range: GuestRange, layer: LayerIndex, host: HostOffset) -> Result<Extent> {
        let store = self.file_of(layer)?;
        let (is_data, end) = store
            .extent(host)
            .while_trying("look for holes")
            .map_err(|error| error.at(host).in_layer(layer).in_file(self.path_of(layer)))?;
        let there = end.get().saturating_sub(host.get());
        let (is_data, len) = if there == 0 { (false, range.len) } else { (is_data, range.len.min(there)) };
        let range = GuestRange::new(range.start, len);
        let kind = if is_data { ExtentKind::Data } else { ExtentKind::Zero };
        Ok(Extent { range, kind, layer: Some(layer), host: is_data.then(|| store.start() + host.get()) })
    }
}
