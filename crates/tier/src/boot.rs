//! Which chunks guests read when they start: known from earlier starts, they come ahead of the guests.
//!
//! ```text
//!   a disk is opened ──► read `boot` ──► fetch its chunks in their order, four in flight
//!                                             │ note what guests ask for that is not among them
//!                                             ▼ two minutes after the last opening
//!                                        write `boot`, if it has changed
//! ```
//!
//! One object in the repository has the profile of all its layers, so versions of a base share what they have in common. It is a hint: one that
//! lacks, is old or wrong costs time and changes no byte. Of hosts that write it at the same time the last one wins.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use vmstrata_repo::{ObjectName, Repository};
use vmstrata_store::Fetched;

use crate::error::{Error, Result};
use crate::head::{BOOT_NAME, Object, ObjectId};
use crate::look::read;
use crate::remote::{CachedLayer, Remote};
use crate::sealed::{seal, unseal};

/// For how long after an opening reads are those of a start.
pub const BOOT: Duration = Duration::from_secs(120);
/// Chunks that come ahead at a time: more cost the guests' own reads more than they gain.
const IN_FLIGHT: usize = 4;
/// The most chunks of a profile: 4 GiB.
const CHUNKS_MAX: usize = 16384;
/// After how many starts in a row a chunk goes that came and was not read.
const UNUSED_MAX: u8 = 3;
const VERSION: u32 = 1;

/// A chunk that is read in a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    layer: ObjectId,
    number: u32,
    /// In how many of the last starts it came and was not read.
    unused: u8,
}

/// The object.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    layers: Vec<String>,
    /// Which of the layers, which chunk of it, and in how many starts it was not used.
    chunks: Vec<(u32, u32, u8)>,
}

/// Chunks in the order of their first use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Profile(Vec<Chunk>);

impl Profile {
    fn encode(&self) -> Vec<u8> {
        let mut layers: Vec<ObjectId> = self.0.iter().map(|chunk| chunk.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        let place = |id| layers.binary_search(id).expect("it is one of them") as u32;
        let chunks = self.0.iter().map(|chunk| (place(&chunk.layer), chunk.number, chunk.unused));
        let chunks = chunks.collect();
        seal(&Stored { version: VERSION, layers: layers.iter().map(ObjectId::to_string).collect(), chunks })
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let Stored { version, layers, chunks } = unseal(bytes)?;
        if version != VERSION {
            return Err(format!("it is of version {version}, not {VERSION}"));
        }
        let layers: Vec<ObjectId> = layers
            .iter()
            .map(|id| id.parse().map_err(|_| format!("{id:?} is no layer")))
            .collect::<Result<_, _>>()?;
        let chunk = |(layer, number, unused): (u32, u32, u8)| {
            let layer = *layers.get(layer as usize).ok_or_else(|| format!("it has no layer {layer}"))?;
            Ok(Chunk { layer, number, unused })
        };
        Ok(Self(chunks.into_iter().map(chunk).collect::<Result<_, String>>()?))
    }

    /// The profile after one more start: `missed` are chunks that were asked for and not among these, each with the place where it was missed. `was_read` says
    /// of a chunk that came ahead whether it was read; of the others nothing is known.
    fn after(self, missed: &[(usize, Chunk)], was_read: impl Fn(usize) -> Option<bool>) -> Self {
        let known: HashSet<(ObjectId, u32)> =
            self.0.iter().map(|chunk| (chunk.layer, chunk.number)).collect();
        let mut missed =
            missed.iter().filter(|(_, chunk)| !known.contains(&(chunk.layer, chunk.number))).peekable();
        let mut chunks = Vec::with_capacity(self.0.len());
        for (place, mut chunk) in self.0.into_iter().enumerate() {
            while let Some((_, earlier)) = missed.next_if(|(at, _)| *at <= place) {
                chunks.push(*earlier);
            }
            match was_read(place) {
                Some(true) => chunk.unused = 0,
                Some(false) => chunk.unused += 1,
                None => {}
            }
            if chunk.unused < UNUSED_MAX {
                chunks.push(chunk);
            }
        }
        chunks.extend(missed.map(|(_, chunk)| *chunk));
        chunks.truncate(CHUNKS_MAX);
        Self(chunks)
    }
}

/// A start, while it is watched.
#[derive(Debug)]
pub(crate) struct Boot {
    seen: Mutex<Seen>,
    /// Signalled when there are no more readers.
    changed: Condvar,
}

#[derive(Debug)]
struct Seen {
    /// When it counts as over.
    until: Instant,
    /// There are no more readers.
    is_left: bool,
    profile: Profile,
    /// Which chunk of the profile comes next.
    next: usize,
    /// Those of the profile that came ahead.
    ahead: HashSet<usize>,
    /// See [`Profile::after`].
    missed: Vec<(usize, Chunk)>,
    known: HashSet<(ObjectId, u32)>,
}

impl Boot {
    fn new(until: Instant) -> Self {
        let seen = Seen {
            until,
            is_left: false,
            profile: Profile::default(),
            next: 0,
            ahead: HashSet::new(),
            missed: Vec::new(),
            known: HashSet::new(),
        };
        Self { seen: Mutex::new(seen), changed: Condvar::new() }
    }

    /// A guest asks for a chunk that is not here.
    pub(crate) fn missed(&self, layer: ObjectId, chunk: usize) {
        let (mut seen, number) = (self.seen.lock(), chunk as u32);
        if seen.missed.len() < CHUNKS_MAX && seen.known.insert((layer, number)) {
            let place = seen.next;
            seen.missed.push((place, Chunk { layer, number, unused: 0 }));
        }
    }

    /// There are no more readers: nothing is noted.
    pub(crate) fn leave(&self) {
        self.seen.lock().is_left = true;
        self.changed.notify_all();
    }

    fn begin(&self, profile: Profile) {
        let mut seen = self.seen.lock();
        seen.known.extend(profile.0.iter().map(|chunk| (chunk.layer, chunk.number)));
        seen.profile = profile;
    }

    /// The next chunk of the profile, and its place there.
    fn next(&self) -> Option<(usize, Chunk)> {
        let mut seen = self.seen.lock();
        let place = seen.next;
        let chunk = *seen.profile.0.get(place)?;
        seen.next += 1;
        Some((place, chunk))
    }

    /// Waits for its end.
    fn wait(&self) {
        let mut seen = self.seen.lock();
        while !seen.is_left && seen.until > Instant::now() {
            let until = seen.until;
            self.changed.wait_until(&mut seen, until);
        }
    }
}

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
                    this.boot.seen.lock().ahead.insert(place);
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
        let (missed, came) = {
            let mut seen = self.boot.seen.lock();
            (std::mem::take(&mut seen.missed), std::mem::take(&mut seen.ahead))
        };
        let was_read = |place: usize| {
            let chunk = profile.0[place];
            let layer = self.layer(chunk).filter(|_| came.contains(&place))?;
            Some(layer.cached().is_used(chunk.number as usize))
        };
        let after = profile.clone().after(&missed, was_read);
        if after != profile {
            write(&**remote.repository(), &name, &after.encode())?;
            let (repository, chunks) = (remote.repository().describe(), after.0.len());
            tracing::info!(
                repository,
                chunks,
                missed = missed.len(),
                "noted what guests read when they start"
            );
        }
        Ok(())
    }
}

/// Watches the start of disks with these layers, and has come what earlier starts read.
pub(crate) fn begin(remote: &Arc<Remote>, objects: &[Object], period: Duration) {
    if !remote.cache().is_own() {
        return;
    }
    let until = Instant::now() + period;
    let mut running = remote.boot().lock();
    if let Some(boot) = &*running {
        boot.seen.lock().until = until;
        return;
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
    if let Err(error) = thread::Builder::new().name("boot".to_owned()).spawn(watch) {
        tracing::debug!(%error, "what guests read when they start is not known");
        *remote.boot().lock() = None;
    }
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

    fn chunk(layer: ObjectId, number: u32, unused: u8) -> Chunk {
        Chunk { layer, number, unused }
    }

    #[test]
    fn a_profile_reads_back_and_nonsense_is_refused() {
        let [a, b] = [(); 2].map(|()| ObjectId::draw());
        let profile = Profile(vec![chunk(b, 7, 0), chunk(a, 0, 2), chunk(b, 3, 1)]);
        let bytes = profile.encode();
        assert_eq!(Profile::decode(&bytes).unwrap(), profile);
        assert_eq!(Profile::decode(&Profile::default().encode()).unwrap(), Profile::default());
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            Profile::decode(&changed).unwrap_err();
            Profile::decode(&bytes[..at]).unwrap_err();
        }
        let stored = |version, layers: &[&str]| Stored {
            version,
            layers: layers.iter().map(|&id| id.to_owned()).collect(),
            chunks: vec![(1, 0, 0)],
        };
        let id = a.to_string();
        for odd in [stored(2, &[&id, &id]), stored(1, &[&id]), stored(1, &[&id, "web"])] {
            Profile::decode(&seal(&odd)).unwrap_err();
        }
    }

    const CHUNKS: u32 = 20;

    /// A host that starts a guest, whose cache is in `dir`.
    fn start(repository: &Arc<dyn Repository>, dir: &std::path::Path, object: &Object) -> CachedLayer {
        let cache = Cache::open(dir, u64::MAX).unwrap();
        let remote = Remote::new(&cache, Arc::clone(repository), OnMissing::Wait);
        let layer = remote.layer(object).unwrap();
        begin(&remote, &[*object], Duration::from_millis(300));
        layer
    }

    fn read_chunks(layer: &CachedLayer, chunks: &[u32]) {
        for &chunk in chunks {
            let mut byte = [0];
            layer.read_exact(&mut byte, HostOffset::new(u64::from(chunk) * CHUNK)).unwrap();
            assert_eq!(u32::from(byte[0]), chunk + 1);
        }
    }

    fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            thread::sleep(Duration::from_millis(5));
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
        let is_over = |layer: &CachedLayer| layer.remote().boot().lock().is_none();

        let first = start(&repository, &host("a"), &object);
        read_chunks(&first, &[9, 3, 15, 3, 4]);
        wait_until("the first start", || is_over(&first));
        assert_eq!(numbers(), [9, 3, 15, 4]);

        // All of it comes by itself; one is not read, and one is asked for beside it.
        let second = start(&repository, &host("b"), &object);
        wait_until("what comes ahead", || second.cached().kept_bytes() == 4 * CHUNK);
        read_chunks(&second, &[9, 15, 4, 7]);
        assert_eq!(second.remote().cache().usage().fetched, 5);
        wait_until("the second start", || is_over(&second));
        assert_eq!(numbers(), [9, 3, 15, 4, 7]);
        let unused: Vec<u8> = profile().0.iter().map(|chunk| chunk.unused).collect();
        assert_eq!(unused, [0, 1, 0, 0, 0]);

        // Where all is here, nothing is learnt; a damaged one is made anew.
        drop(second);
        wait_until("the cache is free", || Cache::open(&host("b"), u64::MAX).is_ok());
        let third = start(&repository, &host("b"), &object);
        read_chunks(&third, &[9, 15]);
        wait_until("the third start", || is_over(&third));
        assert_eq!(profile().0[1].unused, 1);
        std::fs::write(host("nas").join(BOOT_NAME), b"odd").unwrap();
        let fourth = start(&repository, &host("c"), &object);
        read_chunks(&fourth, &[2]);
        wait_until("the fourth start", || is_over(&fourth));
        assert_eq!(numbers(), [2]);
    }

    #[test]
    fn what_a_start_misses_gets_its_place_and_what_none_reads_goes() {
        let layer = ObjectId::draw();
        let numbers = |profile: &Profile| profile.0.iter().map(|chunk| chunk.number).collect::<Vec<_>>();
        let missed = |places: &[(usize, u32)]| {
            places.iter().map(|&(place, number)| (place, chunk(layer, number, 0))).collect::<Vec<_>>()
        };
        let first = Profile::default().after(&missed(&[(0, 5), (0, 2), (0, 9)]), |_| None);
        assert_eq!(numbers(&first), [5, 2, 9]);
        // One of them was noted before the profile was read.
        let second = first.after(&missed(&[(0, 2), (1, 7), (3, 1)]), |_| Some(true));
        assert_eq!(numbers(&second), [5, 7, 2, 9, 1]);
        let mut profile = second;
        for unused in 1..UNUSED_MAX {
            profile = profile.after(&[], |place| Some(place != 1));
            assert_eq!(profile.0[1].unused, unused);
        }
        assert_eq!(numbers(&profile.clone().after(&[], |place| Some(place != 1))), [5, 2, 9, 1]);
        assert_eq!(profile.clone().after(&[], |_| None), profile, "nothing is known of it");
        assert_eq!(profile.after(&[], |_| Some(true)).0[1].unused, 0);
    }
}
