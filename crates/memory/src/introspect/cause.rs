//! What a guest uses a page for, in words for people; [`PageClass`] is what decides.

use crate::address::Frame;
use crate::class::PageClass;

/// Declares the causes with their class and the words they are shown by.
macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $class:ident, $words:literal;)*) => {
        /// What a page is used for.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Cause {
            $($(#[$doc])* $name,)*
        }

        impl Cause {
            /// Every cause, in the order they are shown in.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The class of pages of this cause.
            pub const fn class(self) -> PageClass {
                match self { $(Self::$name => PageClass::$class,)* }
            }

            /// Short lower-case words.
            pub const fn words(self) -> &'static str {
                match self { $(Self::$name => $words,)* }
            }
        }
    };
}

causes! {
    /// Held by the page allocator.
    Free = Free, "free";
    /// Clean file cache of ext4.
    CleanExt4 = Clean, "clean ext4 cache";
    /// Clean file cache of XFS.
    CleanXfs = Clean, "clean xfs cache";
    /// File cache that is newer than the disk, or on its way there.
    DirtyCache = Critical, "dirty cache";
    /// File cache that is mapped into a process.
    MappedCache = Critical, "mapped cache";
    /// File cache that something holds on to, or that is locked or not up to date.
    BusyCache = Critical, "busy cache";
    /// File cache whose clean-ness cannot be told: other file systems, and files that these rules leave out.
    OtherCache = Critical, "other cache";
    /// Cache of block devices and of file systems' own metadata.
    BlockCache = Critical, "block device cache";
    /// Pages of tmpfs and shared memory.
    Shmem = Critical, "tmpfs";
    /// Memory of processes.
    Anonymous = Critical, "anonymous";
    /// The kernel's small objects.
    Slab = Critical, "slab";
    /// Page tables.
    PageTable = Critical, "page tables";
    /// Huge pages of hugetlbfs.
    Huge = Critical, "hugetlb";
    /// Set aside by the kernel at boot: its image, its page descriptors, firmware.
    Reserved = Critical, "reserved";
    /// Memory in use that says nothing about itself: kernel buffers and stacks.
    Kernel = Critical, "kernel";
    /// No struct page describes it, or it could not be read.
    #[default]
    Unknown = Critical, "unknown";
}

/// A cause for each frame from 0 up; frames beyond the end, or never set, are [`Cause::Unknown`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CauseMap {
    /// `[frame]`.
    causes: Vec<Cause>,
}

impl CauseMap {
    /// All of `frames` frames unknown.
    pub fn unknown(frames: usize) -> Self {
        Self { causes: vec![Cause::Unknown; frames] }
    }

    /// Number of frames described.
    pub fn frames(&self) -> usize {
        self.causes.len()
    }

    /// The cause of `frame`.
    pub fn get(&self, frame: Frame) -> Cause {
        let index = usize::try_from(frame.get()).unwrap_or(usize::MAX);
        self.causes.get(index).copied().unwrap_or_default()
    }

    /// The number of frames of each cause: `[cause]`, in the order of [`Cause::ALL`].
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; Cause::ALL.len()];
        self.causes.iter().for_each(|&cause| counts[cause as usize] += 1);
        counts
    }

    /// Sets the cause of `count` frames from `first` on, as far as they are described.
    pub fn set(&mut self, first: Frame, count: u64, cause: Cause) {
        let index = |frame: u64| usize::try_from(frame).unwrap_or(usize::MAX).min(self.causes.len());
        let (start, end) = (index(first.get()), index(first.get().saturating_add(count)));
        self.causes[start..end].fill(cause);
    }

    /// The causes in order of their frames.
    pub fn iter(&self) -> impl Iterator<Item = (Frame, Cause)> + '_ {
        (0..).map(Frame::new).zip(self.causes.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_named_so_is_not_critical() {
        let of = |class| Cause::ALL.iter().filter(|cause| cause.class() == class).count();
        assert_eq!((of(PageClass::Free), of(PageClass::Clean)), (1, 2));
        assert_eq!(Cause::default().class(), PageClass::Critical);
        let mut map = CauseMap::unknown(3);
        map.set(Frame::new(2), u64::MAX, Cause::Free);
        assert_eq!(
            [1, 2, 3].map(|frame| map.get(Frame::new(frame))),
            [Cause::Unknown, Cause::Free, Cause::Unknown]
        );
        let counts = map.counts();
        assert_eq!((counts[Cause::Unknown as usize], counts[Cause::Free as usize]), (2, 1));
    }
}
