//! New clusters, from their allocation until an entry leads to them.

use std::ops::Deref;

use super::Active;
use crate::alloc::Allocated;
use crate::error::Result;

/// Clusters that no entry leads to yet; what is not kept is given back.
#[derive(Debug)]
pub(crate) struct NewClusters<'a> {
    active: &'a Active,
    space: Allocated,
}

impl Active {
    /// As [`crate::alloc::Allocator::allocate`].
    ///
    /// # Errors
    /// The same.
    pub(crate) fn allocate(&self, clusters: u64) -> Result<NewClusters<'_>> {
        let space = self.alloc.allocate(clusters).map_err(|error| error.in_file(&self.path))?;
        Ok(NewClusters { active: self, space })
    }

    /// As [`crate::alloc::Allocator::try_allocate`].
    pub(crate) fn try_allocate(&self) -> Option<NewClusters<'_>> {
        Some(NewClusters { active: self, space: self.alloc.try_allocate()? })
    }
}

impl NewClusters<'_> {
    /// Entries lead to all of them now.
    pub(crate) fn keep(mut self) {
        self.space.clusters = 0;
    }
}

impl Deref for NewClusters<'_> {
    type Target = Allocated;

    fn deref(&self) -> &Allocated {
        &self.space
    }
}

impl Drop for NewClusters<'_> {
    /// Once the disk is lost they stay counted: a broken journal may still name them, and would then be refused.
    fn drop(&mut self) {
        if self.space.clusters > 0 && !self.active.is_lost() {
            let bits = self.active.tables.geometry.cluster_bits;
            // What cannot be given back is leaked.
            let _ = self.active.alloc.free(self.space.at, self.space.clusters << bits.get());
        }
    }
}
