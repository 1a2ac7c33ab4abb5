//! What there must be: images, what each reads as, and what each stands on.

use std::path::PathBuf;

use super::discarded;

/// An image, counted in the order in which they came to be.
pub(crate) type Id = usize;

/// What an image says of the one below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    /// None where it says only whose it is.
    pub(crate) name: Option<String>,
    pub(crate) origin: Option<String>,
}

/// A file, whatever its name is at the time: a disk's active layer, a snapshot, or what a disk does not stand on any more.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) below: Option<Id>,
    pub(crate) says: Option<Said>,
    pub(crate) is_raw: bool,
    pub(crate) is_there: bool,
    /// Dropped from a chain, to be removed when nobody needs it.
    pub(crate) is_going: bool,
    /// A commit began to write over it: no state any more, but below others.
    pub(crate) is_half_deleted: bool,
    /// Its writer was killed: a part of what it reads as may be in the journal.
    pub(crate) is_unclean: bool,
    /// A process was killed while it wrote it, at some time.
    pub(crate) may_leak: bool,
}

impl Image {
    pub(crate) fn new(path: PathBuf, bytes: Vec<u8>) -> Self {
        Self {
            path,
            bytes,
            below: None,
            says: None,
            is_raw: false,
            is_there: true,
            is_going: false,
            is_half_deleted: false,
            is_unclean: false,
            may_leak: false,
        }
    }
}

/// A layer below a disk's active one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) name: Option<String>,
    pub(crate) origin: Option<String>,
    pub(crate) layer: Id,
}

#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) images: Vec<Image>,
}

impl Model {
    pub(crate) fn add(&mut self, image: Image) -> Id {
        self.images.push(image);
        self.images.len() - 1
    }

    pub(crate) fn there(&self) -> impl Iterator<Item = Id> + '_ {
        (0..self.images.len()).filter(|&id| self.images[id].is_there)
    }

    /// The image and all that it stands on, base first.
    pub(crate) fn chain(&self, top: Id) -> Vec<Id> {
        let mut chain: Vec<Id> = std::iter::successors(Some(top), |&id| self.images[id].below).collect();
        chain.reverse();
        chain
    }

    pub(crate) fn stands_on(&self, top: Id, layer: Id) -> bool {
        std::iter::successors(Some(top), |&id| self.images[id].below).any(|id| id == layer)
    }

    /// The snapshots of a disk, newest first.
    pub(crate) fn snapshots(&self, active: Id) -> Vec<Seen> {
        let mut chain = self.chain(active);
        chain.reverse();
        let mut origin = None;
        let seen = |pair: &[Id]| {
            let said = self.images[pair[0]].says.clone();
            origin = said.as_ref().and_then(|said| said.origin.clone()).or_else(|| origin.take());
            Seen { name: said.and_then(|said| said.name), origin: origin.clone(), layer: pair[1] }
        };
        chain.windows(2).map(seen).collect()
    }

    /// The snapshot that a name means.
    pub(crate) fn find(&self, active: Id, name: &str) -> Option<Seen> {
        self.snapshots(active).into_iter().find(|seen| seen.name.as_deref() == Some(name))
    }

    /// How many layers of a chain, from the base on, are not of the disk's own history.
    pub(crate) fn layers_of_others(&self, chain: &[Id]) -> usize {
        let ends = |&id: &Id| self.images[id].says.as_ref().is_none_or(|said| said.origin.is_some());
        chain.iter().rposition(ends).unwrap_or(0)
    }

    /// Whether an image says which snapshot the one below it is.
    pub(crate) fn is_named(&self, above: Id) -> bool {
        self.images[above].says.as_ref().is_some_and(|said| said.name.is_some())
    }

    /// Images that name this one as what they stand on.
    pub(crate) fn users(&self, layer: Id) -> impl Iterator<Item = Id> + '_ {
        self.there().filter(move |&id| self.images[id].below == Some(layer))
    }

    /// What is active gets a name, and an empty overlay its path; returns that.
    pub(crate) fn freeze(&mut self, active: Id, name: &str, frozen: PathBuf) -> Id {
        let path = std::mem::replace(&mut self.images[active].path, frozen);
        let says = Said { name: Some(name.to_owned()), origin: None };
        self.overlay(path, active, says)
    }

    /// An empty image on another.
    pub(crate) fn overlay(&mut self, path: PathBuf, below: Id, says: Said) -> Id {
        let bytes = self.images[below].bytes.clone();
        self.add(Image { below: Some(below), says: Some(says), ..Image::new(path, bytes) })
    }

    /// Drops layers from a chain: the one above stands on what is below them.
    pub(crate) fn drop_layers(&mut self, chain: &[Id], first: usize, last: usize) {
        let target = chain[last + 1];
        let says = chain[first..=last + 1].iter().map(|&id| self.images[id].says.clone());
        let origin = says.flatten().find_map(|said| said.origin);
        let said = self.images[chain[first]].says.clone();
        let said = match said {
            Some(said) => Some(Said { origin, ..said }),
            None => origin.map(|disk| Said { name: None, origin: Some(disk) }),
        };
        self.images[target].below = first.checked_sub(1).map(|below| chain[below]);
        self.images[target].says = said.filter(|_| first > 0);
    }

    /// The image at a path.
    pub(crate) fn at(&self, path: &std::path::Path) -> Option<Id> {
        self.there().find(|&id| self.images[id].path == path)
    }

    pub(crate) fn put(&mut self, id: Id, at: u64, bytes: &[u8]) {
        self.images[id].bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Whole clusters of a range become zeros.
    pub(crate) fn discard(&mut self, id: Id, at: u64, len: u64, cluster: u64) {
        let size = self.images[id].bytes.len() as u64;
        if let Some(whole) = discarded(at, len, cluster, size) {
            self.images[id].bytes[whole.start as usize..whole.end as usize].fill(0);
        }
    }
}
