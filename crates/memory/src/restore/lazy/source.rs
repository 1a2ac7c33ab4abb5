//! Where pages of a guest's memory come from while it runs.

use std::fmt;
use std::io;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::BoxError;
use crate::address::{Frame, PAGE_BYTES};
use crate::refill::Later;
use crate::vault::{Order, Snapshot, Vault, VaultError, Want, Which};

/// Takes a page that was read.
pub type Give<'a> = dyn FnMut(Frame, &[u8; PAGE_BYTES]) -> io::Result<()> + 'a;

/// A place that has pages of a guest's memory for it to go on with. Asked by several threads.
pub trait PageSource: Send + Sync + fmt::Debug {
    /// Reads `frame`, and gives it with all pages that are read along with it. What is given must be what the page was, by a
    /// checksum or a hash, or what the guest would read in its place. Gives nothing when it does not have the page.
    ///
    /// # Errors
    /// When it has the page and cannot read it now. It may be asked again.
    fn read(&self, frame: Frame, give: &mut Give<'_>) -> Result<(), BoxError>;
}

/// Clean pages on the guest's disks.
impl PageSource for Later {
    fn read(&self, frame: Frame, give: &mut Give<'_>) -> Result<(), BoxError> {
        Ok(Self::read(self, frame, give)?)
    }
}

/// A snapshot in a vault.
#[derive(Debug)]
pub struct VaultSource {
    vault: Arc<Vault>,
    order: Order,
    /// Replaced by one that is newly opened when it cannot read: repositories come back.
    snapshot: RwLock<Arc<Snapshot>>,
}

impl VaultSource {
    /// The pages of `snapshot`, which is in `vault`; and, in order, the clean ones that it does not have.
    pub fn new(vault: Arc<Vault>, snapshot: Arc<Snapshot>, want: Want) -> (Self, Vec<Frame>) {
        let (order, lost) = snapshot.order(want);
        (Self { vault, order, snapshot: RwLock::new(snapshot) }, lost)
    }

    /// Calls `each` with the pages of an extent and their classes, extent by extent.
    pub fn for_each_extent(&self, each: impl FnMut(Vec<(Frame, crate::PageClass)>)) {
        self.snapshot.read().extents(&self.order).for_each(each);
    }

    /// Opens the snapshot anew, with all repositories that can be read now.
    fn reopen(&self, old: &Arc<Snapshot>) -> Result<Arc<Snapshot>, VaultError> {
        let mut current = self.snapshot.write();
        if Arc::ptr_eq(&current, old) {
            *current = Arc::new(self.vault.snapshot(&Which::Id(old.info().id))?);
        }
        Ok(Arc::clone(&current))
    }
}

impl PageSource for VaultSource {
    fn read(&self, frame: Frame, give: &mut Give<'_>) -> Result<(), BoxError> {
        let snapshot = Arc::clone(&self.snapshot.read());
        match snapshot.read_around(&self.order, frame, give) {
            Err(VaultError::PageLost { .. }) => {
                Ok(self.reopen(&snapshot)?.read_around(&self.order, frame, give)?)
            }
            other => Ok(other?),
        }
    }
}
