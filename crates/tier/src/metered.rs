//! A repository as the engine of a disk uses it: over the wire that the host's disks share, and watched.
//!
//! The [`Meter`] can only tell for how long the repository has not answered if single operations are short, so what is written is brought to
//! stable storage now and then, about every other second.

use std::sync::Arc;
use std::time::Instant;

use vmstrata_repo::{
    Capabilities, DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository, Result,
    Swept,
};

use crate::meter::Meter;
use crate::wire::Wire;

/// Bytes that are written between two times that they are brought to stable storage: at first, at least, and at most.
const STRETCH: [u64; 3] = [8 << 20, 4 << 20, 64 << 20];
/// How long that may take.
const STRETCH_SECONDS: f64 = 2.0;

/// A repository as an engine and its merges use it. What merges move says nothing of the epoch that is shipped.
pub(crate) struct Watched {
    wire: Arc<Wire>,
    /// Of what is shipped.
    pub(crate) meter: Arc<Meter>,
    merges: Option<Arc<dyn Repository>>,
}

impl Watched {
    pub(crate) fn new(wire: &Arc<Wire>) -> Self {
        Self { wire: Arc::clone(wire), meter: Arc::new(Meter::new()), merges: None }
    }

    /// The repository for epochs.
    pub(crate) fn of(&mut self, repository: Arc<dyn Repository>) -> Arc<dyn Repository> {
        let metered = |repository, meter| Arc::new(Metered::new(repository, Arc::clone(&self.wire), meter));
        self.merges = Some(metered(Arc::clone(&repository), Arc::new(Meter::new())));
        metered(repository, Arc::clone(&self.meter))
    }

    /// The same for merges.
    ///
    /// # Panics
    /// Before there is one.
    pub(crate) fn merges(&self) -> Arc<dyn Repository> {
        Arc::clone(self.merges.as_ref().expect("a repository that was claimed"))
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Metered {
    inner: Arc<dyn Repository>,
    wire: Arc<Wire>,
    meter: Arc<Meter>,
}

impl Metered {
    pub(crate) fn new(inner: Arc<dyn Repository>, wire: Arc<Wire>, meter: Arc<Meter>) -> Self {
        Self { inner, wire, meter }
    }

    fn object(&self, inner: Box<dyn NewObject>) -> Box<dyn NewObject> {
        let (wire, meter) = (Arc::clone(&self.wire), Arc::clone(&self.meter));
        Box::new(MeteredObject { inner, wire, meter, unsynced: 0, stretch: STRETCH[0] })
    }
}

impl Repository for Metered {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    fn free_bytes(&self) -> Result<u64> {
        self.meter.ask(|| self.inner.free_bytes())
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.meter.ask(|| self.inner.list(prefix))
    }

    fn names(&self, prefix: &str) -> Result<Vec<ObjectName>> {
        self.meter.ask(|| self.inner.names(prefix))
    }

    fn create_new(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        self.meter.ask(|| self.inner.create_new(name, copies)).map(|inner| self.object(inner))
    }

    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        self.meter.ask(|| self.inner.replace(name, copies)).map(|inner| self.object(inner))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let inner = self.meter.ask(|| self.inner.open(name))?;
        Ok(Box::new(MeteredReader { inner, meter: Arc::clone(&self.meter) }))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.meter.ask(|| self.inner.delete(name))
    }

    fn rename(&self, from: &ObjectName, to: &ObjectName) -> Result<()> {
        self.meter.ask(|| self.inner.rename(from, to))
    }

    fn sweep(&self) -> Result<Swept> {
        self.meter.ask(|| self.inner.sweep())
    }

    fn hold(&self, how: Hold) -> Result<Option<Held>> {
        self.meter.ask(|| self.inner.hold(how))
    }
}

struct MeteredObject {
    inner: Box<dyn NewObject>,
    wire: Arc<Wire>,
    meter: Arc<Meter>,
    /// Bytes written since they were brought to stable storage, and how many it may be.
    unsynced: u64,
    stretch: u64,
}

impl NewObject for MeteredObject {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(self.wire.piece()) {
            self.wire.pass(piece.len() as u64);
            self.meter.ask_to_move(piece.len(), || self.inner.write(piece))?;
        }
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= self.stretch {
            let began = Instant::now();
            self.meter.ask(|| self.inner.write_out())?;
            let affordable = self.unsynced as f64 * STRETCH_SECONDS / began.elapsed().as_secs_f64();
            self.stretch = (affordable as u64).clamp(STRETCH[1], STRETCH[2]);
            self.unsynced = 0;
        }
        Ok(())
    }

    fn write_out(&mut self) -> Result<()> {
        self.meter.ask(|| self.inner.write_out())
    }

    fn sync(&mut self) -> Result<()> {
        self.meter.ask(|| self.inner.sync())
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        let inner = self.meter.ask(|| self.inner.read_back())?;
        Ok(Box::new(MeteredReader { inner, meter: Arc::clone(&self.meter) }))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { inner, meter, .. } = *self;
        meter.ask(|| inner.finish())
    }
}

struct MeteredReader {
    inner: Box<dyn ObjectReader>,
    meter: Arc<Meter>,
}

impl ObjectReader for MeteredReader {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.meter.ask_to_move(into.len(), || self.inner.read_at(at, into))
    }
}
