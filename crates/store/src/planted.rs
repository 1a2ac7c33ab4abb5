//! Faults that the simulation has to find: it plants one of them at a time. Without the feature `planted` there are none.

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A commit does not flush the tables that it wrote.
    MissingFlush,
    /// A commit writes the tables before the data they lead to is flushed.
    SwappedFlush,
    /// Two commits run at the same time.
    LostLock,
    /// A snapshot leaves a page of the map as it was.
    StalePage,
    /// A worker carries a write out again after it has ended.
    DoubledWrite,
    /// A process goes on publishing a disk after another has claimed it.
    Unfenced,
    /// A claim goes on above a head that it met, and does not look what that publishes.
    BlindClaim,
    /// A layer is not read back before a head names it.
    Unverified,
    /// A layer is taken for complete although finishing it failed.
    TrustedFinish,
    /// A head is taken for the newest because it could be created.
    TrustedCreate,
    /// Heads are deleted, with what only they name, as soon as there is a newer one.
    Hasty,
    /// Layers are deleted by a listing that was made after the last head.
    LateListing,
    /// Layers are deleted without a look at the pins.
    UnreadPins,
    /// A state is taken for pinned without a look at the newest head.
    UnseenPin,
    /// A merge ends without the layers that were published meanwhile.
    Unmerged,
    /// A head counts that was seen, before it is known to be on stable storage.
    SeenHead,
    /// An object is taken for lost because a listing of any age lacks it.
    StaleLoss,
    /// Of a repository that has lost a head, the one before is taken for whole.
    BlindFallback,
    /// A copy of a layer gets its name before it is flushed.
    UnflushedCopy,
    /// A disk has moved before its old name is gone for good.
    LateRemoval,
    /// A disk is taken for whole before it stands on the copies.
    HastyWhole,
}

impl Planted {
    /// Those of a disk.
    pub const DISK: [Self; 5] =
        [Self::MissingFlush, Self::SwappedFlush, Self::LostLock, Self::StalePage, Self::DoubledWrite];
    /// Those of hosts that publish in a repository.
    pub const TIER: [Self; 13] = [
        Self::Unfenced,
        Self::BlindClaim,
        Self::Unverified,
        Self::TrustedFinish,
        Self::TrustedCreate,
        Self::Hasty,
        Self::LateListing,
        Self::UnreadPins,
        Self::UnseenPin,
        Self::Unmerged,
        Self::SeenHead,
        Self::StaleLoss,
        Self::BlindFallback,
    ];

    /// Those of a disk that moves.
    pub const MOVE: [Self; 3] = [Self::UnflushedCopy, Self::LateRemoval, Self::HastyWhole];

    /// Whether this one is there.
    #[inline]
    pub fn is_there(self) -> bool {
        #[cfg(feature = "planted")]
        return PLANTED.load(std::sync::atomic::Ordering::Relaxed) == self as usize + 1;
        #[cfg(not(feature = "planted"))]
        false
    }
}

#[cfg(feature = "planted")]
static PLANTED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Plants a fault, or takes it out again.
#[cfg(feature = "planted")]
pub fn plant(fault: Option<Planted>) {
    PLANTED.store(fault.map_or(0, |fault| fault as usize + 1), std::sync::atomic::Ordering::Relaxed);
}
