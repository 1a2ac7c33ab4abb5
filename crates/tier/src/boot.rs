//! Which chunks guests read when they start, as earlier starts and this one tell.
//!
//! One object in the repository has the profile of all its layers, so versions of a base share what they have in common. It is a hint: one that
//! lacks, is old or wrong costs time and changes no byte. Of hosts that write it at the same time the last one wins.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use crate::head::ObjectId;
use crate::sealed::{seal, unseal};

/// For how long after an opening reads are those of a start.
pub const BOOT: Duration = Duration::from_secs(120);
/// The most chunks of a profile: 4 GiB.
const CHUNKS_MAX: usize = 16384;
/// After how many starts in a row a chunk goes that came and was not read.
const UNUSED_MAX: u8 = 3;
const VERSION: u32 = 1;

/// A chunk that is read in a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) layer: ObjectId,
    pub(crate) number: u32,
    /// In how many of the last starts it came and was not read.
    pub(crate) unused: u8,
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
pub(crate) struct Profile(pub(crate) Vec<Chunk>);

impl Profile {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut layers: Vec<ObjectId> = self.0.iter().map(|chunk| chunk.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        let place = |id| layers.binary_search(id).expect("it is one of them") as u32;
        let chunks = self.0.iter().map(|chunk| (place(&chunk.layer), chunk.number, chunk.unused));
        let chunks = chunks.collect();
        seal(&Stored { version: VERSION, layers: layers.iter().map(ObjectId::to_string).collect(), chunks })
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
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
    pub(crate) fn after(self, missed: &[(usize, Chunk)], was_read: impl Fn(usize) -> Option<bool>) -> Self {
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
    /// Signalled when a chunk has come ahead, and when there are no more readers.
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
    pub(crate) fn new(until: Instant) -> Self {
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

    pub(crate) fn begin(&self, profile: Profile) {
        let mut seen = self.seen.lock();
        seen.known.extend(profile.0.iter().map(|chunk| (chunk.layer, chunk.number)));
        seen.profile = profile;
    }

    /// The next chunk of the profile, and its place there.
    pub(crate) fn next(&self) -> Option<(usize, Chunk)> {
        let mut seen = self.seen.lock();
        let place = seen.next;
        let chunk = *seen.profile.0.get(place)?;
        seen.next += 1;
        Some((place, chunk))
    }

    /// It counts as over at this time.
    pub(crate) fn last_until(&self, until: Instant) {
        self.seen.lock().until = until;
    }

    /// A chunk of the profile has come ahead.
    pub(crate) fn came(&self, place: usize) {
        self.seen.lock().ahead.insert(place);
        self.changed.notify_all();
    }

    /// Waits until so many chunks have come ahead.
    #[cfg(test)]
    pub(crate) fn wait_for(&self, count: usize) {
        let mut seen = self.seen.lock();
        self.changed.wait_while(&mut seen, |seen| seen.ahead.len() < count);
    }

    /// The profile after this start; see [`Profile::after`]. Returns how many chunks were missed, too.
    pub(crate) fn end(&self, was_read: impl Fn(Chunk) -> bool) -> (Profile, usize) {
        let mut seen = self.seen.lock();
        let (missed, came) = (std::mem::take(&mut seen.missed), std::mem::take(&mut seen.ahead));
        let profile = seen.profile.clone();
        drop(seen);
        let was_read = |place: usize| came.contains(&place).then(|| was_read(profile.0[place]));
        (profile.clone().after(&missed, was_read), missed.len())
    }

    /// Waits for its end.
    pub(crate) fn wait(&self) {
        let mut seen = self.seen.lock();
        while !seen.is_left && seen.until > Instant::now() {
            let until = seen.until;
            self.changed.wait_until(&mut seen, until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
