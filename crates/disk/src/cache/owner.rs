//! Names for someone's pages in the cache.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{PageCache, PageKey};
use crate::error::{ErrorKind, Result};

/// A name that no one else's pages have; the pages are dropped with it, and then it is given to others.
#[derive(Debug)]
pub(crate) struct Owner {
    number: u32,
    /// Whether it may have pages.
    has_pages: bool,
    owners: Arc<Owners>,
}

impl Owner {
    /// What tells it from other owners in use.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// The key of a page of this owner.
    #[inline]
    pub(crate) fn key(&self, page: u64) -> PageKey {
        PageKey::new(self.number, page)
    }

    /// Drops every page of this owner; none of them may be in use.
    pub(crate) fn forget_pages(&self) {
        self.owners.cache.forget(|number| number == self.number);
    }

    /// Drops several owners of one cache: their pages are looked for once, not once each.
    pub(crate) fn drop_all(mut owners: Vec<Self>) {
        let Some(first) = owners.first() else { return };
        let numbers: HashSet<u32> = owners.iter().map(|owner| owner.number).collect();
        first.owners.cache.forget(|number| numbers.contains(&number));
        owners.iter_mut().for_each(|owner| owner.has_pages = false);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.has_pages {
            self.forget_pages();
        }
        self.owners.names.lock().free.push(self.number);
    }
}

/// The names in use for the pages of one cache.
#[derive(Debug)]
pub(crate) struct Owners {
    pub(crate) cache: Arc<PageCache>,
    names: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    last: u32,
    free: Vec<u32>,
}

impl Owners {
    pub(crate) fn new(cache: Arc<PageCache>) -> Arc<Self> {
        Arc::new(Self { cache, names: Mutex::default() })
    }

    /// A name that is free.
    ///
    /// # Errors
    /// When a million are in use.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Owner> {
        let mut names = self.names.lock();
        let number = match names.free.pop() {
            Some(number) => number,
            None if names.last == PageKey::MAX_OWNER => {
                return Err(ErrorKind::Full { what: "the process's table of disks" }.into());
            }
            None => {
                names.last += 1;
                names.last
            }
        };
        Ok(Owner { number, has_pages: true, owners: Arc::clone(self) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::PAGE_WORDS;

    #[test]
    fn a_name_is_given_again_without_the_pages_of_before() {
        let owners = Owners::new(Arc::new(PageCache::new(0).unwrap()));
        let (one, other) = (owners.take().unwrap(), owners.take().unwrap());
        assert_ne!(one.key(5), other.key(5));
        let key = one.key(5);
        owners.cache.fill(key, &[7; PAGE_WORDS]);
        drop(one);
        let again = owners.take().unwrap();
        assert_eq!(again.key(5), key);
        assert!(!owners.cache.contains(key));
    }

    #[test]
    fn owners_that_are_dropped_together_leave_no_pages() {
        let owners = Owners::new(Arc::new(PageCache::new(1 << 20).unwrap()));
        let mut held: Vec<Owner> = (0..10).map(|_| owners.take().unwrap()).collect();
        let keys: Vec<_> = held.iter().map(|owner| owner.key(5)).collect();
        keys.iter().for_each(|key| owners.cache.fill(*key, &[7; PAGE_WORDS]));
        Owner::drop_all(held.split_off(1));
        Owner::drop_all(Vec::new());
        assert!(owners.cache.contains(keys[0]));
        assert!(keys[1..].iter().all(|key| !owners.cache.contains(*key)));
        assert_eq!(owners.names.lock().free.len(), 9);
    }

    #[test]
    fn names_do_not_run_out_while_they_are_given_back() {
        let owners = Owners::new(Arc::new(PageCache::new(0).unwrap()));
        for _ in 0..3 {
            let held: Vec<Owner> = (0..100).map(|_| owners.take().unwrap()).collect();
            assert_eq!(held.len(), 100);
        }
        assert_eq!(owners.names.lock().last, 100);
    }
}
