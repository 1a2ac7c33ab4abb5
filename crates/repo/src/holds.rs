//! Who in this process holds a repository that has no locks of its own.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::repository::{Held, Hold, Swept};

/// How often to look whether others have let go.
const POLL: Duration = Duration::from_millis(200);

/// How a repository is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// With others of this kind.
    Shared,
    /// Alone.
    Alone,
}

impl Kind {
    /// What the names of holds of this kind begin with.
    pub(crate) const fn prefix(self) -> &'static str {
        match self {
            Self::Shared => "shared-",
            Self::Alone => "alone-",
        }
    }

    /// Whether a hold of this kind cannot be there beside `other`, which is another hold's name.
    pub(crate) fn is_against(self, other: &str) -> bool {
        self == Self::Alone || other.starts_with(Self::Alone.prefix())
    }
}

/// A hold that lasts until it is dropped, or until others end it because its process says nothing.
pub(crate) trait Lasting: Send + Sync + Sized + 'static {
    /// That others have not ended it.
    ///
    /// # Errors
    /// When they have; what the repository says.
    fn check(&self) -> io::Result<()>;
}

/// A hold, or that another is in its way; and what was removed with holds that had expired.
pub(crate) type Taken<H> = (Option<H>, Swept);

/// The holds that this process has on a repository.
#[derive(Debug)]
pub(crate) struct Holds<H> {
    /// One for all who write and read through this repository.
    shared: Mutex<Weak<H>>,
    alone: Mutex<Weak<H>>,
    /// What went with expired holds.
    swept: Mutex<Swept>,
}

impl<H> Default for Holds<H> {
    fn default() -> Self {
        Self { shared: Mutex::default(), alone: Mutex::default(), swept: Mutex::default() }
    }
}

impl<H: Lasting> Holds<H> {
    /// The one with others, if there is one.
    pub(crate) fn shared(&self) -> Option<Arc<H>> {
        self.shared.lock().upgrade()
    }

    /// The one alone, if there is one.
    pub(crate) fn alone(&self) -> Option<Arc<H>> {
        self.alone.lock().upgrade()
    }

    /// What went with expired holds since this was asked last.
    pub(crate) fn take_swept(&self) -> Swept {
        std::mem::take(&mut *self.swept.lock())
    }

    /// Holds with others; waits for who deletes. Of several who hold it in this process none lets it go for the others.
    pub(crate) fn hold_shared(&self, take: impl Fn(Kind) -> io::Result<Taken<H>>) -> io::Result<Arc<H>> {
        let mut shared = self.shared.lock();
        if let Some(hold) = shared.upgrade() {
            hold.check()?;
            return Ok(hold);
        }
        let hold = wait(|| self.take(Kind::Shared, &take))?;
        *shared = Arc::downgrade(&hold);
        Ok(hold)
    }

    /// Holds in any way; `None` only for [`Hold::AloneOrNot`].
    pub(crate) fn hold(
        &self,
        how: Hold,
        take: impl Fn(Kind) -> io::Result<Taken<H>>,
    ) -> io::Result<Option<Held>> {
        match how {
            Hold::Read => match self.hold_shared(take) {
                // Who only reads can do so where it may not write.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Some(Box::new(()))),
                held => Ok(Some(Box::new(held?))),
            },
            Hold::Write => Ok(Some(Box::new(self.hold_shared(take)?))),
            Hold::AloneOrNot => Ok(self.hold_alone(&take)?.map(|held| Box::new(held) as Held)),
            Hold::Alone => Ok(Some(Box::new(wait(|| self.hold_alone(&take))?))),
        }
    }

    fn hold_alone(&self, take: &impl Fn(Kind) -> io::Result<Taken<H>>) -> io::Result<Option<Arc<H>>> {
        let hold = self.take(Kind::Alone, take)?;
        if let Some(hold) = &hold {
            *self.alone.lock() = Arc::downgrade(hold);
        }
        Ok(hold)
    }

    /// Holds it, unless another does so against that.
    fn take(&self, kind: Kind, take: &impl Fn(Kind) -> io::Result<Taken<H>>) -> io::Result<Option<Arc<H>>> {
        let (hold, swept) = take(kind)?;
        *self.swept.lock() += swept;
        Ok(hold.map(Arc::new))
    }
}

fn wait<H>(try_once: impl Fn() -> io::Result<Option<Arc<H>>>) -> io::Result<Arc<H>> {
    loop {
        if let Some(hold) = try_once()? {
            return Ok(hold);
        }
        std::thread::sleep(POLL);
    }
}
