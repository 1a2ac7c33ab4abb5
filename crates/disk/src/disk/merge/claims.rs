//! Frozen layers that are written for a merge: no other disk of this process may stand on them meanwhile.

use super::{Running, others};
use crate::error::{Error, Result};
use crate::merge::MergeFault;
use crate::refs::ChainFile;

impl Running {
    /// Makes sure that no other disk of this process stands on a layer, or will.
    ///
    /// # Errors
    /// [`MergeFault::Busy`], [`MergeFault::TargetInUse`].
    pub(super) fn claim(&mut self, link: &ChainFile) -> Result<()> {
        let disk = &self.disk;
        if !disk.resources.merging().lock().insert(link.file) {
            return Err(Error::from(MergeFault::Busy).in_file(&link.path));
        }
        self.claimed.push(link.file);
        let here = others(disk).find(|other| other.stands_on(link.file));
        let here = here.map(|other| format!("the disk {}", other.path().display()));
        here.map_or(Ok(()), |by| Err(Error::from(MergeFault::TargetInUse { by }).in_file(&link.path)))
    }

    /// Lets disks be opened again that stand on what was claimed.
    pub(super) fn give_up_claims(&mut self) {
        let mut merging = self.disk.resources.merging().lock();
        for file in self.claimed.drain(..) {
            merging.remove(&file);
        }
    }
}
