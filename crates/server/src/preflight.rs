//! What a server can know of its disks and exports before it opens them. A server that replaces another looks first, while that one
//! still serves.
//!
//! A socket at which another process listens is no fault: that is the server to be replaced. With `keep-going`, what cannot be
//! opened and the other server has not open either is no fault: it is retried.

use std::collections::HashSet;
use std::fs::{Metadata, metadata, symlink_metadata};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Access, access};
use vmstrata_api::{DiskStatus, ExportStatus, ServerStatus};
use vmstrata_export::fuse::{self, PlaceFault};
use vmstrata_export::nbd::{self, Address};
use vmstrata_export::{SocketAccess, vhost_user};
use vmstrata_store::FileId;
use vmstrata_types::{path_from_text, told};

use crate::audit::Audit;
use crate::error::Error;
use crate::host;
use crate::options::Options;
use crate::spec::{ExportSpec, NbdSpec};

/// Looks at what a server with these options would open, without opening it for itself, in the place of one that serves what
/// `status` says.
///
/// # Errors
/// An image or a layer that cannot be read or is in use by another process, no such snapshot, a certificate that cannot be used, a
/// socket that cannot be made, an unknown address.
pub fn preflight(options: &Options, status: &ServerStatus) -> Result<(), Error> {
    options.tls_mode()?;
    options.metrics.map_or(Ok(()), metrics_port)?;
    Audit::without_events(options.audit.as_deref())?;
    let waits = |is_open: bool, looked: Result<(), Error>| match looked {
        Err(error) if options.keep_going && !is_open => {
            tracing::warn!("will be tried again: {}", told(&error));
            Ok(())
        }
        looked => looked,
    };
    // The other server lets go of these when it ends.
    let held: HashSet<FileId> = status.disks.iter().flat_map(files_of).collect();
    for disk in &options.disks {
        let is_open = |other: &DiskStatus| other.name == disk.name && other.open_error.is_none();
        waits(
            status.disks.iter().any(is_open),
            host::look_at(disk, &options.allow_backing, |file| held.contains(&file)),
        )?;
    }
    for export in options.exports() {
        let is_open =
            |other: &ExportStatus| other.open_error.is_none() && other.export.place() == export.place();
        waits(status.exports.iter().any(is_open), look_at_export(&export, &options.nbd_access))?;
    }
    Ok(())
}

/// The file that a disk of the other server is written to, and the one that its name leads to.
fn files_of(disk: &DiskStatus) -> impl Iterator<Item = FileId> + use<> {
    let written = disk.file.map(|file| FileId { dev: file.device, ino: file.inode });
    let named = path_from_text(&disk.path).metadata().ok();
    let named = named.filter(|_| disk.open_error.is_none()).map(|found| FileId::of(&found));
    written.into_iter().chain(named)
}

/// The server to be replaced may have the port.
fn metrics_port(address: SocketAddr) -> Result<(), Error> {
    match TcpListener::bind(address) {
        Err(source) if source.kind() != io::ErrorKind::AddrInUse => Err(Error::Metrics { address, source }),
        _ => Ok(()),
    }
}

fn look_at_export(export: &ExportSpec, nbd_access: &SocketAccess) -> Result<(), Error> {
    match export {
        ExportSpec::Nbd(NbdSpec { address, .. }) => {
            let found = match address {
                Address::Unix(path) if is_no_socket(symlink_metadata(path)) => {
                    Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a socket"))
                }
                Address::Unix(path) => directory_of(path).and_then(|()| nbd_access.check()),
                Address::Tcp { host, port } => (host.as_str(), *port).to_socket_addrs().map(drop),
            };
            found.map_err(|source| nbd::Error::Bind { address: address.to_string(), source }.into())
        }
        // The other server's mount may be there: its root is a directory, too.
        ExportSpec::Fuse(spec) => {
            let place = spec.directory.clone();
            let why = match metadata(&place) {
                Ok(found) if found.is_dir() => return Ok(()),
                Ok(_) => PlaceFault::NoDirectory,
                Err(error) if error.kind() == io::ErrorKind::NotFound => PlaceFault::NoDirectory,
                Err(error) => PlaceFault::Io(error),
            };
            Err(fuse::Error::Place { place, why }.into())
        }
        ExportSpec::VhostUser(spec) => {
            let path = spec.socket.clone();
            let found = if is_no_socket(metadata(&path)) {
                Err(vhost_user::Error::NotASocket { path })
            } else {
                let usable = directory_of(&path).and_then(|()| spec.access.check());
                usable.map_err(|source| vhost_user::Error::Listen { path, source })
            };
            found.map_err(|source| Error::VhostUser { disk: spec.disk.clone(), source })
        }
    }
}

/// Whether something else has the name of a socket.
fn is_no_socket(found: io::Result<Metadata>) -> bool {
    found.is_ok_and(|found| !found.file_type().is_socket())
}

/// Whether a file can be made in the directory of `path`.
fn directory_of(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(access(directory.unwrap_or(Path::new(".")), Access::WRITE_OK | Access::EXEC_OK)?)
}
