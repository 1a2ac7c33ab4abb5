//! Holding a repository in a store that has no locks, so that nothing is deleted while another process writes or reads.
//!
//! A hold is a small object in `.holds`. Its holder writes it anew every 10 s, and before each step that could do harm later;
//! others end it once it is a minute old. How old it is the store's clock says alone: who looks has just made an object of its
//! own, and one listing has the times of both. A hold that is ended too early costs its holder the work, and no one any data.
//!
//! ```text
//!   vmstrata hold 1
//!   serial 17                         a number that grows with each version
//!   over                              another process has ended it
//!   publish NAME UPLOAD               what the store was asked for, and may do at any time from then on
//!   delete NAME
//! ```
//!
//! *Two never hold against each other.* Each makes its object first, then lists the others. A listing shows all that was made
//! before, so at least one of two sees the other, and gives up.
//!
//! *A process that lost its hold does no harm.* It may have been stopped, and not know; and what it asked for may reach the
//! store late. So each version of a hold is written on the condition that the version before is still there, and each step is
//! noted in the hold before the store is asked for it:
//!
//! - To give an object its name is to complete an upload. To end a hold, another process first writes `over` into it, on the
//!   same condition, and then aborts all uploads that are noted there. If the holder noted its upload before, the upload is
//!   aborted, or complete before the other goes on and sees it. If not, the note fails, and the holder completes nothing.
//! - Only who holds it alone notes the deletion of an object, of which it knows that no snapshot needs it. Who ends the
//!   hold deletes that object. Names are not used again, so a request that comes after that deletes nothing.
//! - The process that ends a hold may be killed or stopped on the way, or do it beside others that do the same. All of this can be
//!   done again, and the object of the hold goes last: until then no one goes on.
//!
//! *What is assumed of the store*: what it answered, later requests see; of two writes on one condition one succeeds; an upload
//! is completed or aborted, not both; and the very first version of a hold does not appear a second time, minutes after its
//! holder gave that request up. [`test_store`] looks for the conditions and the aborted upload before the first hold.
//!
//! Requests without a hold are not checked: metadata is deleted without one, and an object by its writer before anything refers
//! to it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::Builder;
use std::time::{Duration, SystemTime};

use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutMode, UpdateVersion};
use parking_lot::Mutex;

use super::Common;
use super::link::{Link, TIDY_MAX, to_io};
use super::upload::Upload;
use crate::holds::{Kind, Lasting, Taken};
use crate::name::{ObjectName, draw_id};
use crate::repository::Swept;

/// The directory of all holds, in the repository.
const HOLDS: &str = ".holds";
const FIRST_LINE: &str = "vmstrata hold 1";
/// How often a holder shows that it is there.
const RENEWED_EVERY: Duration = Duration::from_secs(10);
/// How old a hold is that has no holder any more.
const EXPIRES_AFTER: Duration = Duration::from_secs(60);
/// How often a version is written that others of the same holder, given up before, come in the way of.
const TRIES: usize = 5;

/// What the store is asked for, and may do late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// An upload gets an object's name.
    Publish { name: ObjectName, upload: String },
    /// An object goes.
    Delete { name: ObjectName },
}

/// What a version of a hold says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Record {
    serial: u64,
    is_over: bool,
    /// Begun, and perhaps not done.
    steps: Vec<Step>,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FIRST_LINE}\nserial {}", self.serial)?;
        if self.is_over {
            writeln!(f, "over")?;
        }
        self.steps.iter().try_for_each(|step| match step {
            Step::Publish { name, upload } => writeln!(f, "publish {name} {upload}"),
            Step::Delete { name } => writeln!(f, "delete {name}"),
        })
    }
}

impl Record {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix('\n')?.split('\n');
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let serial = lines.next()?.strip_prefix("serial ")?.parse().ok()?;
        let mut record = Self { serial, ..Self::default() };
        for line in lines {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["over"] => record.is_over = true,
                ["publish", name, upload] => {
                    let (name, upload) = (ObjectName::new(name).ok()?, upload.to_owned());
                    record.steps.push(Step::Publish { name, upload });
                }
                ["delete", name] => record.steps.push(Step::Delete { name: ObjectName::new(name).ok()? }),
                _ => return None,
            }
        }
        Some(record)
    }
}

/// A hold on a repository, until it is dropped.
#[derive(Debug)]
pub(super) struct HoldObject {
    holder: Arc<Holder>,
    /// Dropped, it ends the thread that writes the hold anew.
    _stop: Sender<()>,
}

#[derive(Debug)]
struct Holder {
    common: Arc<Common>,
    name: String,
    state: Mutex<State>,
}

/// What a holder knows of its hold.
#[derive(Debug, Default)]
struct State {
    /// The newest version that the store is known to have.
    record: Record,
    /// Tells that version from others.
    tag: Option<String>,
    /// Of the version that was tried last.
    serial: u64,
    /// Steps to which no answer came.
    unanswered: Vec<Step>,
    /// Others have ended it, or it was let go.
    is_gone: bool,
}

impl HoldObject {
    /// Holds the repository, unless another holds it against that.
    pub(super) fn take(common: &Arc<Common>, kind: Kind) -> io::Result<Taken<Self>> {
        let name = format!("{}{:032x}", kind.prefix(), draw_id());
        let path = path(common, &name);
        let record = Record::default();
        let put = common.link.ask(common.link.store.put(&path, record.to_string().into()))?;
        let state = Mutex::new(State { record, tag: put.e_tag, ..State::default() });
        // From here on dropping it removes the object.
        let (stop, stopped) = mpsc::channel();
        let hold = Self { holder: Arc::new(Holder { common: Arc::clone(common), name, state }), _stop: stop };
        let mut swept = Swept::default();
        let listed = common.files(&format!("{HOLDS}/"))?;
        let Some(own) = listed.iter().find(|found| found.location == path) else {
            if read(common, &path)?.is_none() {
                return Ok((None, swept));
            }
            let told = "the store does not list what it took before: holds need a store that does";
            return Err(io::Error::new(io::ErrorKind::Unsupported, told));
        };
        let now: SystemTime = own.last_modified.into();
        for other in listed.iter().filter(|found| found.location != path) {
            let other_name = other.location.filename().unwrap_or_default();
            if !kind.is_against(other_name) {
                continue;
            }
            let is_expired = has_expired(other.last_modified.into(), now);
            match end_expired(common, other_name, other, is_expired)? {
                Some(ended) => swept += ended,
                None => return Ok((None, swept)),
            }
        }
        let holder = Arc::clone(&hold.holder);
        Builder::new().name("s3-hold".into()).spawn(move || holder.renew(&stopped))?;
        Ok((Some(hold), swept))
    }

    /// What the names of its unfinished objects begin with.
    pub(super) fn name(&self) -> &str {
        &self.holder.name
    }

    /// Notes a step. Only when that was done the store may be asked for it.
    ///
    /// # Errors
    /// When the hold was lost; what the store says.
    pub(super) fn begin(&self, step: &Step) -> io::Result<()> {
        self.holder.write(|record| record.steps.push(step.clone()))
    }

    /// A step was done, or will not be.
    pub(super) fn end(&self, step: &Step) {
        let State { record, unanswered, .. } = &mut *self.holder.state.lock();
        [&mut record.steps, unanswered].into_iter().for_each(|steps| steps.retain(|other| other != step));
    }

    /// A step may be done at any time from now on.
    pub(super) fn leave(&self, step: Step) {
        self.holder.state.lock().unanswered.push(step);
    }

    /// Aborts uploads that no answer came to: no name appears any more when this returns.
    pub(super) fn abort_unanswered(&self) -> io::Result<()> {
        let unanswered = self.holder.state.lock().unanswered.clone();
        unanswered.iter().try_for_each(|step| {
            if let Step::Publish { .. } = step {
                finish(&self.holder.common, step)?;
                self.end(step);
            }
            Ok(())
        })
    }
}

impl Lasting for HoldObject {
    fn check(&self) -> io::Result<()> {
        self.holder.write(|_| ())
    }
}

impl Drop for HoldObject {
    fn drop(&mut self) {
        let Holder { common, name, state } = &*self.holder;
        let gone = match state.try_lock_for(TIDY_MAX) {
            Some(state) if state.is_gone => return,
            // Who ends it later does what is left.
            Some(state) if !state.unanswered.is_empty() => {
                Err(io::Error::other("the store did not answer all that it was asked for"))
            }
            Some(mut state) => {
                state.is_gone = true;
                common.link.tidy(&path(common, name))
            }
            None => Err(io::ErrorKind::TimedOut.into()),
        };
        if let Err(error) = gone {
            let address = &common.address;
            tracing::warn!(
                "{address}/{HOLDS}/{name}: cannot be removed, and holds for another minute: {error}"
            );
        }
    }
}

impl Holder {
    /// Writes it anew as long as it is held.
    fn renew(&self, stopped: &Receiver<()>) {
        while stopped.recv_timeout(RENEWED_EVERY) == Err(RecvTimeoutError::Timeout) {
            if let Err(error) = self.write(|_| ()) {
                let Common { address, .. } = &*self.common;
                tracing::warn!("{address}/{HOLDS}/{}: not written anew: {error}", self.name);
                if self.state.lock().is_gone {
                    return;
                }
            }
        }
    }

    /// Writes the next version, on the condition that the one before is there.
    fn write(&self, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let Link { store, .. } = &self.common.link;
        let path = path(&self.common, &self.name);
        let mut state = self.state.lock();
        let mut next = state.record.clone();
        change(&mut next);
        for _ in 0..TRIES {
            if state.is_gone {
                return Err(lost());
            }
            state.serial += 1;
            next.serial = state.serial;
            let before = UpdateVersion { e_tag: state.tag.clone(), version: None };
            let put = async {
                match store.put_opts(&path, next.to_string().into(), PutMode::Update(before).into()).await {
                    Err(Error::Precondition { .. }) => Ok(None),
                    put => put.map(Some),
                }
            };
            if let Some(put) = self.common.link.ask(put)? {
                (state.record, state.tag) = (next, put.e_tag);
                return Ok(());
            }
            match read(&self.common, &path)? {
                Some((found, tag)) if found == next => {
                    (state.record, state.tag) = (next, tag);
                    return Ok(());
                }
                // A version that was given up before has come after all.
                Some((found, tag)) if !found.is_over => state.tag = tag,
                _ => state.is_gone = true,
            }
        }
        Err(if state.is_gone { lost() } else { io::Error::other("another process writes its hold") })
    }
}

/// That others have ended a hold.
pub(super) fn lost() -> io::Error {
    io::Error::other("the hold on it was lost: this process did not reach the store for over a minute")
}

fn path(common: &Common, name: &str) -> Path {
    common.path(&format!("{HOLDS}/{name}"))
}

/// Whether the holder of what was written then is gone.
fn has_expired(written: SystemTime, now: SystemTime) -> bool {
    now.duration_since(written).is_ok_and(|age| age > EXPIRES_AFTER)
}

/// What a hold says, with the tag of that version; `None` when it is gone.
fn read(common: &Common, path: &Path) -> io::Result<Option<(Record, Option<String>)>> {
    let link = &common.link;
    let got = link.ask(async {
        let got = link.store.get(path).await?;
        let tag = got.meta.e_tag.clone();
        Ok((got.bytes().await?, tag))
    });
    let (bytes, tag) = match got {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        got => got?,
    };
    match std::str::from_utf8(&bytes).ok().and_then(Record::parse) {
        Some(record) => Ok(Some((record, tag))),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{path} is no hold that is known"))),
    }
}

/// Ends a hold if its holder is gone, with what that did not finish; `None` when the holder is there.
fn end_expired(
    common: &Common,
    name: &str,
    listed: &ObjectMeta,
    is_expired: bool,
) -> io::Result<Option<Swept>> {
    let Link { store, .. } = &common.link;
    let path = &listed.location;
    let Some((mut record, tag)) = read(common, path)? else { return Ok(Some(Swept::default())) };
    if !record.is_over {
        if !is_expired || !is_same(&tag, &listed.e_tag) {
            return Ok(None);
        }
        record.is_over = true;
        let before = UpdateVersion { e_tag: tag, version: None };
        let put = store.put_opts(path, record.to_string().into(), PutMode::Update(before).into());
        let is_over = common.link.ask(async {
            match put.await {
                // Its holder is there after all, or another process ends it, too.
                Err(Error::Precondition { .. }) => Ok(false),
                put => put.map(|_| true),
            }
        });
        if !is_over? {
            return Ok(None);
        }
    }
    record.steps.iter().try_for_each(|step| finish(common, step))?;
    let swept = common.remove_unfinished_of(name)?;
    common.link.remove(path)?;
    Ok(Some(swept))
}

/// Whether a listing and an answer tell of one version: some stores quote tags in one of them.
fn is_same(one: &Option<String>, other: &Option<String>) -> bool {
    let bare = |tag: &Option<String>| tag.as_ref().map(|tag| tag.trim_matches('"').to_owned());
    bare(one) == bare(other)
}

/// Brings a step to its end: nothing that was asked of the store changes anything later.
fn finish(common: &Common, step: &Step) -> io::Result<()> {
    match step {
        Step::Publish { name, upload } => {
            let path = common.path(name.as_str());
            common.link.ask(Upload::begun(&common.link, &path, upload).abort())
        }
        Step::Delete { name } => common.link.remove(&common.path(name.as_str())),
    }
}

/// Refuses a store in which a process that lost its hold could do harm.
pub(super) fn test_store(common: &Common) -> io::Result<()> {
    let link @ Link { store, .. } = &common.link;
    let path = common.draw_unfinished(None);
    let other = UpdateVersion { e_tag: Some("\"0\"".to_owned()), version: None };
    let tested = async {
        store.put(&path, "test".into()).await?;
        let replaced = store.put_opts(&path, "other".into(), PutMode::Update(other).into()).await;
        let upload = Upload::begin(link, &path).await?;
        let parts = upload.send_part(b"other".to_vec()).await?;
        upload.abort().await?;
        let made = upload.put_together(&parts, true).await;
        store.delete(&path).await?;
        Ok((replaced, made))
    };
    let told = match link.ask(tested)? {
        (Ok(_), _) => "it ignores If-Match",
        (Err(Error::Precondition { .. }), Ok(())) => "it completes an upload that was aborted",
        (Err(Error::Precondition { .. }), Err(Error::NotFound { .. })) => return Ok(()),
        (Err(Error::Precondition { .. }), Err(error)) | (Err(error), _) => return Err(to_io(error)),
    };
    let told = format!("one process cannot keep others from deleting in this store: {told}");
    Err(io::Error::new(io::ErrorKind::Unsupported, told))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_says_what_was_begun() {
        let name = ObjectName::new("18ea.critical").unwrap();
        let steps =
            vec![Step::Publish { name: name.clone(), upload: "2~xY_".to_owned() }, Step::Delete { name }];
        for (is_over, steps) in [(false, Vec::new()), (true, steps)] {
            let record = Record { serial: 17, is_over, steps };
            assert_eq!(Record::parse(&record.to_string()), Some(record));
        }
        let text = "vmstrata hold 1\nserial 2\nover\ndelete a.critical\n";
        assert_eq!(Record::parse(text).unwrap().to_string(), text);
        for wrong in [
            "",
            "vmstrata hold 2\nserial 1\n",
            "vmstrata hold 1\n",
            "vmstrata hold 1\nserial 1",
            "vmstrata hold 1\nserial 1\ndelete ../x\n",
            "vmstrata hold 1\nserial 1\npublish a\n",
            "vmstrata hold 1\nserial 1\nmore\n",
        ] {
            assert_eq!(Record::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_hold_expires_after_a_minute_of_the_stores_clock() {
        let now = SystemTime::now();
        let seconds = Duration::from_secs;
        assert!(!has_expired(now - seconds(60), now) && has_expired(now - seconds(61), now));
        assert!(!has_expired(now + seconds(61), now), "it is newer");
    }
}
