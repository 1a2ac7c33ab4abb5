//! The merge of a repository's layers beside the engine: a thread writes one layer after another, the engine publishes the chain.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use vmstrata_disk::{OpenOptions, Resources};
use vmstrata_repo::Repository;

use crate::dense::{MergeOrders, ship_merged};
use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};
use crate::merge::Merge;
use crate::place::Place;

/// What is left is written by the engine itself when it has less, or does not get less.
const LITTLE: u64 = 16 << 20;

/// See the module documentation. Dropped, it gives up, and waits until nothing is read any more.
#[derive(Debug)]
pub(crate) struct Merger {
    ground: Arc<Ground>,
    merge: Option<Merge>,
    /// Bytes of the layers that were merged last.
    merged: u64,
    writing: Option<Writing>,
}

/// What a merge reads, and where it writes.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) repository: Arc<dyn Repository>,
    pub(crate) place: Place,
    pub(crate) open: OpenOptions,
    pub(crate) resources: Arc<Resources>,
    /// Whether epochs are late.
    pub(crate) is_late: Arc<AtomicBool>,
}

/// A layer that is being written.
#[derive(Debug)]
struct Writing {
    /// How many it holds.
    layers: usize,
    orders: Arc<MergeOrders>,
    thread: JoinHandle<Result<Object>>,
}

/// A layer that is to be written.
struct Work {
    ground: Arc<Ground>,
    /// The files of those that it holds, lowest first, and what it stands on.
    layers: Vec<PathBuf>,
    below: Option<ObjectId>,
    state: PathBuf,
    orders: Arc<MergeOrders>,
}

impl Work {
    fn run(&self) -> Result<Object> {
        let Ground { repository, open, resources, .. } = &*self.ground;
        let layers: Vec<_> = self.layers.iter().map(PathBuf::as_path).collect();
        ship_merged(&**repository, &self.state, &layers, self.below, open, resources, &self.orders)
    }
}

impl Merger {
    pub(crate) fn new(ground: Ground) -> Self {
        Self { ground: Arc::new(ground), merge: None, merged: 0, writing: None }
    }

    /// Whether a layer is being written: the files of the state that it is read from must stay.
    pub(crate) fn is_reading(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| !writing.thread.is_finished())
    }

    /// Whether a merge has begun and is not complete.
    pub(crate) fn is_under_way(&self) -> bool {
        self.merge.is_some()
    }

    /// Goes on with this merge from now on.
    ///
    /// # Panics
    /// While another one is under way.
    pub(crate) fn begin(&mut self, merge: Merge) {
        assert!(!self.is_under_way());
        (self.merge, self.merged) = (Some(merge), u64::MAX);
    }

    /// Whether there is something to be done for who calls.
    pub(crate) fn is_ready(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| writing.thread.is_finished())
    }

    /// Goes on with the merge that a chain needs. `state` is the newest layer of another chain for the same state. Returns
    /// the chain in place of that one, once all its layers are there.
    ///
    /// # Errors
    /// A layer that could not be written: see [`Merger::give_up`].
    pub(crate) fn go_on(&mut self, chain: &[Object], state: PathBuf) -> Result<Option<Vec<Object>>> {
        if self.is_reading() {
            return Ok(None);
        }
        if let Some(Writing { layers, thread, .. }) = self.writing.take() {
            let result = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            self.merge.as_mut().expect("the merge of what is written").merged(layers, result);
        }
        if self.merge.is_none() {
            self.merge = Merge::due(chain);
        }
        let Some(merge) = &mut self.merge else { return Ok(None) };
        let left = merge.left(chain);
        let bytes: u64 = left.iter().map(|object| object.stored).sum();
        if !left.is_empty() {
            let work = Work {
                layers: left.iter().map(|object| self.ground.place.layer(object.id)).collect(),
                below: merge.below(),
                state,
                ground: self.ground.clone(),
                orders: Arc::new(MergeOrders {
                    gives_way: self.ground.is_late.clone(),
                    ..MergeOrders::default()
                }),
            };
            let layers = left.len();
            let before = std::mem::replace(&mut self.merged, bytes);
            // Else a disk that is cut all the time, or written as fast as it is merged, would never be done.
            if merge.results().is_empty() || (LITTLE..before).contains(&bytes) {
                tracing::info!(repository = %self.ground.place.repository_name().display(), layers, bytes, "merging layers");
                let orders = work.orders.clone();
                let thread = std::thread::Builder::new().name("tier merge".into()).spawn(move || work.run());
                let thread = thread.map_err(Error::of_file(
                    &self.ground.place.repository,
                    "start the thread that merges it",
                ))?;
                self.writing = Some(Writing { layers, orders, thread });
                return Ok(None);
            }
            merge.merged(layers, work.run()?);
        }
        Ok(self.merge.take().map(|merge| merge.finish(chain)))
    }

    /// What it reads, and where it writes.
    pub(crate) fn ground(&self) -> &Arc<Ground> {
        &self.ground
    }

    /// Gives the merge up. Returns the layers that it wrote, which nobody needs.
    pub(crate) fn give_up(&mut self) -> Vec<ObjectId> {
        let mut results: Vec<Object> =
            self.merge.take().map_or_else(Vec::new, |merge| merge.results().to_vec());
        if let Some(Writing { orders, thread, .. }) = self.writing.take() {
            orders.is_given_up.store(true, Ordering::Relaxed);
            results.extend(thread.join().into_iter().flatten());
        }
        results.into_iter().map(|object| object.id).collect()
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        self.give_up();
    }
}
