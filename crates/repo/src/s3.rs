//! A directory of a bucket of an object store that speaks S3, as a repository.
//!
//! ```text
//!   PREFIX/ID.layer       an object
//!   PREFIX/.new/ID        what its writer has not published, or a test of what the store can do
//!   PREFIX/.holds/ID      there is a writer or reader, or one who deletes
//! ```
//!
//! *An object appears whole.* A small one is one request. A large one lies in `.new` until the store has copied it to its name. What is
//! to be new is sent, or copied, on the condition that nothing has that name.
//!
//! *The store is tested.* One that knows nothing of conditions would overwrite. So before the first object it is asked to do what it must
//! refuse.
//!
//! *A repository that is not held costs nothing for it.* Objects that are written, or deleted alone, while it is held are noted in the
//! hold first: [`hold`] says why.
//!
//! | module | what it knows |
//! |---|---|
//! | [`link`] | the client, its threads, and how long anything is waited for |
//! | [`upload`] | uploads: giving an object its name, or what the store has another name |
//! | [`hold`] | who holds the repository, without locks |
//! | [`object`] | writing, publishing, reading and reading again |

mod hold;
mod link;
mod object;
mod upload;

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::list::{PaginatedListOptions, PaginatedListStore as _};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutMode};
use parking_lot::Mutex;

use crate::address::S3Address;
use crate::error::{Error, Result};
use crate::holds::{Holds, Kind, Taken};
use crate::name::{NameRule, ObjectName, draw_id};
use crate::repository::{
    Capabilities, DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectReader, Repository, Swept,
};
use hold::{HoldObject, Step};
use link::Link;
use object::{NewFile, OpenFile};
use upload::copy;

/// The directory of what is not published.
const UNFINISHED: &str = ".new";
/// What lies there for longer has no writer any more. Nothing else tells, and a store refuses clients whose clocks are off by minutes.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A repository in an object store.
#[derive(Debug)]
pub(crate) struct S3Repository {
    common: Arc<Common>,
    names: NameRule,
    /// Whether the store is known to refuse what is to be new and is not.
    is_tested: Mutex<bool>,
    /// Whether the store is known to be one that can be held.
    can_be_held: Mutex<bool>,
    holds: Holds<HoldObject>,
}

/// What a repository has in common with its objects.
#[derive(Debug)]
struct Common {
    address: S3Address,
    link: Link,
}

impl Common {
    fn path(&self, name: &str) -> Path {
        Path::from(format!("{}{name}", self.address.prefix))
    }

    /// A name for what is not published, in a hold or without one.
    fn draw_unfinished(&self, hold: Option<&HoldObject>) -> Path {
        let of_hold = hold.map_or_else(String::new, |hold| format!("{}.", hold.name()));
        self.path(&format!("{UNFINISHED}/{of_hold}{:032x}", draw_id()))
    }

    /// Removes what was not published in a hold.
    fn remove_unfinished_of(&self, hold: &str) -> io::Result<Swept> {
        self.remove_unfinished(&format!("{hold}."), |_| true)
    }

    /// Removes what was not published under these names.
    fn remove_unfinished(&self, prefix: &str, is_left: impl Fn(&ObjectMeta) -> bool) -> io::Result<Swept> {
        let mut swept = Swept::default();
        for file in self.files(&format!("{UNFINISHED}/{prefix}"))?.into_iter().filter(is_left) {
            self.link.remove(&file.location)?;
            swept += Swept { objects: 1, bytes: file.size };
        }
        Ok(swept)
    }

    /// What lies in this directory and begins with `prefix`; nothing of directories below.
    fn files(&self, prefix: &str) -> io::Result<Vec<ObjectMeta>> {
        let Self { address, link } = self;
        let prefix = format!("{}{prefix}", address.prefix);
        let (mut files, mut page_token) = (Vec::new(), None);
        loop {
            let page = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token,
                ..PaginatedListOptions::default()
            };
            let listed = link.ask(link.store.list_paginated(Some(&prefix), page))?;
            files.extend(listed.result.objects);
            page_token = listed.page_token;
            if page_token.is_none() {
                return Ok(files);
            }
        }
    }
}

impl S3Repository {
    /// The repository in a bucket that exists, of objects with these names.
    ///
    /// # Errors
    /// `NotFound` without that bucket; what the store says.
    pub(crate) fn open(address: S3Address, names: NameRule) -> Result<Self> {
        let described = address.to_string();
        Self::connect(address, names).map_err(Error::of(described, "opening"))
    }

    fn connect(address: S3Address, names: NameRule) -> io::Result<Self> {
        let link = Link::new(&address)?;
        let (is_tested, can_be_held, holds) = Default::default();
        let common = Arc::new(Common { address, link });
        let repository = Self { common, names, is_tested, can_be_held, holds };
        let one = PaginatedListOptions { max_keys: Some(1), ..PaginatedListOptions::default() };
        let common = &repository.common;
        common.link.ask(common.link.store.list_paginated(Some(&common.address.prefix), one))?;
        Ok(repository)
    }

    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of(&self.common.address, action)
    }

    /// For `map_err`.
    fn failed_at<'a>(
        &'a self,
        action: &'static str,
        name: &'a ObjectName,
    ) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(&self.common.address, action, name)
    }

    fn objects(&self, prefix: &str) -> io::Result<Vec<ObjectInfo>> {
        let objects = self.common.files(prefix)?.into_iter().filter_map(|file| {
            let name = ObjectName::new(file.location.filename()?).ok()?;
            (self.names)(name.as_str()).then_some(ObjectInfo {
                name,
                len: file.size,
                allocated: file.size,
                copies: 1,
            })
        });
        Ok(objects.collect())
    }

    fn begin(&self, name: &ObjectName, copies: u8, replaces: bool) -> io::Result<NewFile> {
        name.check(self.names)?;
        self.capabilities().check_copies(copies)?;
        if !replaces {
            self.test_conditions()?;
        }
        let hold = self.holds.alone().or_else(|| self.holds.shared());
        Ok(NewFile::new(&self.common, name, hold, replaces))
    }

    /// Refuses a store that overwrites what it was asked not to overwrite.
    fn test_conditions(&self) -> io::Result<()> {
        let mut is_tested = self.is_tested.lock();
        if *is_tested {
            return Ok(());
        }
        let link @ Link { store, .. } = &self.common.link;
        let (path, text) = (self.common.draw_unfinished(None), "test");
        let put = || store.put_opts(&path, text.into(), PutMode::Create.into());
        let tested = async {
            put().await?;
            let copied = copy(link, &path, &path, (text.len() as u64, false));
            let refused = [put().await.map(drop), copied.await];
            store.delete(&path).await?;
            Ok(refused)
        };
        for refused in self.common.link.ask(tested)? {
            match refused {
                Err(object_store::Error::AlreadyExists { .. }) => {}
                Err(error) => return Err(link::to_io(error)),
                Ok(()) => {
                    let told = "the store overwrites an object that was to be new: it ignores If-None-Match, so it can only be read";
                    return Err(io::Error::new(io::ErrorKind::Unsupported, told));
                }
            }
        }
        *is_tested = true;
        Ok(())
    }

    /// Who holds the repository alone notes what it deletes. Without that hold it deletes only metadata and its own objects, which no other
    /// process uses.
    fn remove(&self, name: &ObjectName) -> io::Result<()> {
        name.check(self.names)?;
        let path = self.common.path(name.as_str());
        if let Some(alone) = self.holds.alone() {
            let step = Step::Delete { name: name.clone() };
            alone.begin(&step)?;
            let removed = self.common.link.remove(&path);
            match removed {
                Ok(()) => alone.end(&step),
                Err(_) => alone.leave(step),
            }
            return removed;
        }
        if let Some(shared) = self.holds.shared() {
            shared.abort_unanswered()?;
        }
        self.common.link.remove(&path)
    }

    fn sweep_all(&self) -> io::Result<Swept> {
        let now = SystemTime::now();
        let mut swept = self.holds.take_swept();
        swept += self.common.remove_unfinished("", |file| is_abandoned(file.last_modified.into(), now))?;
        Ok(swept)
    }

    fn take(&self, kind: Kind) -> io::Result<Taken<HoldObject>> {
        let mut can_be_held = self.can_be_held.lock();
        if !*can_be_held {
            hold::test_store(&self.common)?;
            *can_be_held = true;
        }
        drop(can_be_held);
        HoldObject::take(&self.common, kind)
    }
}

/// Whether who began to write something then has given up.
fn is_abandoned(written: SystemTime, now: SystemTime) -> bool {
    now.duration_since(written).is_ok_and(|age| age > ABANDONED_AFTER)
}

impl Repository for S3Repository {
    fn describe(&self) -> String {
        self.common.address.to_string()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: true,
            rename: false,
            read_back: true,
            early_read_back: false,
            max_copies: 1,
            ranged_reads: true,
            free_space: false,
            holds: true,
        }
    }

    /// The store as a whole.
    fn device(&self) -> DeviceId {
        DeviceId::of_place(&self.common.link.place)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.objects(prefix).map_err(self.failed("listing"))
    }

    fn create_new(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(self.begin(name, copies, false).map_err(self.failed_at("creating", name))?))
    }

    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(self.begin(name, copies, true).map_err(self.failed_at("creating", name))?))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let opened = OpenFile::open(&self.common, name, self.common.path(name.as_str()));
        Ok(Box::new(opened.map_err(self.failed_at("opening", name))?))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.remove(name).map_err(self.failed_at("deleting", name))
    }

    /// What was begun less than a day ago may have a writer, and stays. What was sent in parts and not put together is not listed: the
    /// bucket's rules remove it (`AbortIncompleteMultipartUpload`).
    fn sweep(&self) -> Result<Swept> {
        self.sweep_all().map_err(self.failed("sweeping"))
    }

    fn hold(&self, how: Hold) -> Result<Option<Held>> {
        self.holds.hold(how, |kind| self.take(kind)).map_err(self.failed("holding"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_begun_a_day_ago_is_abandoned() {
        let now = SystemTime::now();
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        assert!(!is_abandoned(now - hours(23), now) && is_abandoned(now - hours(25), now));
        assert!(!is_abandoned(now + hours(1), now), "clocks differ");
    }
}
