//! Metadata contexts: what a block status request can be about.
//!
//! | name | status of an extent |
//! |---|---|
//! | `base:allocation` | bit 0: a hole, bit 1: reads as zeros; as stock QEMU reports them, explicit zeros are both |
//! | `vmstrata:layer` | index of the layer the extent comes from, plus one, counted from the base; 0 where no layer has it |

/// `NBD_STATE_HOLE`.
pub const STATE_HOLE: u32 = 1 << 0;
/// `NBD_STATE_ZERO`.
pub const STATE_ZERO: u32 = 1 << 1;

/// One metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`.
    Allocation,
    /// `vmstrata:layer`.
    Layer,
}

impl Context {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Allocation, Self::Layer];

    /// The name clients ask for.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocation => "base:allocation",
            Self::Layer => "vmstrata:layer",
        }
    }

    /// The number that stands for the context once it is selected.
    pub const fn id(self) -> u32 {
        match self {
            Self::Allocation => 1,
            Self::Layer => 2,
        }
    }

    /// The context with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|context| context.id() == id)
    }
}

/// Some of the contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextSet(u8);

impl ContextSet {
    /// None of them.
    pub const EMPTY: Self = Self(0);
    /// Each of them.
    pub const ALL: Self = Self(0b11);

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
        Context::ALL.into_iter().filter(move |context| self.contains(*context))
    }

    /// Adds what one query selects: a context by its name or, where `wildcards` are allowed, all of a
    /// namespace by `namespace:`. Anything else selects nothing, as the protocol demands.
    pub fn select(&mut self, query: &str, wildcards: bool) {
        for context in Context::ALL {
            let name = context.name();
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
            set.iter().map(Context::name).collect::<Vec<_>>()
        };
        assert_eq!(select("base:allocation", false), ["base:allocation"]);
        assert_eq!(select("vmstrata:", true), ["vmstrata:layer"]);
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
        assert_eq!(ContextSet::ALL.iter().map(Context::id).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(Context::from_id(2), Some(Context::Layer));
        assert_eq!(Context::from_id(0), None);
    }
}
