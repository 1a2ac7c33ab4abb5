//! Disks that stand on a disk's active file, which a snapshot or going back puts aside.
//!
//! ```text
//!            before                          after a snapshot of golden.qcow2
//!   ci.qcow2 ─► golden.qcow2 ─► A            ci.qcow2 ─► golden.qcow2 ─► B ─► golden.v8.qcow2 ─► A
//! ```
//!
//! The next one to open `ci.qcow2` reads the same, but a process that has it open knows golden.qcow2 as A and finds B where it
//! comes to open it. Usually it has A locked ([`crate::chain`]), and is met there; here those are looked for that have not.
//! Going back is more: golden.qcow2 has other content then, and so has all that stands on it.

use std::path::{Path, PathBuf};

use super::fault::SnapshotFault;
use crate::chain::OpenOptions;
use crate::error::{ErrorKind, Result};
use crate::refs::{ChainFile, LocalHolders, Users, chain_files};

/// Images that stand on a disk's active file, of which the caller has the writer's lock.
pub(crate) struct StoodOn {
    active: ChainFile,
    users: Users,
}

impl StoodOn {
    /// Looks for them: in the disk's directory, in those that backing files may be in, and wherever a disk told of itself.
    ///
    /// # Errors
    /// A chain that cannot be read.
    pub(crate) fn find(disk: &Path, open: &OpenOptions) -> Result<Self> {
        let mut chain = chain_files(disk, open, &*open.opener)?;
        let active = chain.pop().expect("a chain has its top");
        let users = Users::standing_on(std::slice::from_ref(&active), disk, open);
        Ok(Self { active, users })
    }

    fn image(&self) -> Option<PathBuf> {
        self.users.of(self.active.file).cloned()
    }

    /// # Errors
    /// An image that stands on the file and that someone uses.
    pub(crate) fn refuse_if_in_use(&self) -> Result<()> {
        let Some(image) = self.image() else { return Ok(()) };
        let layers = std::slice::from_ref(&self.active);
        match self.users.in_use(layers, &LocalHolders::NOTHING, &[self.active.file]) {
            Some(by) => Err(SnapshotFault::StoodOnInUse { image, by }.into()),
            None => Ok(()),
        }
    }

    /// # Errors
    /// An image that stands on the file, unless `forced`.
    pub(crate) fn refuse_unless(&self, forced: bool) -> Result<()> {
        match self.image().filter(|_| !forced) {
            Some(image) => Err(ErrorKind::IsBase { image }.into()),
            None => Ok(()),
        }
    }
}
