//! An opener that knows exports of NBD servers beside what it stands on.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{IoContext as _, LocalFiles, Opened, Opener, Result, Role};
use vmstrata_store::{FileId, FileIdentity, Gate, Ring, Store as _};

use crate::client::Client;
use crate::uri::Uri;

/// The device number of what lies on no device of this host: as large as those of a kernel can be.
const ELSEWHERE: u64 = u32::MAX as u64;

/// See the module documentation.
#[derive(Debug)]
pub struct Files {
    others: Arc<dyn Opener>,
}

impl Files {
    /// What is no address is opened by `others`.
    pub fn new(others: Arc<dyn Opener>) -> Self {
        Self { others }
    }
}

impl Default for Files {
    fn default() -> Self {
        Self::new(Arc::new(LocalFiles))
    }
}

fn connect(uri: &Uri, role: Role) -> io::Result<Opened> {
    // A layer below another, whatever names it there, is never reached over a network.
    if !matches!(role, Role::Active(_) | Role::Inspected) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "only a whole disk lies there, and no layer of one",
        ));
    }
    let client = Client::connect(uri)?;
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
        let opened = uri.map_err(io::Error::other).and_then(|uri| connect(&uri, role));
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
