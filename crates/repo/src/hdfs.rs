//! A directory of HDFS as a repository, which keeps as many copies of each object as it is asked for.
//!
//! ```text
//!   DIR/ID.critical                              an object: replicated as often as its pages ask for, in small blocks
//!   DIR/.holds/shared-ID/alive                   there is a writer or reader
//!   DIR/.holds/shared-ID/ID.critical.N.new       what it has not published
//!   DIR/.holds/alone-ID/                         there is one who deletes, what it deletes, and what it has not published
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`link`] | the client, its threads, and how long anything is waited for |
//! | [`hold`] | who holds the repository, without locks |
//! | [`object`] | writing, renaming, reading and reading again |
//!
//! Lock order: `own`, then those of the holds.

mod hold;
mod link;
mod object;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hdfs_native::WriteOptions;
use parking_lot::Mutex;

use crate::address::HdfsAddress;
use crate::error::{Error, Result};
use crate::holds::{Holds, Kind, Lasting as _, Taken};
use crate::name::{NameRule, ObjectName};
use crate::repository::{
    Capabilities, DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectReader, Repository, Swept,
};
use hold::{HoldDir, UNFINISHED, lost, sweep};
use link::Link;
use object::{NewFile, OpenFile, Patience, State};

/// The most copies of an object.
const MAX_COPIES: u8 = 16;

/// A repository in HDFS.
#[derive(Debug)]
pub(crate) struct HdfsRepository {
    common: Arc<Common>,
    names: NameRule,
    holds: Holds<HoldDir>,
    /// Of who writes and does not hold it.
    own: Mutex<Option<Arc<HoldDir>>>,
    /// Objects begun.
    count: AtomicUsize,
}

/// What a repository has in common with its objects.
#[derive(Debug)]
struct Common {
    address: HdfsAddress,
    link: Arc<Link>,
    patience: Patience,
    /// Unfinished objects that HDFS was asked to name, and that may be named late as long as they are there.
    unanswered: Mutex<Vec<String>>,
}

impl Common {
    /// Removes the unfinished objects that may be named late: no name appears any more when this returns.
    fn settle(&self) -> io::Result<()> {
        let mut unanswered = self.unanswered.lock();
        while let Some(path) = unanswered.last() {
            self.link.ask(self.link.client.delete(path, false))?;
            unanswered.pop();
        }
        Ok(())
    }
}

fn dir_or_root(address: &HdfsAddress) -> &str {
    if address.dir.is_empty() { "/" } else { &address.dir }
}

impl HdfsRepository {
    /// The repository in a directory that exists, of objects with these names.
    ///
    /// # Errors
    /// `NotFound` without that directory; what HDFS says.
    pub(crate) fn open(address: HdfsAddress, names: NameRule) -> Result<Self> {
        let described = address.to_string();
        Self::connect(address, names).map_err(Error::of(described, "opening"))
    }

    fn connect(address: HdfsAddress, names: NameRule) -> io::Result<Self> {
        let link = Arc::new(Link::new(&address.authority)?);
        if !link.ask(link.client.get_file_info(dir_or_root(&address)))?.isdir {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let (patience, unanswered) = Default::default();
        let common = Arc::new(Common { address, link, patience, unanswered });
        let (holds, own, count) = Default::default();
        Ok(Self { common, names, holds, own, count })
    }

    fn path(&self, name: &ObjectName) -> String {
        format!("{}/{name}", self.common.address.dir)
    }

    fn link(&self) -> &Link {
        &self.common.link
    }

    /// Holds the directory, unless another does so against that.
    fn take(&self, kind: Kind) -> io::Result<Taken<HoldDir>> {
        HoldDir::take(&self.common.link, &self.common.address.dir, kind)
    }

    /// That in which an object is written: the caller's, or one with others, until this repository is dropped.
    fn writing_hold(&self) -> io::Result<Arc<HoldDir>> {
        if let Some(hold) = self.holds.alone().or_else(|| self.holds.shared()) {
            return Ok(hold);
        }
        let mut own = self.own.lock();
        let hold = self.holds.hold_shared(|kind| self.take(kind))?;
        *own = Some(Arc::clone(&hold));
        Ok(hold)
    }
}

impl HdfsRepository {
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

    /// What the directory's quota leaves; without a quota, as if there was no end.
    fn left_of_quota(&self) -> io::Result<u64> {
        let summary =
            self.link().ask(self.link().client.get_content_summary(dir_or_root(&self.common.address)))?;
        let has_quota = summary.space_quota != u64::MAX;
        Ok(if has_quota { summary.space_quota.saturating_sub(summary.space_consumed) } else { u64::MAX })
    }

    fn objects(&self, prefix: &str) -> io::Result<Vec<ObjectInfo>> {
        let files =
            self.link().ask(self.link().client.list_status(dir_or_root(&self.common.address), false))?;
        let objects = files.iter().filter(|file| !file.isdir).filter_map(|file| {
            let name = ObjectName::new(file.path.rsplit('/').next()?).ok()?;
            let is_wanted = name.as_str().starts_with(prefix) && (self.names)(name.as_str());
            is_wanted.then_some(())?;
            let copies = u8::try_from(file.replication.unwrap_or(1)).unwrap_or(u8::MAX);
            let len = file.length as u64;
            Some(ObjectInfo { name, len, allocated: len, copies })
        });
        Ok(objects.collect())
    }

    fn begin(&self, name: &ObjectName, copies: u8, replaces: bool) -> io::Result<NewFile> {
        name.check(self.names)?;
        self.capabilities().check_copies(copies)?;
        let hold = self.writing_hold()?;
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let unfinished = format!("{}/{name}.{count}{UNFINISHED}", hold.path());
        let options = WriteOptions::default()
            .replication(copies.into())
            .block_size(self.common.address.block_bytes)
            .permission(0o640)
            .create_parent(false);
        let writer = self.link().ask(self.link().client.create(&unfinished, options));
        let writer = writer.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                // Who took it himself takes another.
                self.own.lock().take_if(|own| Arc::ptr_eq(own, &hold));
                lost()
            }
            _ => error,
        })?;
        Ok(NewFile {
            repository: Arc::clone(&self.common),
            name: name.clone(),
            _hold: hold,
            writer,
            written: 0,
            unfinished,
            target: self.path(name),
            replaces,
            state: State::Writing,
        })
    }

    /// Who holds the repository alone deletes what others could begin to need the moment its hold expires: so by renaming,
    /// which fails then. Without that hold only metadata and own objects are deleted, which nobody begins to need.
    fn remove(&self, name: &ObjectName) -> io::Result<()> {
        name.check(self.names)?;
        let (link, path) = (self.link(), self.path(name));
        if let Some(alone) = self.holds.alone() {
            let moved = link.ask(link.client.rename(&path, &format!("{}/{name}", alone.path()), true));
            return match moved {
                // Either of the two is not there.
                Err(error) if error.kind() == io::ErrorKind::NotFound => alone.check(),
                other => other,
            };
        }
        self.common.settle()?;
        link.ask(link.client.delete(&path, false)).map(drop)
    }
}

impl Repository for HdfsRepository {
    fn describe(&self) -> String {
        self.common.address.to_string()
    }

    /// No rename: one that comes late, of a process that lost its hold, could not be kept from its objects.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: true,
            rename: false,
            read_back: true,
            early_read_back: false,
            max_copies: MAX_COPIES,
            ranged_reads: true,
            free_space: true,
            holds: true,
        }
    }

    /// HDFS as a whole: what two of its directories hold is lost with one NameNode.
    fn device(&self) -> DeviceId {
        DeviceId::of_place(&self.common.address.authority)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.left_of_quota().map_err(self.failed("asking for room"))
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
        let opened = OpenFile::open(&self.common, name, self.path(name));
        Ok(Box::new(opened.map_err(self.failed_at("opening", name))?))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.remove(name).map_err(self.failed_at("deleting", name))
    }

    /// Of others whose holds have expired. Those of this one, and of who holds it alone, went when it was held.
    fn sweep(&self) -> Result<Swept> {
        let mut swept = self.holds.take_swept();
        let expired = sweep(&self.common.link, &self.common.address.dir);
        swept += expired.map_err(self.failed("sweeping"))?;
        Ok(swept)
    }

    fn hold(&self, how: Hold) -> Result<Option<Held>> {
        self.holds.hold(how, |kind| self.take(kind)).map_err(self.failed("holding"))
    }
}
