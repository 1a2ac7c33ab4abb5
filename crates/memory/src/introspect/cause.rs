//! What a guest uses a page for, in words for people; [`PageClass`] is what decides.

use crate::class::{FrameMap, PageClass};

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

/// A cause for each frame: unknown where it was not found out.
pub type CauseMap = FrameMap<Cause>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_named_so_is_not_critical() {
        let of = |class| Cause::ALL.iter().filter(|cause| cause.class() == class).count();
        assert_eq!((of(PageClass::Free), of(PageClass::Clean)), (1, 2));
        assert_eq!(Cause::default().class(), PageClass::Critical);
    }
}
