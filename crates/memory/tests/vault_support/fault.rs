//! Repositories that fail, or kill their process, at the n-th thing that is asked of them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmstrata_repo::{
    Capabilities, DeviceId, Error, Held, Hold, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository,
    Result, Swept,
};

/// What happens at the n-th operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails, and the next ones work again.
    Once(io::ErrorKind),
    /// It fails, and so does everything after it.
    Dead,
    /// The process is killed.
    Kill,
    /// Something else happens first.
    Meanwhile,
    /// If it writes, it writes something else.
    Garble,
}

/// What happens meanwhile.
type Other = Box<dyn Fn() + Send + Sync>;

/// Counts the operations of several repositories.
pub struct Plan {
    left: AtomicUsize,
    effect: Effect,
    meanwhile: Option<Other>,
    /// Operations that were asked for.
    pub asked: AtomicUsize,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan").field("effect", &self.effect).finish_non_exhaustive()
    }
}

impl Plan {
    /// Lets `at` operations work.
    pub fn new(at: usize, effect: Effect) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(at), effect, meanwhile: None, asked: AtomicUsize::new(0) })
    }

    /// Lets `other` happen before operation `at`.
    pub fn meanwhile(at: usize, other: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        let (left, asked) = (AtomicUsize::new(at), AtomicUsize::new(0));
        Arc::new(Self { left, effect: Effect::Meanwhile, meanwhile: Some(Box::new(other)), asked })
    }

    /// Whether the operation that was asked for last is to write something else.
    fn garbles(&self) -> bool {
        let last = self.asked.load(Ordering::SeqCst) - 1;
        self.effect == Effect::Garble && last == self.left.load(Ordering::SeqCst)
    }

    /// As [`Plan::step`]; a failure names the action.
    fn fail(&self, action: &'static str) -> Result<()> {
        self.step().map_err(Error::of("a repository that fails", action))
    }

    fn step(&self) -> io::Result<()> {
        let at = self.asked.fetch_add(1, Ordering::SeqCst);
        let fatal = self.left.load(Ordering::SeqCst);
        match self.effect {
            Effect::Once(kind) if at == fatal => Err(kind.into()),
            Effect::Dead if at >= fatal => Err(io::ErrorKind::Other.into()),
            Effect::Kill if at == fatal => {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                unreachable!("killed");
            }
            Effect::Meanwhile if at == fatal => {
                self.meanwhile.iter().for_each(|other| other());
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// A repository whose every operation passes the plan.
#[derive(Debug)]
pub struct FaultRepository {
    pub inner: Arc<dyn Repository>,
    pub plan: Arc<Plan>,
}

/// Wraps repositories so that they share a plan.
pub fn faulty(repositories: Vec<Arc<dyn Repository>>, plan: &Arc<Plan>) -> Vec<Arc<dyn Repository>> {
    let wrap = |inner| Arc::new(FaultRepository { inner, plan: Arc::clone(plan) }) as Arc<dyn Repository>;
    repositories.into_iter().map(wrap).collect()
}

impl Repository for FaultRepository {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { conditional_create: false, rename: false, ..self.inner.capabilities() }
    }

    fn free_bytes(&self) -> Result<u64> {
        self.plan.fail("asking for room")?;
        self.inner.free_bytes()
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.plan.fail("listing")?;
        self.inner.list(prefix)
    }

    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        self.plan.fail("creating")?;
        let inner = self.inner.replace(name, copies)?;
        Ok(Box::new(FaultObject { inner, plan: Arc::clone(&self.plan) }))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        self.plan.fail("opening")?;
        let inner = self.inner.open(name)?;
        Ok(Box::new(FaultReader { inner, plan: Arc::clone(&self.plan) }))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.plan.fail("deleting")?;
        self.inner.delete(name)
    }

    fn sweep(&self) -> Result<Swept> {
        self.plan.fail("sweeping")?;
        self.inner.sweep()
    }

    fn hold(&self, how: Hold) -> Result<Option<Held>> {
        self.plan.fail("holding")?;
        self.inner.hold(how)
    }
}

struct FaultObject {
    inner: Box<dyn NewObject>,
    plan: Arc<Plan>,
}

impl NewObject for FaultObject {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // A full disk takes a part.
        if let Err(error) = self.plan.fail("writing") {
            self.inner.write(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        if self.plan.garbles() {
            let mut other = bytes.to_vec();
            other[bytes.len() / 2] ^= 1;
            return self.inner.write(&other);
        }
        self.inner.write(bytes)
    }

    fn sync(&mut self) -> Result<()> {
        self.plan.fail("flushing")?;
        self.inner.sync()
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        self.plan.fail("reading back")?;
        Ok(Box::new(FaultReader { inner: self.inner.read_back()?, plan: Arc::clone(&self.plan) }))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.plan.fail("publishing")?;
        self.inner.finish()
    }
}

struct FaultReader {
    inner: Box<dyn ObjectReader>,
    plan: Arc<Plan>,
}

impl ObjectReader for FaultReader {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.plan.fail("reading")?;
        self.inner.read_at(at, into)
    }
}
