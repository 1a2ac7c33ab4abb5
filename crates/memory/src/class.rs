//! What a page of a guest is worth, as far as its loss goes (PARS §4.1, with the rules that today's kernels need).

use crate::address::Frame;

/// What losing a page would do to the guest, and with it how many copies are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageClass {
    /// The guest cannot live without it, or nobody knows: everything that is not proved to be one of the others.
    #[default]
    Critical = 0,
    /// A page of file cache that equals what the guest's disk holds, and that nobody uses at this moment: it can be
    /// read again, if the guest is told that it is gone.
    Clean = 1,
    /// Held by the guest's page allocator: its content means nothing.
    Free = 2,
}

/// What is known of each frame from 0 up; frames beyond the end, or never set, have the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameMap<T>(Vec<T>);

/// A class for each frame: critical where nothing is known.
pub type ClassMap = FrameMap<PageClass>;

impl<T: Copy + Default> FrameMap<T> {
    /// The default for each of `frames` frames.
    pub fn new(frames: usize) -> Self {
        Self(vec![T::default(); frames])
    }

    /// What is known of `frame`.
    pub fn get(&self, frame: Frame) -> T {
        let index = usize::try_from(frame.get()).unwrap_or(usize::MAX);
        self.0.get(index).copied().unwrap_or_default()
    }

    /// Sets `count` frames from `first` on, as far as they are described.
    pub fn set(&mut self, first: Frame, count: u64, known: T) {
        let index = |frame: u64| usize::try_from(frame).unwrap_or(usize::MAX).min(self.0.len());
        let (start, end) = (index(first.get()), index(first.get().saturating_add(count)));
        self.0[start..end].fill(known);
    }

    /// All frames in order.
    pub fn iter(&self) -> impl Iterator<Item = (Frame, T)> + '_ {
        (0..).map(Frame::new).zip(self.0.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_never_set_or_lies_beyond_is_critical() {
        let mut map = ClassMap::new(4);
        map.set(Frame::new(1), 2, PageClass::Free);
        map.set(Frame::new(3), u64::MAX, PageClass::Clean);
        map.set(Frame::new(u64::MAX), 1, PageClass::Clean);
        let classes: Vec<_> = (0..6).map(|frame| map.get(Frame::new(frame))).collect();
        use PageClass::{Clean, Critical, Free};
        assert_eq!(classes, [Critical, Free, Free, Clean, Critical, Critical]);
        assert_eq!(map.iter().count(), 4);
    }
}
