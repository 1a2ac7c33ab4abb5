//! What guests read when they start comes ahead of them.
//!
//! ```text
//!   a disk is opened ──► read `boot` ──► fetch its chunks in their order, four in flight
//!                                             │ note what guests ask for that is not among them
//!                                             ▼ two minutes after the last opening
//!                                        write `boot`, if it has changed
//! ```

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmstrata_repo::{ObjectName, Repository};
use vmstrata_store::Fetched;

use crate::boot::{Boot, Chunk, Profile};
use crate::error::{Error, Result};
use crate::head::{BOOT_NAME, Object, ObjectId};
use crate::look::read;
use crate::remote::{CachedLayer, Remote};

/// Chunks that come ahead at a time: more cost the guests' own reads more than they gain.
const IN_FLIGHT: usize = 4;

/// What brings the chunks of a profile. It keeps nothing open by itself.
struct Ahead {
    boot: Arc<Boot>,
    remote: Weak<Remote>,
    objects: HashMap<ObjectId, Object>,
}

impl Ahead {
    fn layer(&self, chunk: Chunk) -> Option<CachedLayer> {
        let layer = self.remote.upgrade()?.layer(self.objects.get(&chunk.layer)?).ok()?;
        ((chunk.number as usize) < layer.cached().chunk_count()).then_some(layer)
    }

    /// Brings the next chunk that is not here, and when it has come the one after that.
    fn go_on(self: &Arc<Self>) {
        while let Some((place, chunk)) = self.boot.next() {
            let number = chunk.number as usize;
            let Some(layer) = self.layer(chunk).filter(|layer| layer.cached().is_missing(number)) else {
                continue;
            };
            let (this, cached) = (Arc::clone(self), Arc::clone(layer.cached()));
            let then = move |fetched: io::Result<Fetched>| {
                if matches!(fetched, Ok(Fetched::Here)) {
                    cached.take_used(number);
                    this.boot.came(place);
                    this.go_on();
                }
            };
            return layer.fetch_ahead(number, Box::new(then));
        }
    }

    /// Has come what earlier starts read, and notes what this one does.
    fn watch(self: &Arc<Self>) -> Result<()> {
        let name = ObjectName::new(BOOT_NAME).expect("letters");
        let Some(remote) = self.remote.upgrade() else { return Ok(()) };
        let profile = match read(&**remote.repository(), &name, Profile::decode) {
            Err(Error::Repository(error)) if error.kind() == io::ErrorKind::NotFound => Profile::default(),
            Err(error @ Error::Damaged { .. }) => {
                tracing::warn!(%error, "it is made anew");
                Profile::default()
            }
            profile => profile?,
        };
        drop(remote);
        self.boot.begin(profile.clone());
        (0..IN_FLIGHT).for_each(|_| self.go_on());
        self.boot.wait();
        let Some(remote) = self.remote.upgrade().filter(|remote| !remote.cache().is_closed()) else {
            return Ok(());
        };
        let was_read = |chunk: Chunk| {
            self.layer(chunk).is_some_and(|layer| layer.cached().is_used(chunk.number as usize))
        };
        let (after, missed) = self.boot.end(was_read);
        if after != profile {
            write(&**remote.repository(), &name, &after.encode())?;
            let (repository, chunks) = (remote.repository().describe(), after.0.len());
            tracing::info!(repository, chunks, missed, "noted what guests read when they start");
        }
        Ok(())
    }
}

/// Watches the start of disks with these layers, and prefetches what earlier starts read. Returns the thread that does, unless one does already.
pub(crate) fn begin(remote: &Arc<Remote>, objects: &[Object], period: Duration) -> Option<JoinHandle<()>> {
    if !remote.cache().is_own() {
        return None;
    }
    let until = Instant::now() + period;
    let mut running = remote.boot().lock();
    if let Some(boot) = &*running {
        boot.last_until(until);
        return None;
    }
    let boot = Arc::new(Boot::new(until));
    *running = Some(Arc::clone(&boot));
    drop(running);
    let objects = objects.iter().map(|object| (object.id, *object)).collect();
    let ahead = Arc::new(Ahead { boot, remote: Arc::downgrade(remote), objects });
    let watch = move || {
        if let Err(error) = ahead.watch() {
            tracing::debug!(%error, "what guests read when they start is not known");
        }
        if let Some(remote) = ahead.remote.upgrade() {
            *remote.boot().lock() = None;
        }
    };
    let started = thread::Builder::new().name("boot".to_owned()).spawn(watch);
    if let Err(error) = &started {
        tracing::debug!(%error, "what guests read when they start is not known");
        *remote.boot().lock() = None;
    }
    started.ok()
}

fn write(repository: &dyn Repository, name: &ObjectName, bytes: &[u8]) -> Result<()> {
    let mut object = repository.replace(name, 1)?;
    object.write(bytes)?;
    object.sync()?;
    Ok(object.finish()?)
}

#[cfg(test)]
mod tests {
    use vmstrata_repo::DirectoryRepository;
    use vmstrata_store::Store as _;
    use vmstrata_types::HostOffset;

    use super::*;
    use crate::cache::Cache;
    use crate::digests::CHUNK;
    use crate::head::is_object_name;
    use crate::object::ship;
    use crate::remote::OnMissing;

    const CHUNKS: u32 = 20;

    /// A host that starts a guest, whose cache is in `dir`.
    fn start(
        repository: &Arc<dyn Repository>,
        dir: &std::path::Path,
        object: &Object,
    ) -> (CachedLayer, Arc<Boot>, JoinHandle<()>) {
        let cache = Cache::open(dir, u64::MAX).unwrap();
        let remote = Remote::new(&cache, Arc::clone(repository), OnMissing::Wait);
        let layer = remote.layer(object).unwrap();
        let thread = begin(&remote, &[*object], Duration::from_millis(300)).unwrap();
        let boot = remote.boot().lock().clone().unwrap();
        (layer, boot, thread)
    }

    fn read_chunks(layer: &CachedLayer, chunks: &[u32]) {
        for &chunk in chunks {
            let mut byte = [0];
            layer.read_exact(&mut byte, HostOffset::new(u64::from(chunk) * CHUNK)).unwrap();
            assert_eq!(u32::from(byte[0]), chunk + 1);
        }
    }

    #[test]
    fn what_one_host_read_comes_ahead_on_the_next_and_changes_with_use() {
        let dir = tempfile::tempdir().unwrap();
        let host = |name: &str| dir.path().join(name);
        std::fs::create_dir(host("nas")).unwrap();
        let repository: Arc<dyn Repository> =
            Arc::new(DirectoryRepository::open(&host("nas"), is_object_name).unwrap());
        let bytes: Vec<u8> = (0..CHUNKS).flat_map(|chunk| vec![chunk as u8 + 1; CHUNK as usize]).collect();
        let object = ship(&*repository, 0, |shipment| shipment.put(&bytes)).unwrap();
        let name = ObjectName::new(BOOT_NAME).unwrap();
        let profile = || read(&*repository, &name, Profile::decode).unwrap();
        let numbers = || profile().0.iter().map(|chunk| chunk.number).collect::<Vec<_>>();

        let (first, _, over) = start(&repository, &host("a"), &object);
        read_chunks(&first, &[9, 3, 15, 3, 4]);
        over.join().unwrap();
        assert_eq!(numbers(), [9, 3, 15, 4]);

        // All of it comes by itself; one is not read, and one is asked for beside it.
        let (second, boot, over) = start(&repository, &host("b"), &object);
        boot.wait_for(4);
        assert_eq!(second.cached().kept_bytes(), 4 * CHUNK);
        read_chunks(&second, &[9, 15, 4, 7]);
        assert_eq!(second.remote().cache().usage().fetched, 5);
        over.join().unwrap();
        assert_eq!(numbers(), [9, 3, 15, 4, 7]);
        let unused: Vec<u8> = profile().0.iter().map(|chunk| chunk.unused).collect();
        assert_eq!(unused, [0, 1, 0, 0, 0]);

        // Where all is here, nothing is learnt; a damaged one is made anew.
        drop(second);
        let (third, _, over) = start(&repository, &host("b"), &object);
        read_chunks(&third, &[9, 15]);
        over.join().unwrap();
        assert_eq!(profile().0[1].unused, 1);
        std::fs::write(host("nas").join(BOOT_NAME), b"odd").unwrap();
        let (fourth, _, over) = start(&repository, &host("c"), &object);
        read_chunks(&fourth, &[2]);
        over.join().unwrap();
        assert_eq!(numbers(), [2]);
    }
}
