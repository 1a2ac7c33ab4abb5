//! Objects in an object store, while they are written and read.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use futures_util::StreamExt as _;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore as _, ObjectStoreExt as _, PutMode, WriteMultipart};

use super::Common;
use super::hold::{HoldObject, Step, lost};
use super::upload::{Part, Upload, copy};
use crate::error::{Error, Result};
use crate::holds::Lasting as _;
use crate::name::ObjectName;
use crate::repository::{NewObject, ObjectReader, read_in_pieces};

/// Bytes of the parts that a large object is sent in.
const PART: usize = 32 << 20;
/// Parts that are sent while the next one is filled.
const IN_FLIGHT: usize = 2;
/// The most bytes of an object: a store takes 10,000 parts.
const MAX_BYTES: u64 = 10_000 * PART as u64;
/// The most bytes that are read at once.
const PIECE: usize = 8 << 20;

/// An object that is being written.
pub(super) struct NewFile {
    repository: Arc<Common>,
    name: ObjectName,
    /// Without which it does not get its name.
    hold: Option<Arc<HoldObject>>,
    /// Whether it takes the place of an object of its name.
    replaces: bool,
    /// Bytes so far.
    written: u64,
    unfinished: Path,
    state: State,
}

enum State {
    /// All of a small one.
    Kept {
        bytes: Vec<u8>,
        is_sent: bool,
    },
    Sending(WriteMultipart),
    /// The store has all of it.
    Sent,
    /// Bytes may be missing.
    Failed,
    Published,
}

impl NewFile {
    pub(super) fn new(
        repository: &Arc<Common>,
        name: &ObjectName,
        hold: Option<Arc<HoldObject>>,
        replaces: bool,
    ) -> Self {
        let unfinished = repository.draw_unfinished(hold.as_deref());
        let state = State::Kept { bytes: Vec::new(), is_sent: false };
        Self {
            repository: Arc::clone(repository),
            name: name.clone(),
            hold,
            replaces,
            written: 0,
            unfinished,
            state,
        }
    }

    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(&self.repository.address, action, &self.name)
    }

    /// After a failure nothing else is done: what was sent may be torn.
    fn take(&mut self) -> io::Result<State> {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Failed => Err(io::Error::other("writing it failed before")),
            state => Ok(state),
        }
    }

    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        let link = &Arc::clone(&self.repository).link;
        self.written += bytes.len() as u64;
        if self.written > MAX_BYTES {
            let told = format!("an object in S3 has {} GiB at most", MAX_BYTES >> 30);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, told));
        }
        let (mut sending, kept) = match self.take()? {
            State::Kept { bytes: mut kept, is_sent } if kept.len() + bytes.len() <= PART => {
                kept.extend_from_slice(bytes);
                self.state = State::Kept { bytes: kept, is_sent };
                return Ok(());
            }
            State::Kept { bytes: kept, .. } => {
                let upload = link.ask(link.store.put_multipart(&self.unfinished))?;
                (WriteMultipart::new_with_chunk_size(upload, PART), kept)
            }
            State::Sending(sending) => (sending, Vec::new()),
            State::Sent | State::Failed | State::Published => unreachable!("no more bytes come"),
        };
        let sent = link.ask(async {
            send(&mut sending, &kept).await?;
            send(&mut sending, bytes).await
        });
        match sent {
            Ok(()) => self.state = State::Sending(sending),
            // What stays, the bucket's rules remove.
            Err(_) => drop(link.ask(sending.abort())),
        }
        sent
    }

    fn send_all(&mut self) -> io::Result<()> {
        let link = &Arc::clone(&self.repository).link;
        self.state = match self.take()? {
            State::Kept { bytes, is_sent: false } => {
                link.ask(link.store.put(&self.unfinished, bytes.clone().into()))?;
                State::Kept { bytes, is_sent: true }
            }
            State::Sending(sending) => {
                link.ask(sending.finish())?;
                State::Sent
            }
            sent => sent,
        };
        Ok(())
    }

    /// A small object is sent again: the store checks what it takes against the digest that the request is signed with.
    fn publish(&mut self) -> io::Result<()> {
        let Common { link, .. } = &*Arc::clone(&self.repository);
        let target = self.repository.path(self.name.as_str());
        if matches!(self.state, State::Sending(_)) {
            self.send_all()?;
        }
        let is_unfinished_there = match (self.take()?, self.hold.clone()) {
            (State::Kept { bytes, is_sent }, Some(hold)) => {
                let sent = |upload: &Upload<'_>| link.ask(upload.send_part(bytes));
                self.publish_in(&hold, &target, sent)?;
                is_sent
            }
            (_, Some(hold)) => {
                self.publish_in(&hold, &target, |upload| {
                    link.ask(upload.copy(&self.unfinished, self.written))
                })?;
                true
            }
            (State::Kept { bytes, is_sent }, None) => {
                let mode = if self.replaces { PutMode::Overwrite } else { PutMode::Create };
                let put = link.ask(link.store.put_opts(&target, bytes.into(), mode.into()));
                put.map(|_| is_sent)?
            }
            (_, None) => {
                link.ask(copy(link, &self.unfinished, &target, (self.written, self.replaces)))?;
                true
            }
        };
        self.state = State::Published;
        if is_unfinished_there {
            // What stays is swept later.
            let _ = link.tidy(&self.unfinished);
        }
        Ok(())
    }

    /// Gives it its name while the hold lasts: as an upload, which who ends the hold aborts.
    fn publish_in(
        &self,
        hold: &HoldObject,
        target: &Path,
        fill: impl FnOnce(&Upload<'_>) -> io::Result<Vec<Part>>,
    ) -> io::Result<()> {
        let Common { link, .. } = &*self.repository;
        let upload = link.ask(Upload::begin(link, target))?;
        let step = Step::Publish { name: self.name.clone(), upload: upload.id().to_owned() };
        let parts = fill(&upload).and_then(|parts| hold.begin(&step).map(|()| parts));
        let is_begun = parts.is_ok();
        let done = parts.and_then(|parts| link.ask(upload.put_together(&parts, self.replaces)));
        match (&done, is_begun) {
            (Ok(()), _) => hold.end(&step),
            (Err(_), _) if link.ask(upload.abort()).is_ok() => hold.end(&step),
            (Err(_), true) => hold.leave(step),
            // Not asked for; what stays, the bucket's rules remove.
            (Err(_), false) => {}
        }
        match done {
            // Who ended the hold aborted the upload, or removed what was to be copied.
            Err(error) if error.kind() == io::ErrorKind::NotFound && hold.check().is_err() => Err(lost()),
            done => done,
        }
    }
}

async fn send(sending: &mut WriteMultipart, bytes: &[u8]) -> object_store::Result<()> {
    for part in bytes.chunks(PART) {
        sending.wait_for_capacity(IN_FLIGHT).await?;
        sending.write(part);
    }
    Ok(())
}

impl NewObject for NewFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.add(bytes).map_err(self.failed("writing"))
    }

    fn sync(&mut self) -> Result<()> {
        self.send_all().map_err(self.failed("flushing"))
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        let opened = OpenFile::open(&self.repository, &self.name, self.unfinished.clone());
        Ok(Box::new(opened.map_err(self.failed("reading back"))?))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.publish().map_err(self.failed("publishing"))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let link = &self.repository.link;
        match std::mem::replace(&mut self.state, State::Published) {
            State::Kept { is_sent: false, .. } | State::Published => {}
            State::Sending(sending) => drop(link.ask(sending.abort())),
            State::Kept { .. } | State::Sent | State::Failed => drop(link.tidy(&self.unfinished)),
        }
    }
}

/// An object that is open for reading.
pub(super) struct OpenFile {
    repository: Arc<Common>,
    name: ObjectName,
    path: Path,
    len: u64,
    /// Tells it from others that get its name.
    tag: Option<String>,
}

impl OpenFile {
    pub(super) fn open(repository: &Arc<Common>, name: &ObjectName, path: Path) -> io::Result<Self> {
        let found = repository.link.ask(repository.link.store.head(&path))?;
        let (repository, name) = (Arc::clone(repository), name.clone());
        Ok(Self { repository, name, path, len: found.size, tag: found.e_tag })
    }

    async fn get(&self, range: Range<u64>, mut into: &mut [u8]) -> object_store::Result<bool> {
        let options =
            GetOptions { range: Some(range.into()), if_match: self.tag.clone(), ..GetOptions::default() };
        let mut stream = self.repository.link.store.get_opts(&self.path, options).await?.into_stream();
        while let Some(bytes) = stream.next().await {
            let bytes = bytes?;
            let Some((filled, rest)) = into.split_at_mut_checked(bytes.len()) else { return Ok(false) };
            filled.copy_from_slice(&bytes);
            into = rest;
        }
        Ok(into.is_empty())
    }

    fn read_piece(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let answer = async {
            match self.get(at..at + into.len() as u64, into).await {
                Err(object_store::Error::Precondition { .. }) => Ok(None),
                other => other.map(Some),
            }
        };
        match self.repository.link.ask(answer)? {
            Some(true) => Ok(()),
            Some(false) => Err(io::Error::other("the store did not send what was asked for")),
            None => Err(io::Error::other("it was replaced by another")),
        }
    }
}

impl ObjectReader for OpenFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let failed = Error::of_read(&self.repository.address, &self.name, at);
        read_in_pieces(self.len, (at, into), PIECE, |at, piece| self.read_piece(at, piece)).map_err(failed)
    }
}
