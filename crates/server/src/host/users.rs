//! Who uses a disk besides its exports and its jobs: a snapshot, a resize, a job that begins. Each is done soon.
//!
//! Closing a disk shuts its exports and ends its jobs. It waits for these users *before* ([`Host::unused`]):
//! the files stay locked until the last reference is gone, and a disk that was closed cannot go on being served.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use vmstrata_disk::Disk;

use super::{Host, Table};
use crate::error::Error;
use crate::spec::DiskSpec;

/// How long to wait for them. One that takes longer waits for a guest's agent, as a rule.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Requests that may wait for one disk: a quarter of those that may wait for any, so that storage that hangs blocks no
/// request for other disks.
const WAITING_MAX: usize = 8;

/// What is being done with a disk at the moment.
#[derive(Debug, Default)]
pub(super) struct Users {
    doing: Mutex<Vec<&'static str>>,
    /// Signalled when one is done.
    done: Condvar,
}

/// A disk for something that is done soon.
#[derive(Debug)]
pub(super) struct Lent {
    // Let go of before the use ends.
    disk: Arc<Disk>,
    _use: Use,
}

/// Something that is being done with a disk, until this is dropped.
#[derive(Debug)]
pub(super) struct Use {
    of: Arc<Users>,
    doing: &'static str,
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut doing = self.of.doing.lock();
        let own = doing.iter().position(|doing| *doing == self.doing);
        doing.swap_remove(own.expect("noted when it began"));
        self.of.done.notify_all();
    }
}

impl Deref for Lent {
    type Target = Arc<Disk>;

    fn deref(&self) -> &Arc<Disk> {
        &self.disk
    }
}

impl Users {
    /// Lends `disk`, which is called `name`, for `doing`, a participle with its object.
    ///
    /// # Errors
    /// [`Error::Crowded`].
    fn lend(self: &Arc<Self>, name: &str, disk: &Arc<Disk>, doing: &'static str) -> Result<Lent, Error> {
        let mut now = self.doing.lock();
        if let [first, ..] = now[..]
            && now.len() >= WAITING_MAX
        {
            return Err(Error::Crowded { disk: name.to_owned(), waiting: now.len(), doing: first });
        }
        now.push(doing);
        Ok(Lent { disk: Arc::clone(disk), _use: Use { of: Arc::clone(self), doing } })
    }

    /// Has a disk that is not open counted as used.
    pub(super) fn begin(self: &Arc<Self>, doing: &'static str) -> Use {
        self.doing.lock().push(doing);
        Use { of: Arc::clone(self), doing }
    }

    /// What someone does.
    fn now(&self) -> Option<&'static str> {
        self.doing.lock().first().copied()
    }

    /// Waits until there is no user; returns what one does if that takes too long.
    fn wait(&self, deadline: Instant) -> Result<(), &'static str> {
        let mut doing = self.doing.lock();
        while let Some(&first) = doing.first() {
            if self.done.wait_until(&mut doing, deadline).timed_out() {
                return Err(first);
            }
        }
        Ok(())
    }
}

impl Table {
    /// The disk of this name, if it is served. It is not closed until it is given back.
    pub(super) fn lend(&self, name: &str, doing: &'static str) -> Result<(&DiskSpec, Lent), Error> {
        let (spec, disk) = self.serving(name)?;
        let users = &self.entry(name).expect("it is served").users;
        Ok((spec, users.lend(name, disk, doing)?))
    }
}

impl Host {
    /// The table at a moment at which nobody uses the disks but their exports and their jobs.
    ///
    /// # Errors
    /// No such disk, one that is neither served nor waits, or one that is used for longer than `patience`: nothing has changed.
    pub(super) fn unused(
        &self,
        names: &[String],
        patience: Duration,
    ) -> Result<MutexGuard<'_, Table>, Error> {
        let deadline = Instant::now() + patience;
        loop {
            let table = self.table.lock();
            let mut used = None;
            for name in names {
                match table.serving(name) {
                    Ok(_) | Err(Error::NotOpen { .. }) => {}
                    Err(error) => return Err(error),
                }
                let users = &table.entry(name).expect("it is there").users;
                if users.now().is_some() {
                    used = Some((name, Arc::clone(users)));
                }
            }
            let Some((name, users)) = used else { return Ok(table) };
            drop(table);
            users.wait(deadline).map_err(|doing| Error::Busy { name: name.clone(), doing })?;
        }
    }
}
