//! An opener that knows exports of NBD servers beside what it stands on.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{IoContext as _, LocalFiles, Opened, Opener, Result, Role};
use vmstrata_store::{Access, FileId, FileIdentity, Gate, Ring, Store as _};

use crate::client::Client;
use crate::uri::Uri;

/// The device number of what lies on no device of this host: as large as those of a kernel can be.
const ELSEWHERE: u64 = u32::MAX as u64;

/// See the module documentation.
#[derive(Debug)]
pub struct Files {
    others: Arc<dyn Opener>,
    /// The export that may be opened for reading.
    read: Option<PathBuf>,
}

impl Files {
    /// What is no address is opened by `others`.
    pub fn new(others: Arc<dyn Opener>) -> Self {
        Self { others, read: None }
    }

    /// The same; the export at `path` is opened for reading, too: a disk that nothing may write meanwhile, which its server cannot be
    /// asked for.
    pub fn reading(others: Arc<dyn Opener>, path: &Path) -> Self {
        Self { others, read: Some(path.to_owned()) }
    }
}

impl Default for Files {
    fn default() -> Self {
        Self::new(Arc::new(LocalFiles))
    }
}

fn connect(uri: &Uri, role: Role, may_read: bool) -> io::Result<Opened> {
    let access = match role {
        Role::Active(_) | Role::Inspected => Access::ReadWrite,
        Role::Frozen if may_read => Access::ReadOnly,
        // A layer below another, whatever names it there, is never reached over a network.
        _ => {
            let why = "only a whole disk lies there, and no layer of one";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
    };
    let client = Client::connect_for(uri, access)?;
    let identity = FileIdentity { len: client.len()?, ..identity_of(uri) };
    Ok(Opened { store: Arc::new(client), identity })
}

/// Without its length: a server may let one client in at a time, and it is not asked.
fn identity_of(uri: &Uri) -> FileIdentity {
    let mut name = DefaultHasher::new();
    uri.to_string().hash(&mut name);
    // 0 is that of devices.
    let file = FileId { dev: ELSEWHERE, ino: name.finish() >> 1 | 1 };
    FileIdentity { file, len: 0, mtime_ns: 0, ctime_ns: 0 }
}

impl Opener for Files {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> Result<Opened> {
        let Some(uri) = Uri::of(path) else { return self.others.open(path, role, gate) };
        let may_read = self.read.as_deref() == Some(path);
        let opened = uri.map_err(io::Error::other).and_then(|uri| connect(&uri, role, may_read));
        opened.while_trying("take the export").map_err(|error| error.in_file(path))
    }

    fn identity(&self, path: &Path, gate: &Gate) -> Result<FileIdentity> {
        match Uri::of(path) {
            Some(uri) => {
                let identity = uri.map(|uri| identity_of(&uri)).map_err(io::Error::other);
                identity.while_trying("take the export").map_err(|error| error.in_file(path))
            }
            None => self.others.identity(path, gate),
        }
    }

    fn sidecar(&self, layer: &Path, gate: &Gate) -> Option<PathBuf> {
        if Uri::is_meant(layer) { None } else { self.others.sidecar(layer, gate) }
    }

    fn flush_name(&self, path: &Path) -> Result<()> {
        if Uri::is_meant(path) { Ok(()) } else { self.others.flush_name(path) }
    }

    fn may_be_absent(&self) -> bool {
        self.others.may_be_absent()
    }

    fn ring(&self, depth: u32) -> io::Result<Ring> {
        self.others.ring(depth)
    }
}
