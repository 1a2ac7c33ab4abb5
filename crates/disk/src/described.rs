//! A disk that is named by a `json:` description, as QEMU's tools take it in the place of a file.
//!
//! Place in the data flow: beside the engine, which opens paths. What is a part of a raw file is opened through an opener that knows so.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_store::{FileIdentity, Gate, Ring};

use crate::error::{ErrorKind, Result};
use crate::head::raw_size;
use crate::json_name::{Below, parse};
use crate::layer::Format;
use crate::opener::{Opened, Opener, Role};
use crate::window::{Window, part_of};

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct DescribedDisk {
    /// Its file.
    pub path: PathBuf,
    /// What that holds, where the description says so.
    pub format: Option<Format>,
    window: Option<Window>,
}

impl DescribedDisk {
    /// The disk that `text` describes; `None` where that is no description.
    ///
    /// # Errors
    /// A description that is none, or says more than is supported.
    pub fn of(text: &Path) -> Option<Result<Self>> {
        let description = text.as_os_str().as_bytes().strip_prefix(b"json:")?;
        Some(parse(description).and_then(|named| {
            let is_plain = match named.below {
                Below::AsStored => true,
                Below::Nothing => named.format == Some(Format::Raw),
                Below::Named(_) => false,
            };
            if !is_plain {
                let name = text.display().to_string();
                let feature = "another backing file in a json: description than the image names".to_owned();
                return Err(ErrorKind::BackingName { name, feature }.into());
            }
            Ok(Self { path: named.path, format: named.format, window: named.window })
        }))
    }

    /// What opens it, and its backing files as `others` do.
    pub fn opener(&self, others: Arc<dyn Opener>) -> Arc<dyn Opener> {
        match self.window {
            Some(window) => Arc::new(PartFiles { path: self.path.clone(), window, others }),
            None => others,
        }
    }
}

/// Opens one file as a part of it.
#[derive(Debug)]
struct PartFiles {
    path: PathBuf,
    window: Window,
    others: Arc<dyn Opener>,
}

impl PartFiles {
    fn part_of(&self, identity: FileIdentity) -> Result<FileIdentity> {
        let len = self.window.len_in(identity.len).map_err(|error| error.in_file(&self.path))?;
        Ok(FileIdentity { len: raw_size(len), ..identity })
    }
}

impl Opener for PartFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened> {
        let opened = self.others.open(path, role, gate)?;
        if path != self.path {
            return Ok(opened);
        }
        let identity = self.part_of(opened.identity)?;
        Ok(Opened { identity, ..part_of(opened, Some(self.window))? })
    }

    fn identity(&self, path: &Path, gate: &Gate) -> Result<FileIdentity> {
        let identity = self.others.identity(path, gate)?;
        if path == self.path { self.part_of(identity) } else { Ok(identity) }
    }

    fn sidecar(&self, layer: &Path, gate: &Gate) -> Option<PathBuf> {
        if layer == self.path { None } else { self.others.sidecar(layer, gate) }
    }

    fn flush_name(&self, path: &Path) -> Result<()> {
        self.others.flush_name(path)
    }

    fn may_be_absent(&self) -> bool {
        self.others.may_be_absent()
    }

    fn ring(&self, depth: u32) -> io::Result<Ring> {
        self.others.ring(depth)
    }
}
