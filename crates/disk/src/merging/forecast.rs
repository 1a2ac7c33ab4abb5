//! What dropping layers would do to files and names, found out without a change and without a lock.

use std::path::{Path, PathBuf};

use super::remove::{Wanted, dropped, foresee};
use super::{MergeOptions, MergeRange};
use crate::error::{Error, Result};
use crate::refs::{Kept, LocalHolders, Users, allocated_bytes, chain_files, layers_of_others};

/// A layer that would go.
#[derive(Clone, Debug)]
pub struct Going {
    /// Its number, counted from the base.
    pub number: usize,
    /// Its file.
    pub path: PathBuf,
    /// The snapshot of this disk that is lost with it.
    pub snapshot: Option<String>,
    /// Bytes of the host's storage that its file takes, and the index beside it.
    pub allocated_bytes: u64,
    /// Why its file would stay; `None` if it would be removed.
    pub kept: Option<Kept>,
}

/// What would go, newest first.
#[derive(Clone, Debug, Default)]
pub struct Forecast {
    /// The layers.
    pub layers: Vec<Going>,
}

impl Forecast {
    /// What dropping these ranges of layers of `disk` would do. `is_served`: another process has the disk, and would do it; its
    /// locks are passed over.
    ///
    /// # Errors
    /// What would refuse it before anything is copied; a chain that cannot be read.
    pub fn of(disk: &Path, ranges: &[MergeRange], options: &MergeOptions, is_served: bool) -> Result<Self> {
        let chain = chain_files(disk, &options.open, &*options.open.opener)?;
        let Some(first) = ranges.iter().map(|range| range.first.index()).min() else {
            return Ok(Self::default());
        };
        for range in ranges {
            range.check(&chain, options).map_err(|fault| Error::from(fault).in_file(disk))?;
        }
        let mut users = Users::standing_on(&chain[first..], disk, &options.open);
        let here = (!is_served).then_some(LocalHolders::NOTHING);
        let own_from = layers_of_others(&chain);
        let mut layers = Vec::new();
        for range in ranges {
            let target = range.target().index();
            // It will stand on what lies below.
            users.forget(&chain[target].path);
            let dropped = dropped(&chain, *range);
            let by_others = here.is_some_and(|here| here.is_used_by_others(&users, &chain[target..]));
            let (removal, forget_missing) = (options.removal, options.forget_missing);
            let wanted = Wanted { removal, forget_missing, here, by_others };
            let kept = foresee(&dropped, &mut users, &wanted);
            let numbers = (range.first.index()..=range.last.index()).rev();
            layers.extend(numbers.zip(dropped).zip(kept).map(|((number, dropped), kept)| {
                let info = chain[number + 1].info().filter(|_| number >= own_from);
                let allocated_bytes = allocated_bytes(&dropped.path);
                Going {
                    number,
                    path: dropped.path,
                    snapshot: info.map(|info| info.name),
                    allocated_bytes,
                    kept,
                }
            }));
        }
        Ok(Self { layers })
    }

    /// The names of the disk's snapshots that are lost, newest first.
    pub fn lost(&self) -> Vec<String> {
        self.layers.iter().filter_map(|layer| layer.snapshot.clone()).collect()
    }

    /// Bytes of the files that are removed. What other layers need of them is copied first.
    pub fn freed_bytes(&self) -> u64 {
        self.layers.iter().filter(|layer| layer.kept.is_none()).map(|layer| layer.allocated_bytes).sum()
    }
}
