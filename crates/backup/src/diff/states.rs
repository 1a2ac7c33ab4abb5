//! Finding the layers between two states: both chains are followed down, in turn, until they meet.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{Error, Format, FrozenChain, FrozenLayer, OpenOptions, Resources, Result};
use vmstrata_store::FileId;
use vmstrata_types::ClusterBits;

use super::DiffOptions;
use crate::fault::BackupFault;

/// Both states, and what they stand on.
#[derive(Clone, Debug)]
pub(super) struct States {
    pub(super) old: Arc<Side>,
    pub(super) new: Arc<Side>,
    /// The newest layer that both have.
    pub(super) common: FrozenLayer,
    /// Smallest cluster size above it.
    pub(super) unit: ClusterBits,
}

impl States {
    /// The newest layer of a state.
    pub(super) fn top<'a>(&'a self, side: &'a Side) -> &'a FrozenLayer {
        side.layers.first().map_or(&self.common, |visible| &visible.layer)
    }
}

/// What only one of the states has.
#[derive(Debug)]
pub(super) struct Side {
    /// Newest first.
    pub(super) layers: Vec<Visible>,
    /// Guest offset from which on the common part is hidden.
    pub(super) common_end: u64,
    pub(super) size: u64,
    pub(super) path: PathBuf,
}

/// A layer and how far it shows.
#[derive(Debug)]
pub(super) struct Visible {
    pub(super) layer: FrozenLayer,
    /// Guest offset from which on the layer is hidden.
    pub(super) end: u64,
}

impl States {
    /// Follows both chains down to the first layer that they share.
    ///
    /// # Errors
    /// As [`super::Diff::open`].
    pub(super) fn open(
        old: &Path,
        new: &Path,
        options: &DiffOptions,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        let walk = |path, format| Walk::new(path, format, options, resources);
        let mut walks = [walk(new, options.format), walk(old, options.old_format)];
        let depths = loop {
            let mut met = None;
            let mut moved = false;
            for side in 0..2 {
                let Some(place) = walks[side].step()? else { continue };
                moved = true;
                if let Some(&depth) = walks[1 - side].met.get(&place) {
                    let here = walks[side].layers.len() - 1;
                    met = Some(if side == 0 { [here, depth] } else { [depth, here] });
                    break;
                }
            }
            match met {
                Some(depths) => break depths,
                None if moved => {}
                None => {
                    let other = new.to_owned();
                    return Err(Error::from(BackupFault::NothingInCommon { other }).in_file(old));
                }
            }
        };
        if let Some(told) = told_formats(&walks, depths, options) {
            return Self::open(old, new, &told, resources);
        }
        let common = walks[0].layers[depths[0]].clone();
        let [new, old] = walks;
        let (new, old) = (Arc::new(new.side(depths[0], &common)), Arc::new(old.side(depths[1], &common)));
        let clusters = new.layers.iter().chain(&old.layers).filter_map(|visible| visible.layer.unit());
        let unit = clusters.min().unwrap_or(ClusterBits::DEFAULT);
        Ok(Self { old, new, common, unit })
    }
}

/// The formats of both states, where one was read off the state's first bytes and the other's chain says otherwise: what a
/// raw layer begins with is its guest's.
fn told_formats(walks: &[Walk<'_>; 2], depths: [usize; 2], options: &DiffOptions) -> Option<DiffOptions> {
    let [new, old] = [0, 1].map(|side| walks[side].layers[depths[side]].format());
    match depths {
        _ if new == old => None,
        [_, 0] if options.old_format.is_none() => {
            Some(DiffOptions { old_format: Some(new), ..options.clone() })
        }
        [0, _] if options.format.is_none() => Some(DiffOptions { format: Some(old), ..options.clone() }),
        _ => None,
    }
}

/// Of [`FrozenLayer::place`].
type Place = (FileId, Range<u64>);

/// One chain, and its layers met so far.
struct Walk<'a> {
    path: PathBuf,
    below: FrozenChain<'a>,
    /// Newest first.
    layers: Vec<FrozenLayer>,
    met: HashMap<Place, usize>,
}

impl<'a> Walk<'a> {
    fn new(
        path: &Path,
        format: Option<Format>,
        options: &DiffOptions,
        resources: &'a Arc<Resources>,
    ) -> Self {
        let open = OpenOptions {
            allow_backing: options.allow_backing.clone(),
            format,
            // Most often the chain says so, and reading a guest's bytes as bytes is safe.
            format_is_exact: true,
            ..OpenOptions::default()
        };
        let below = FrozenChain::new(path, &open, resources);
        Self { path: path.to_owned(), below, layers: Vec::new(), met: HashMap::new() }
    }

    /// Opens the next layer down; `None` below the base.
    fn step(&mut self) -> Result<Option<Place>> {
        let Some(layer) = self.below.next().transpose()? else { return Ok(None) };
        let place = layer.place();
        self.met.insert(place.clone(), self.layers.len());
        self.layers.push(layer);
        Ok(Some(place))
    }

    /// The layers above the one at `depth`, which is `common`.
    fn side(self, depth: usize, common: &FrozenLayer) -> Side {
        let size = self.layers[0].size();
        let mut end = u64::MAX;
        let above = self.layers.into_iter().take(depth);
        let layers = above.map(|layer| {
            end = end.min(layer.size());
            Visible { layer, end }
        });
        let layers = layers.collect();
        Side { layers, common_end: end.min(common.size()), size, path: self.path }
    }
}
