//! Metadata contexts: what a block status request can be about.
//!
//! | name | status of an extent |
//! |---|---|
//! | `base:allocation` | bit 0: a hole, bit 1: reads as zeros; as stock QEMU reports them, explicit zeros are both |
//! | `vmstrata:layer` | number of the layer the extent comes from, counted from the base, which is 0; 4294967295 where no layer has it |
//! | `vmstrata:diff:NAME` | what changed since the layer in the file NAME, or the snapshot NAME, was the newest: 0 nothing, 1 data, 2 it reads as zeros now (and may have before) |
//!
//! The first two are the same for every export; which layers a difference can be asked for depends on the disk
//! ([`crate::nbd::diff_base`]), so those have a [`DiffSlot`] in place of a fixed name.

/// `NBD_STATE_HOLE`.
pub const STATE_HOLE: u32 = 1 << 0;
/// `NBD_STATE_ZERO`.
pub const STATE_ZERO: u32 = 1 << 1;

/// Differences that one client can ask for at a time.
pub const DIFFS_MAX: usize = 8;
/// What the names of differences begin with.
pub const DIFF_PREFIX: &str = "vmstrata:diff:";
/// Number of the first difference.
const FIRST_DIFF: u32 = 3;

/// One metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`.
    Allocation,
    /// `vmstrata:layer`.
    Layer,
    /// `vmstrata:diff:NAME`, with the name that has this place in the client's selection.
    Diff(DiffSlot),
}

/// A place in a client's selection of differences, below [`DIFFS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffSlot(u8);

impl DiffSlot {
    /// The place with this number; `None` from [`DIFFS_MAX`] on.
    pub fn new(number: usize) -> Option<Self> {
        if number < DIFFS_MAX { u8::try_from(number).ok().map(Self) } else { None }
    }

    /// The number.
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

impl Context {
    /// Those that every export has, with their names.
    pub const FIXED: [(Self, &'static str); 2] =
        [(Self::Allocation, "base:allocation"), (Self::Layer, "vmstrata:layer")];

    /// The number that stands for the context once it is selected.
    pub const fn id(self) -> u32 {
        match self {
            Self::Allocation => 1,
            Self::Layer => 2,
            Self::Diff(slot) => FIRST_DIFF + slot.0 as u32,
        }
    }

    /// The context with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        match id {
            1 => Some(Self::Allocation),
            2 => Some(Self::Layer),
            _ => DiffSlot::new(id.checked_sub(FIRST_DIFF)? as usize).map(Self::Diff),
        }
    }
}

/// Some of the contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextSet(u16);

impl ContextSet {
    /// None of them.
    pub const EMPTY: Self = Self(0);
    /// Each of those that every export has.
    pub const FIXED: Self = Self(0b11);
    /// The most contexts that a client can select.
    pub const LEN_MAX: usize = Context::FIXED.len() + DIFFS_MAX;

    /// Adds a context; `false` if it was there.
    pub fn insert(&mut self, context: Context) -> bool {
        let bit = 1 << (context.id() - 1);
        let is_new = self.0 & bit == 0;
        self.0 |= bit;
        is_new
    }

    /// Whether a context is in the set.
    pub const fn contains(self, context: Context) -> bool {
        self.0 & (1 << (context.id() - 1)) != 0
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The contexts by number.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Context> {
        let ids = 1..=u32::try_from(Self::LEN_MAX).expect("few");
        ids.filter_map(Context::from_id).filter(move |context| self.contains(*context))
    }

    /// Adds what one query selects of the contexts that every export has: one by its name or, where `wildcards` are
    /// allowed, all of a namespace by `namespace:`. Anything else selects nothing, as the protocol demands.
    pub fn select(&mut self, query: &str, wildcards: bool) {
        for (context, name) in Context::FIXED {
            let is_namespace = query.ends_with(':') && name.starts_with(query);
            if name == query || (wildcards && is_namespace) {
                self.insert(context);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_select_names_and_list_namespaces() {
        let select = |query, wildcards| {
            let mut set = ContextSet::EMPTY;
            set.select(query, wildcards);
            set.iter().map(Context::id).collect::<Vec<_>>()
        };
        assert_eq!(select("base:allocation", false), [1]);
        assert_eq!(select("vmstrata:", true), [2]);
        assert!(select("vmstrata:", false).is_empty(), "wildcards only list");
        for query in ["", ":", "base", "base:alloc", "qemu:dirty-bitmap:b0", "vmstrata:layer2"] {
            assert!(select(query, true).is_empty(), "{query}");
        }
    }

    #[test]
    fn a_set_knows_what_is_in_it() {
        let mut set = ContextSet::EMPTY;
        assert!(set.insert(Context::Layer));
        assert!(!set.insert(Context::Layer));
        assert!(set.contains(Context::Layer) && !set.contains(Context::Allocation));
        assert_eq!(ContextSet::FIXED.iter().map(Context::id).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn numbers_and_contexts_are_one_to_one() {
        for id in 1..=10 {
            assert_eq!(Context::from_id(id).map(Context::id), Some(id));
        }
        assert_eq!((Context::from_id(0), Context::from_id(11), DiffSlot::new(DIFFS_MAX)), (None, None, None));
        let last = Context::Diff(DiffSlot::new(DIFFS_MAX - 1).unwrap());
        let mut set = ContextSet::EMPTY;
        assert!(set.insert(last) && set.contains(last));
        assert_eq!(set.iter().collect::<Vec<_>>(), [last]);
    }
}
