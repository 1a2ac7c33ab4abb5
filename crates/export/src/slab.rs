//! Things under way, by small numbers that are used again.

/// A growing array with holes; the number of an item stays until it is removed.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }

    /// Items in it.
    pub(crate) fn len(&self) -> usize {
        self.items.len() - self.free.len()
    }

    /// Puts an item in and returns its number.
    pub(crate) fn insert(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(key) => {
                self.items[key as usize] = Some(item);
                key
            }
            None => {
                self.items.push(Some(item));
                u32::try_from(self.items.len() - 1).expect("bounded far below 2^32")
            }
        }
    }

    /// Takes an item out.
    ///
    /// # Panics
    /// When there is no item of this number.
    pub(crate) fn remove(&mut self, key: u32) -> T {
        let item = self.items[key as usize].take().expect("an item under way");
        self.free.push(key);
        item
    }

    /// # Panics
    /// When there is no item of this number.
    pub(crate) fn get_mut(&mut self, key: u32) -> &mut T {
        self.items[key as usize].as_mut().expect("an item under way")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again() {
        let mut slab = Slab::new();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.len(), slab.remove(a)), (2, 'a'));
        assert_eq!(slab.insert('c'), a);
        assert_eq!((*slab.get_mut(a), *slab.get_mut(b)), ('c', 'b'));
    }

    #[test]
    #[should_panic(expected = "under way")]
    fn a_removed_item_is_gone() {
        let mut slab = Slab::new();
        let key = slab.insert(());
        slab.remove(key);
        slab.get_mut(key);
    }
}
