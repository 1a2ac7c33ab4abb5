//! What a crawl has found so far.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Serialize;
use vmstrata_store::FileId;
use vmstrata_types::path_to_text;

use crate::image::Image;
use crate::limits;

/// Why something was left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftOut {
    /// The host does not let us, and nothing says that it is an image.
    Unreadable,
    /// A symbolic link.
    Link,
    /// A FIFO, socket, device, or a directory of the kernel's.
    Special,
    /// A directory below [`limits::DEPTH_MAX`] others.
    TooDeep,
    /// An overlay that a snapshot under way has not put in its place yet, or one that was killed never did.
    Unfinished,
    /// An image beyond [`limits::IMAGES_MAX`].
    TooMany,
    /// Not left out at all: a layer that its disk let go of, by the disk's note.
    LeftOver,
}

/// Things of one sort that were left out: all counted, some listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Omitted {
    /// How many.
    pub count: u64,
    /// The first of them in order of the alphabet.
    pub paths: Vec<String>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// What was looked at, in full.
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) files: u64,
    pub(crate) directories: u64,
    /// In order of their paths once the crawl is done.
    pub(crate) images: Vec<Image>,
    by_id: HashMap<FileId, usize>,
    entered: HashSet<FileId>,
    left_out: [(u64, BTreeSet<PathBuf>); 7],
}

impl Found {
    /// Whether a directory is met for the first time.
    pub(super) fn enter(&mut self, id: FileId) -> bool {
        let new = self.entered.insert(id);
        self.directories += u64::from(new);
        new
    }

    pub(super) fn has(&self, id: FileId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Takes in another name of a file that is known; false when it is not.
    pub(super) fn merge_name(&mut self, id: FileId, path: &Path) -> bool {
        let Some(&at) = self.by_id.get(&id) else { return false };
        self.images[at].merge_name(path);
        true
    }

    pub(crate) fn add(&mut self, image: Image) {
        // Another thread may have looked at another name of the file meanwhile.
        if self.merge_name(image.id, &image.path) {
            return;
        }
        if self.images.len() >= limits::IMAGES_MAX {
            return self.leave_out(LeftOut::TooMany, &image.path);
        }
        self.by_id.insert(image.id, self.images.len());
        self.images.push(image);
    }

    pub(super) fn leave_out(&mut self, what: LeftOut, path: &Path) {
        let (count, paths) = &mut self.left_out[what as usize];
        *count += 1;
        paths.insert(path.to_owned());
        if paths.len() > limits::LISTED_MAX {
            paths.pop_last();
        }
    }

    /// Makes the order of what was found independent of the order it was found in.
    pub(crate) fn put_in_order(&mut self) {
        self.images.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        self.by_id = self.images.iter().enumerate().map(|(at, image)| (image.id, at)).collect();
    }

    /// Where the image in this file stands in `images`; only once the crawl is done.
    pub(crate) fn position(&self, id: FileId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// What was left out for this reason.
    pub(crate) fn omitted(&self, what: LeftOut) -> Omitted {
        let (count, paths) = &self.left_out[what as usize];
        Omitted { count: *count, paths: paths.iter().map(|path| path_to_text(path)).collect() }
    }
}
