//! The subcluster bitmap of an extended L2 entry: low 32 bits allocated, high 32 bits reads-as-zero.
//!
//! Source: the specification, "Extended L2 Entries".

/// What one subcluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubclusterState {
    /// The layer says nothing.
    Unallocated,
    /// Data, at the subcluster's place in the host cluster.
    Allocated,
    /// Reads as zeros.
    Zero,
}

/// What each subcluster of a cluster is: a bit a subcluster, the lowest for the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Subclusters {
    /// Those with data.
    pub allocated: u32,
    /// Those that read as zeros.
    pub zero: u32,
}

impl Subclusters {
    /// Subclusters of a cluster.
    pub const COUNT: u32 = 32;
    /// None of them.
    pub const NOTHING: Self = Self { allocated: 0, zero: 0 };
    /// All of them with data.
    pub const ALLOCATED: Self = Self { allocated: u32::MAX, zero: 0 };
    /// All of them zeros.
    pub const ZERO: Self = Self { allocated: 0, zero: u32::MAX };

    /// From the second word of an entry.
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self { allocated: bits as u32, zero: (bits >> 32) as u32 }
    }

    /// The second word of an entry.
    #[inline]
    pub const fn bits(self) -> u64 {
        (self.zero as u64) << 32 | self.allocated as u64
    }

    /// Whether no subcluster is two things at once.
    #[inline]
    pub const fn is_valid(self) -> bool {
        self.allocated & self.zero == 0
    }

    /// What subcluster `index` is.
    #[inline]
    pub const fn state(self, index: u32) -> SubclusterState {
        if self.allocated >> index & 1 == 1 {
            SubclusterState::Allocated
        } else if self.zero >> index & 1 == 1 {
            SubclusterState::Zero
        } else {
            SubclusterState::Unallocated
        }
    }

    /// What subcluster `first` is, and how many from there on are the same.
    pub const fn run(self, first: u32) -> (SubclusterState, u32) {
        let state = self.state(first);
        let same = match state {
            SubclusterState::Allocated => self.allocated,
            SubclusterState::Zero => self.zero,
            SubclusterState::Unallocated => !(self.allocated | self.zero),
        };
        (state, (same >> first).trailing_ones())
    }

    /// The runs of subclusters that are the same: the first, how many, and what they are.
    pub fn runs(self) -> impl Iterator<Item = (u32, u32, SubclusterState)> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = next;
            if first == Self::COUNT {
                return None;
            }
            let (state, count) = self.run(first);
            next = first + count;
            Some((first, count, state))
        })
    }
}
