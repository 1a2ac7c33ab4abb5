//! The names that a map's pages have in the cache.
//!
//! ```text
//!   page                    0  1  2  3  4
//!   map of layers 0 to 7    a  a  a  a  a
//!   map of layers 0 to 8    a  b  a  a  a     layer 8 has something on page 1
//!   map of layers 0 to 9    a  b  a  c  a     layer 9 on page 3
//! ```
//!
//! A page on which the newest layer has nothing says the same as without that layer, and goes by the same name: a snapshot
//! costs the pages that changed since the last one, however large the disk. So it is in both levels.

use std::mem;
use std::sync::Arc;

use crate::cache::{Owner, PageKey};
use crate::levels::{Level, MapPage};

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Pages {
    /// Of pages that this map was the first to have.
    own: Arc<Owner>,
    /// Number of the owner of each page; past the end they are this map's own. `[level][page]`
    owners: [Box<[u32]>; 2],
    /// Those of them that are not `own`, by number.
    others: Box<[Arc<Owner>]>,
}

impl Pages {
    /// Of a map that shares no page with another.
    pub(super) fn new(owner: Owner) -> Arc<Self> {
        Arc::new(Self { own: Arc::new(owner), owners: Default::default(), others: Box::default() })
    }

    /// Pages by the names that they have here or `below`: `is_own` says of each of the first `counts` of each level whether it is
    /// here.
    ///
    /// # Errors
    /// Of `is_own`.
    pub(super) fn over<E>(
        &self,
        below: &Self,
        counts: [(Level, u64); 2],
        mut is_own: impl FnMut(MapPage) -> Result<bool, E>,
    ) -> Result<Arc<Self>, E> {
        let mut owners = <[Box<[u32]>; 2]>::default();
        for (level, count) in counts {
            let owner = |number| {
                let page = MapPage { level, number };
                Ok(if is_own(page)? { self.own.number() } else { below.owner(page) })
            };
            owners[level as usize] = (0..count).map(owner).collect::<Result<_, E>>()?;
        }
        let all = || owners.iter().flatten();
        let last = all().max().map_or(0, |last| *last as usize);
        let mut is_used = vec![false; last + 1];
        all().for_each(|owner| is_used[*owner as usize] = true);
        let used = |owner: &&Arc<Owner>| is_used.get(owner.number() as usize).is_some_and(|is_used| *is_used);
        let mut others: Vec<_> = below.all_owners().filter(used).cloned().collect();
        others.sort_unstable_by_key(|owner| owner.number());
        Ok(Arc::new(Self { own: Arc::clone(&self.own), owners, others: others.into() }))
    }

    /// The key of a page.
    #[inline]
    pub(super) fn key(&self, page: MapPage) -> PageKey {
        let key = PageKey::new(self.owner(page), page.number);
        match page.level {
            Level::First => key,
            Level::Second => key.in_second_level(),
        }
    }

    #[inline]
    fn owner(&self, page: MapPage) -> u32 {
        let owners = &self.owners[page.level as usize];
        owners.get(page.number as usize).copied().unwrap_or_else(|| self.own.number())
    }

    /// Whether no other map has this page by this name.
    pub(super) fn has_alone(&self, page: MapPage) -> bool {
        let owner = self.others.binary_search_by_key(&self.owner(page), |owner| owner.number());
        Arc::strong_count(owner.map_or(&self.own, |at| &self.others[at])) == 1
    }

    fn all_owners(&self) -> impl Iterator<Item = &Arc<Owner>> {
        self.others.iter().chain([&self.own])
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let others = mem::take(&mut self.others).into_iter();
        Owner::drop_all(others.filter_map(Arc::into_inner).collect());
    }
}
