//! Work that waits for a thread, by disk, and whose turn it is. Bookkeeping only: starts no threads and waits for none.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{CarryOut, Work};

/// Which disk work is for: its address, while it has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskId(usize);

impl DiskId {
    /// Of work that is for no disk.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn of(disk: &Arc<dyn CarryOut>) -> Self {
        Self(Arc::as_ptr(disk).cast::<()>() as usize)
    }
}

/// Work that waits, and how many threads are busy with which disk.
pub(super) struct Lanes {
    /// Of each disk that has any. New ones and those that were just served are last.
    lanes: VecDeque<Lane>,
    /// Jobs of a disk at a time.
    busy_max: usize,
    /// Threads without work.
    idle: usize,
    pub(super) is_open: bool,
}

struct Lane {
    disk: DiskId,
    waiting: VecDeque<Work>,
    busy: usize,
}

impl Lanes {
    /// Without work, for `threads` threads, of which a disk may have `busy_max`.
    pub(super) fn new(busy_max: usize, threads: usize) -> Self {
        Self { lanes: VecDeque::new(), busy_max, idle: threads, is_open: true }
    }

    /// Whether there will be no more work.
    pub(super) fn is_done(&self) -> bool {
        !self.is_open && self.lanes.iter().all(|lane| lane.waiting.is_empty())
    }

    pub(super) fn add(&mut self, disk: DiskId, work: Work) {
        match self.lanes.iter_mut().find(|lane| lane.disk == disk) {
            Some(lane) => lane.waiting.push_back(work),
            None => self.lanes.push_back(Lane { disk, waiting: VecDeque::from([work]), busy: 0 }),
        }
    }

    /// The lane whose turn it is, if there is work that may be begun.
    ///
    /// A disk may take another thread while it has fewer than are idle. So one whose storage hangs keeps half of the threads, a
    /// second one half of the others, and so on: the next disk always finds one, unless there are more such disks than halves.
    pub(super) fn next(&self) -> Option<usize> {
        let may_begin =
            |lane: &Lane| !lane.waiting.is_empty() && lane.busy < self.idle && lane.busy < self.busy_max;
        self.lanes.iter().position(may_begin)
    }

    /// Takes the work whose turn it is, and makes a thread busy with it.
    pub(super) fn take(&mut self) -> Option<(DiskId, Work)> {
        let mut lane = self.lanes.remove(self.next()?)?;
        let work = lane.waiting.pop_front()?;
        lane.busy += 1;
        self.idle -= 1;
        let disk = lane.disk;
        self.lanes.push_back(lane);
        Some((disk, work))
    }

    /// A thread has done what it took.
    pub(super) fn done(&mut self, disk: DiskId) {
        self.idle += 1;
        let at = self.lanes.iter().position(|lane| lane.disk == disk);
        let at = at.expect("a lane stays while a thread is busy");
        self.lanes[at].busy -= 1;
        if self.lanes[at].busy == 0 && self.lanes[at].waiting.is_empty() {
            self.lanes.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each of `disks` gets of `2 * count` threads when none of them ever gives one back.
    fn shares(count: usize, disks: usize) -> Vec<usize> {
        let mut lanes = Lanes::new(count, 2 * count);
        let share = |disk| {
            (0..100).for_each(|_| lanes.add(DiskId(disk), Work::LetGo(Box::new(()))));
            std::iter::from_fn(|| lanes.take()).filter(|(taken, _)| *taken == DiskId(disk)).count()
        };
        (1..=disks).map(share).collect()
    }

    #[test]
    fn no_disk_has_all_threads() {
        assert_eq!(shares(1, 3), [1, 1, 0]);
        assert_eq!(shares(2, 4), [2, 1, 1, 0]);
        assert_eq!(shares(8, 6), [8, 4, 2, 1, 1, 0]);
    }

    #[test]
    fn disks_take_turns() {
        let mut lanes = Lanes::new(4, 8);
        for disk in [1, 1, 1, 2, 2, 3] {
            lanes.add(DiskId(disk), Work::LetGo(Box::new(())));
        }
        let mut order = Vec::new();
        while let Some((disk, _)) = lanes.take() {
            order.push(disk.0);
            lanes.done(disk);
        }
        assert_eq!(order, [1, 2, 3, 1, 2, 1]);
        assert!(lanes.lanes.is_empty());
    }
}
