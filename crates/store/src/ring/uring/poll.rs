//! The descriptors a ring watches, and the one-shot polls armed for them.
//!
//! Place in the data flow: bookkeeping of [`crate::Ring::wait`]; makes no system call.
//!
//! Invariants: positions are those of the last `wait`; every armed poll has a tag never used before, so a
//! completion that comes after its poll was removed finds no watch.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use smallvec::SmallVec;

/// `user_data` of entries whose completion means nothing.
pub(super) const IGNORED: u64 = u64::MAX;
/// Marks `user_data` of polls.
const POLL: u64 = 1 << 63;

/// Names one armed poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PollTag(u64);

impl PollTag {
    /// The tag in `data`, if it is a poll's.
    pub(super) fn from_user_data(data: u64) -> Option<Self> {
        (data & POLL != 0 && data != IGNORED).then_some(Self(data & !POLL))
    }

    /// As the kernel is told.
    pub(super) fn user_data(self) -> u64 {
        self.0 | POLL
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// No poll is armed.
    Idle,
    Armed(PollTag),
    /// The poll has completed, and its owner has not been told.
    Fired,
}

#[derive(Clone, Copy, Debug)]
struct Watch {
    fd: RawFd,
    state: State,
}

/// The watch list.
#[derive(Debug, Default)]
pub(super) struct Watches {
    list: SmallVec<[Watch; 8]>,
    /// Tags given out so far: 2^62 last for ever.
    tags: u64,
    fired: usize,
    armed: usize,
}

impl Watches {
    /// Makes the list that of `watched`, in its order; returns the polls to remove.
    pub(super) fn replace(&mut self, watched: &[BorrowedFd<'_>]) -> SmallVec<[PollTag; 2]> {
        assert!(watched.len() <= 64, "more descriptors than a mask has bits");
        let same = self.list.len() == watched.len()
            && self.list.iter().zip(watched).all(|(watch, fd)| watch.fd == fd.as_raw_fd());
        if same {
            return SmallVec::new();
        }
        let mut old = std::mem::take(&mut self.list);
        for fd in watched.iter().map(AsRawFd::as_raw_fd) {
            let kept = old.iter().position(|watch| watch.fd == fd).map(|position| old.swap_remove(position));
            self.list.push(kept.unwrap_or(Watch { fd, state: State::Idle }));
        }
        self.dropped(&old)
    }

    /// Takes every watch of `fd` off the list; returns the polls to remove.
    pub(super) fn forget(&mut self, fd: RawFd) -> SmallVec<[PollTag; 2]> {
        let gone: SmallVec<[Watch; 8]> = self.list.iter().copied().filter(|watch| watch.fd == fd).collect();
        self.list.retain(|watch| watch.fd != fd);
        self.dropped(&gone)
    }

    fn dropped(&mut self, gone: &[Watch]) -> SmallVec<[PollTag; 2]> {
        let mut tags = SmallVec::new();
        for watch in gone {
            match watch.state {
                State::Idle => {}
                State::Fired => self.fired -= 1,
                State::Armed(tag) => {
                    self.armed -= 1;
                    tags.push(tag);
                }
            }
        }
        tags
    }

    /// The next descriptor that needs a poll, now marked as armed with the tag.
    pub(super) fn arm_next(&mut self) -> Option<(RawFd, PollTag)> {
        if self.armed + self.fired == self.list.len() {
            return None;
        }
        let watch = self.list.iter_mut().find(|watch| matches!(watch.state, State::Idle))?;
        let tag = PollTag(self.tags);
        self.tags += 1;
        self.armed += 1;
        watch.state = State::Armed(tag);
        Some((watch.fd, tag))
    }

    /// The poll with this tag has completed.
    pub(super) fn fired(&mut self, tag: PollTag) {
        let armed = |watch: &&mut Watch| matches!(watch.state, State::Armed(armed) if armed == tag);
        if let Some(watch) = self.list.iter_mut().find(armed) {
            watch.state = State::Fired;
            self.armed -= 1;
            self.fired += 1;
        }
    }

    /// Whether there is anything for [`Watches::take_fired`] to report.
    pub(super) fn any_fired(&self) -> bool {
        self.fired > 0
    }

    /// The positions that have fired; they are idle again.
    pub(super) fn take_fired(&mut self) -> u64 {
        if self.fired == 0 {
            return 0;
        }
        self.fired = 0;
        let mut mask = 0;
        for (position, watch) in self.list.iter_mut().enumerate() {
            if matches!(watch.state, State::Fired) {
                watch.state = State::Idle;
                mask |= 1 << position;
            }
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn borrow(fd: RawFd) -> BorrowedFd<'static> {
        // SAFETY: only its number is looked at.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn replace(watches: &mut Watches, fds: &[RawFd]) -> Vec<PollTag> {
        let fds: Vec<_> = fds.iter().copied().map(borrow).collect();
        watches.replace(&fds).into_vec()
    }

    /// Arms everything that is idle.
    fn arm(watches: &mut Watches) -> Vec<(RawFd, PollTag)> {
        std::iter::from_fn(|| watches.arm_next()).collect()
    }

    #[test]
    fn tags_and_slots_and_ignored_entries_are_told_apart() {
        assert_eq!(PollTag::from_user_data(PollTag(5).user_data()), Some(PollTag(5)));
        assert_eq!(PollTag::from_user_data(5), None);
        assert_eq!(PollTag::from_user_data(IGNORED), None);
    }

    #[test]
    fn polls_stay_armed_until_they_fire() {
        let mut watches = Watches::default();
        assert!(replace(&mut watches, &[10, 11, 12]).is_empty());
        let armed = arm(&mut watches);
        assert_eq!(armed.iter().map(|(fd, _)| *fd).collect::<Vec<_>>(), [10, 11, 12]);
        assert!(replace(&mut watches, &[10, 11, 12]).is_empty());
        assert!(arm(&mut watches).is_empty());
        watches.fired(armed[1].1);
        assert!(watches.any_fired());
        assert!(arm(&mut watches).is_empty(), "not before its owner was told");
        assert_eq!(watches.take_fired(), 0b010);
        assert_eq!(watches.take_fired(), 0);
        let again = arm(&mut watches);
        assert_eq!((again.len(), again[0].0), (1, 11));
        assert_ne!(again[0].1, armed[1].1);
    }

    #[test]
    fn a_changed_set_keeps_what_stays_and_removes_what_goes() {
        let mut watches = Watches::default();
        replace(&mut watches, &[10, 11, 12]);
        let armed = arm(&mut watches);
        watches.fired(armed[0].1);
        watches.fired(armed[2].1);
        assert_eq!(replace(&mut watches, &[12, 13]), [armed[1].1]);
        watches.fired(armed[1].1);
        assert_eq!(arm(&mut watches).len(), 1);
        assert_eq!(watches.take_fired(), 0b01, "12 had fired, 10 is gone, 11 was removed");
        assert!(replace(&mut watches, &[]).len() == 1 && !watches.any_fired());
    }

    #[test]
    fn a_forgotten_descriptor_is_armed_anew() {
        let mut watches = Watches::default();
        replace(&mut watches, &[10, 11]);
        let armed = arm(&mut watches);
        assert_eq!(watches.forget(10).into_vec(), [armed[0].1]);
        assert!(watches.forget(10).is_empty());
        assert!(replace(&mut watches, &[10, 11]).is_empty());
        watches.fired(armed[0].1);
        assert!(!watches.any_fired(), "the removed poll is not the new one");
        assert_eq!(arm(&mut watches).len(), 1);
    }

    #[test]
    fn one_descriptor_may_be_watched_twice() {
        let mut watches = Watches::default();
        replace(&mut watches, &[10, 10]);
        for (_, tag) in arm(&mut watches) {
            watches.fired(tag);
        }
        assert_eq!(watches.take_fired(), 0b11);
    }

    #[test]
    #[should_panic(expected = "more descriptors than a mask has bits")]
    fn more_descriptors_than_bits_are_refused() {
        replace(&mut Watches::default(), &[1; 65]);
    }
}
