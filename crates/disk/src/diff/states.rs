//! Finding the layers between two states: both chains are followed down, in turn, until they meet.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_store::{FileId, Gate};
use vmstrata_types::{ClusterBits, MAX_LAYERS};

use super::DiffOptions;
use crate::chain::{OpenOptions, backing_of, open_layer, open_top};
use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Format, Layer};
use crate::loading::freeze;
use crate::opener::{Role, directory_of};
use crate::resources::Resources;

/// Both states, and what they stand on.
#[derive(Debug)]
pub(super) struct States {
    pub(super) old: Side,
    pub(super) new: Side,
    /// The newest layer that both have.
    pub(super) common: Arc<Layer>,
    /// Smallest cluster size above it.
    pub(super) unit: ClusterBits,
}

impl States {
    /// The newest layer of a state.
    pub(super) fn top<'a>(&'a self, side: &'a Side) -> &'a Layer {
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
    pub(super) layer: Arc<Layer>,
    /// Guest offset from which on the layer is hidden.
    pub(super) end: u64,
}

impl States {
    /// Follows both chains down to the first layer that they share.
    ///
    /// # Errors
    /// As [`super::Diff::open`].
    pub(super) fn open(old: &Path, new: &Path, options: &DiffOptions, resources: &Resources) -> Result<Self> {
        let allow = &options.allow_backing;
        let mut walks = [Walk::new(new, options.format, allow), Walk::new(old, options.old_format, allow)];
        let depths = loop {
            let mut met = None;
            let mut moved = false;
            for side in 0..2 {
                let Some(file) = walks[side].step(resources)? else { continue };
                moved = true;
                if let Some(&depth) = walks[1 - side].met.get(&file) {
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
                    return Err(Error::from(ErrorKind::NothingInCommon { other }).in_file(old));
                }
            }
        };
        if let Some(told) = told_formats(&walks, depths, options) {
            return Self::open(old, new, &told, resources);
        }
        let common = Arc::clone(&walks[0].layers[depths[0]]);
        let [new, old] = walks;
        let (new, old) = (new.side(depths[0], &common), old.side(depths[1], &common));
        let clusters =
            new.layers.iter().chain(&old.layers).filter_map(|visible| visible.layer.cluster_bits());
        let unit = clusters.min().unwrap_or(ClusterBits::DEFAULT);
        Ok(Self { old, new, common, unit })
    }
}

/// The formats of both states, where one was read off the state's first bytes and the other's chain says otherwise: what a
/// raw layer begins with is its guest's.
fn told_formats(walks: &[Walk; 2], depths: [usize; 2], options: &DiffOptions) -> Option<DiffOptions> {
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

/// One chain, as far as it was followed.
struct Walk {
    path: PathBuf,
    allowed: Vec<PathBuf>,
    gate: Option<Gate>,
    next: Option<(PathBuf, Option<Format>)>,
    /// Newest first.
    layers: Vec<Arc<Layer>>,
    met: HashMap<FileId, usize>,
}

impl Walk {
    fn new(path: &Path, format: Option<Format>, allow: &[PathBuf]) -> Self {
        let mut allowed = allow.to_vec();
        allowed.push(directory_of(path));
        let next = Some((path.to_owned(), format));
        Self { path: path.to_owned(), allowed, gate: None, next, layers: Vec::new(), met: HashMap::new() }
    }

    /// Opens the next layer down; `None` below the base.
    fn step(&mut self, resources: &Resources) -> Result<Option<FileId>> {
        let Some((path, format)) = self.next.take() else { return Ok(None) };
        if self.layers.len() >= MAX_LAYERS {
            return Err(Error::from(ErrorKind::TooLong).in_file(&self.path));
        }
        let opener = &**resources.files().opener();
        let opened = if self.layers.is_empty() {
            let options = OpenOptions { format, ..OpenOptions::default() };
            let state = open_top(&path, Role::Frozen, &options, opener)?;
            state.check_state()?;
            state
        } else {
            let gate = match &mut self.gate {
                Some(gate) => gate,
                // A state without backing files needs no gate, whatever its directory is.
                none => none.insert(Gate::new(&self.allowed)?),
            };
            open_layer(&path, Role::Frozen, format, gate, opener)?
        };
        self.next = backing_of(&opened.path, opened.head.as_ref())?;
        let file = opened.opened.identity.file;
        if let Some(earlier) = self.met.insert(file, self.layers.len()) {
            return Err(Error::from(ErrorKind::Loop { earlier }).in_file(&path));
        }
        self.layers.push(freeze(opened, resources));
        Ok(Some(file))
    }

    /// The layers above the one at `depth`, which is `common`.
    fn side(self, depth: usize, common: &Layer) -> Side {
        let size = self.layers[0].size;
        let mut end = u64::MAX;
        let above = self.layers.into_iter().take(depth);
        let layers = above.map(|layer| {
            end = end.min(layer.size);
            Visible { layer, end }
        });
        let layers = layers.collect();
        Side { layers, common_end: end.min(common.size), size, path: self.path }
    }
}
