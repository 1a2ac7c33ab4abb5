//! The pages a ring writes to, noted while the frontend copies the guest to another host.

use std::sync::Arc;

use super::super::dirty::DirtyLog;
use super::chain::Written;

/// Where to note what is written, for as long as the frontend copies the guest.
pub(in crate::vhost_user) struct Logging {
    log: Arc<DirtyLog>,
    /// Guest address of the used ring, if writes to it are to be noted too.
    used_ring: Option<u64>,
    /// By head: what the request in flight may write.
    written: Vec<Written>,
}

impl Logging {
    /// For a ring of any size.
    pub(in crate::vhost_user) fn new(log: Arc<DirtyLog>, used_ring: Option<u64>) -> Self {
        Self { log, used_ring, written: Vec::new() }
    }

    /// Makes room for the heads of a ring of `size`.
    pub(super) fn fit(&mut self, size: u16) {
        self.written.resize(usize::from(size), Written::new());
    }

    /// Keeps in mind what request `head` may write.
    #[inline]
    pub(super) fn note(&mut self, head: u16, written: Written) {
        self.written[usize::from(head)] = written;
    }

    /// Marks what request `head` may have written, or only its status byte.
    pub(super) fn mark_request(&mut self, head: u16, status_only: bool) {
        let written = std::mem::take(&mut self.written[usize::from(head)]);
        if !status_only {
            written.iter().for_each(|&(guest, len)| self.log.mark(guest, len.into()));
        } else if let Some(&(guest, len)) = written.iter().rfind(|(_, len)| *len > 0) {
            self.log.mark(guest.wrapping_add(u64::from(len) - 1), 1);
        }
    }

    /// Marks the first `len` bytes of the used ring, if its writes are to be noted.
    pub(super) fn mark_used_ring(&self, len: u64) {
        if let Some(guest) = self.used_ring {
            self.log.mark(guest, len);
        }
    }
}
