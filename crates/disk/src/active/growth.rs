//! Writing out early what the file grows by.
//!
//! In the moments after a snapshot a guest's first writes make new clusters, with what is copied up around them: for a few
//! bytes of the guest's, megabytes that the next flush would wait for. A host that has to find room for them (a sparse
//! file, a thin volume) takes twice as long the first time. So the host is asked to begin when new clusters have rested for a
//! moment: until then the guest may fill them itself. Clusters that it writes to again before the next flush are written twice.

use std::ops::Range;

use vmstrata_types::HostOffset;

use super::Active;

/// How far the file has been written out, and its end when it was last looked at.
#[derive(Debug)]
pub(super) struct Growth {
    written_out: HostOffset,
    seen: HostOffset,
}

impl Growth {
    /// Of a file that ends here.
    pub(super) fn from(end: HostOffset) -> Self {
        Self { written_out: end, seen: end }
    }

    /// What was there at the last look and was not written out yet; and whether the file has grown since that look.
    fn look(&mut self, end: HostOffset) -> (Range<HostOffset>, bool) {
        let rested = self.written_out..self.seen;
        self.written_out = self.seen;
        self.seen = end.max(self.seen);
        (rested, self.seen > self.written_out)
    }
}

impl Active {
    /// Begins to write out what the file had grown by at the last call; false when it has not grown since.
    pub(crate) fn write_out(&self) -> bool {
        let (rested, grows) = self.growth.lock().look(self.alloc.end());
        if !rested.is_empty() {
            let len = rested.end.get() - rested.start.get();
            self.store.local().inspect(|file| file.begin_write_out(rested.start, len));
        }
        grows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rested_is_written_out_once() {
        let at = HostOffset::new;
        let mut growth = Growth::from(at(100));
        assert_eq!(growth.look(at(100)), (at(100)..at(100), false), "as it was opened");
        assert_eq!(growth.look(at(300)), (at(100)..at(100), true), "the guest may be filling it");
        assert_eq!(growth.look(at(400)), (at(100)..at(300), true));
        assert_eq!(growth.look(at(400)), (at(300)..at(400), false));
        assert_eq!(growth.look(at(400)), (at(400)..at(400), false));
        // An end that goes back is no growth.
        let mut growth = Growth::from(at(900));
        assert_eq!(growth.look(at(500)), (at(900)..at(900), false));
        assert_eq!(growth.look(at(1000)), (at(900)..at(900), true));
    }
}
