//! Flushes of a guest that wait to be published.
//!
//! ```text
//!   wait ──► waiting ── begin: the disk is cut ──► covered ── published ──► complete
//!               ▲                                     │
//!               └──────────── put back: it failed ◄───┘
//! ```
//!
//! All that wait when the disk is cut are covered by that one epoch. Those that come later wait for the next.

use std::fmt;
use std::io;

use vmstrata_disk::WhenDurable;

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Flushes {
    waiting: Vec<WhenDurable>,
    covered: Vec<WhenDurable>,
    /// Why none can be published any more.
    failed: Option<String>,
}

impl fmt::Debug for Flushes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flushes").field("waiting", &self.len()).field("failed", &self.failed).finish()
    }
}

impl Flushes {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.covered.len()
    }

    /// Adds one; `then` is called once.
    pub(crate) fn wait(&mut self, then: WhenDurable) {
        match &self.failed {
            Some(why) => then(Err(io::Error::other(why.clone()))),
            None => self.waiting.push(then),
        }
    }

    /// A publication begins: what is cut from now on covers those that wait. Whether there are any.
    pub(crate) fn begin(&mut self) -> bool {
        self.covered.append(&mut self.waiting);
        !self.covered.is_empty()
    }

    /// It is done.
    pub(crate) fn published(&mut self) {
        self.covered.drain(..).for_each(|then| then(Ok(())));
    }

    /// It failed, and is tried again.
    pub(crate) fn put_back(&mut self) {
        self.waiting.append(&mut self.covered);
    }

    /// Nothing is published any more.
    pub(crate) fn fail(&mut self, why: &str) {
        self.failed = Some(why.to_owned());
        self.begin();
        self.covered.drain(..).for_each(|then| then(Err(io::Error::other(why.to_owned()))));
    }
}
