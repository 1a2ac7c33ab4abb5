//! Reading a chain: from the active layer's header down to the base, checking every step.
//!
//! Data flow: path → [`walk`] → [`crate::loading`], which asks indexes, too → [`crate::map::FrozenMap`] and
//! [`crate::active::Active`]. Only headers are read here. Memory and time are bounded by [`MAX_LAYERS`], by the size of a header cluster, and by
//! a check of every file's identity against those already met.

mod file;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_store::{CacheMode, Gate};
use vmstrata_types::MAX_LAYERS;

use crate::error::{Error, ErrorKind, Result};
use crate::layer::Format;
use crate::opener::{LocalFiles, Opener, Role, directory_of};

pub(crate) use crate::head::{
    Qcow2Head, backing_of, backing_text, described_backing, has_magic, image_format, plain_name, probe,
    read_head, resolve_name,
};
pub(crate) use file::{Top, check_state_at, is_being_dropped, open_described, open_layer, open_top};

/// How to open a disk.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Refuse writes; every layer is then frozen.
    pub read_only: bool,
    /// How the active layer's data passes the host's page cache. Frozen layers always use the page cache, which
    /// all disks on one base share.
    pub cache: CacheMode,
    /// Directories, or files, that backing files may lie in, or be; beside what lies in the disk's own directory.
    pub allow_backing: Vec<PathBuf>,
    /// Whether `allow_backing` says all: what lies in the disk's own directory is none of its backing files then.
    pub allow_backing_alone: bool,
    /// What the disk's file is; `None` looks at its first bytes. Name `Raw` for raw disks whose guest is not trusted: it
    /// could write a qcow2 header. A file that is said to be raw and begins with one that vmstrata made is refused.
    pub format: Option<Format>,
    /// Whether `format` comes from the layer above or from an open disk: a raw file is then raw whatever is in it.
    pub format_is_exact: bool,
    /// Write the disk although images stand on it, which then read other data.
    pub force: bool,
    /// What becomes of writes of zeros that come through a queue.
    pub detect_zeroes: DetectZeroes,
    /// What happens to the unflushed writes of a killed process that cannot be taken up.
    pub unflushed: Unflushed,
    /// Whether new overlays of the disk have subclusters. An overlay on a version 2 image never has them.
    pub subclusters: bool,
    /// What opens files of its chain that are only looked at. Where that is not [`LocalFiles`], the disk's resources have the same.
    pub opener: Arc<dyn Opener>,
}

/// What becomes of a request that writes nothing but zeros to at least one whole cluster, by the names of QEMU's option.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DetectZeroes {
    /// It is written as any other.
    #[default]
    Off,
    /// The clusters are marked as zeros, and keep their space.
    On,
    /// The clusters are marked as zeros, and their space is given back.
    Unmap,
}

/// What to do with completed writes of a killed process that cannot be taken up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unflushed {
    /// Refuse the disk: nothing is lost.
    #[default]
    Keep,
    /// Go on without them, as after a power failure.
    Discard,
}

impl OpenOptions {
    /// What lets the backing files of the disk at `path` through.
    ///
    /// # Errors
    /// A directory that cannot be opened.
    pub(crate) fn gate(&self, path: &Path) -> Result<Gate> {
        Ok(Gate::new(self.allowed(path))?)
    }

    /// Where the backing files of the disk at `path` may lie.
    pub(crate) fn allowed(&self, path: &Path) -> Vec<PathBuf> {
        let own = (!self.allow_backing_alone).then(|| directory_of(path));
        self.allow_backing.iter().cloned().chain(own).collect()
    }

    /// Makes sure that a file in the disk's own directory, as a snapshot makes one, may be its backing file.
    ///
    /// # Errors
    /// [`vmstrata_store::GateError::Outside`].
    pub(crate) fn check_beside(&self, path: &Path) -> Result<()> {
        if self.allow_backing_alone { Ok(self.gate(path)?.look(path).map(drop)?) } else { Ok(()) }
    }
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            cache: CacheMode::Host,
            allow_backing: Vec::new(),
            allow_backing_alone: false,
            format: None,
            format_is_exact: false,
            force: false,
            detect_zeroes: DetectZeroes::Off,
            unflushed: Unflushed::Keep,
            subclusters: true,
            opener: Arc::new(LocalFiles),
        }
    }
}

/// Looks at the files of the chain of the disk at `path`, without locks; returns the top and what `keep` makes of each layer below
/// it, base first.
///
/// # Errors
/// Any file of the chain that cannot be opened, is not allowed, breaks the format, or was met before; those of `keep`.
pub(crate) fn walk<T>(
    path: &Path,
    options: &OpenOptions,
    opener: &dyn Opener,
    mut keep: impl FnMut(Top) -> Result<T>,
) -> Result<(Top, Vec<T>)> {
    despite_merges(|| {
        let top = open_top(path, Role::Inspected, options, opener)?;
        let keep = |layer| Some(keep(layer)).transpose();
        let below = walk_below(path, &top, options, Role::Inspected, opener, keep)?;
        Ok((top, below))
    })
}

/// Looks at a chain again where a merge has taken a file out of it meanwhile.
///
/// # Errors
/// Those of `look`.
pub(crate) fn despite_merges<T>(mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let mut missed = String::new();
    loop {
        match look() {
            Err(error) if Error::is_missing_file(&error) && error.to_string() != missed => {
                missed = error.to_string()
            }
            seen => return seen,
        }
    }
}

/// Follows the chain down from an open `top` until `keep` has seen enough; returns what it made of each layer below the
/// top, lowest first.
pub(crate) fn walk_below<T>(
    path: &Path,
    top: &Top,
    options: &OpenOptions,
    role: Role,
    opener: &dyn Opener,
    mut keep: impl FnMut(Top) -> Result<Option<T>>,
) -> Result<Vec<T>> {
    let mut met = HashMap::from([(top.opened.identity.file, 0)]);
    let mut below = Vec::new();
    // A disk without backing files needs no gate, whatever its directory is.
    let mut gate = None;
    let mut next = described_backing(&top.path, top.head.as_ref())?;
    while let Some(named) = next {
        let name = &named.path;
        if below.len() + 1 >= MAX_LAYERS {
            return Err(Error::from(ErrorKind::TooLong).in_file(path));
        }
        if gate.is_none() {
            gate = Some(options.gate(path)?);
        }
        let gate = gate.as_ref().expect("made above");
        let above = below.len();
        let loops = |earlier| {
            let kind = if earlier == above { ErrorKind::OwnBacking } else { ErrorKind::Loop { earlier } };
            Error::from(kind).in_file(name)
        };
        let layer = open_described(&named, role, gate, opener).map_err(|error| {
            // A lock on a file that was met is this chain's own.
            let met = || met.get(&opener.identity(name, gate).ok()?.file).copied();
            error.is_lock().then(met).flatten().map_or(error, loops)
        })?;
        if let Some(earlier) = met.insert(layer.opened.identity.file, below.len() + 1) {
            return Err(loops(earlier));
        }
        next = named.below.check(&layer.path, described_backing(&layer.path, layer.head.as_ref())?)?;
        let Some(kept) = keep(layer)? else { break };
        below.push(kept);
    }
    below.reverse();
    Ok(below)
}
