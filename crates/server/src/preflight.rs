//! What a server can know of its disks and exports before it opens them: whoever replaces a server had better know before that
//! one has ended.
//!
//! A socket that somebody listens on is no fault: that is the server to be replaced. Nor is, for a server that keeps going, what the
//! other one has not open either: nobody loses it.

use std::collections::HashSet;
use std::fs::{metadata, symlink_metadata};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Access, access};
use vmstrata_api::{DiskStatus, ExportSpec, ExportStatus, ServerStatus};
use vmstrata_export::nbd::{self, Address};
use vmstrata_export::{SocketAccess, vhost_user};
use vmstrata_store::FileId;

use crate::audit::Audit;
use crate::error::{Error, told};
use crate::host;
use crate::options::Options;
use crate::spec::{NbdSpec, VhostUserSpec};

/// Looks at what a server with these options would open, without opening it for itself, in the place of one that serves what
/// `status` says.
///
/// # Errors
/// An image that cannot be read, has a layer that cannot, or is in use by somebody else, no such snapshot, a certificate that cannot be used, a socket that
/// cannot be made, an address that nothing is known of.
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
    // Which it lets go of when it ends.
    let held: HashSet<FileId> = status.disks.iter().flat_map(files_of).collect();
    for disk in &options.disks {
        let is_open = |other: &DiskStatus| other.name == disk.name && other.open_error.is_none();
        waits(
            status.disks.iter().any(is_open),
            host::look_at(disk, &options.allow_backing, |file| held.contains(&file)),
        )?;
    }
    let is_open = |place: &str| {
        status.exports.iter().any(|export| export.open_error.is_none() && place_of(export) == place)
    };
    for NbdSpec { address, .. } in &options.nbd {
        waits(is_open(&address.to_string()), nbd_export(address, &options.nbd_access))?;
    }
    for spec in &options.vhost_user {
        waits(is_open(&spec.socket.to_string_lossy()), vhost_user_export(spec))?;
    }
    Ok(())
}

/// The file that a disk of the other server is written to, and the one that its name leads to.
fn files_of(disk: &DiskStatus) -> impl Iterator<Item = FileId> + use<> {
    let written = disk.file.map(|file| FileId { dev: file.device, ino: file.inode });
    let named = Path::new(&disk.path).metadata().ok();
    let named = named.filter(|_| disk.open_error.is_none()).map(|found| FileId::of(&found));
    written.into_iter().chain(named)
}

fn place_of(export: &ExportStatus) -> &str {
    match &export.export {
        ExportSpec::VhostUser(spec) => &spec.socket,
        ExportSpec::Nbd(spec) => &spec.address,
    }
}

/// The server to be replaced may have the port.
fn metrics_port(address: SocketAddr) -> Result<(), Error> {
    match TcpListener::bind(address) {
        Err(source) if source.kind() != io::ErrorKind::AddrInUse => Err(Error::Metrics { address, source }),
        _ => Ok(()),
    }
}

fn nbd_export(address: &Address, access: &SocketAccess) -> Result<(), Error> {
    let found = match address {
        Address::Unix(path) if symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a socket"))
        }
        Address::Unix(path) => directory_of(path).and_then(|()| access.check()),
        Address::Tcp { host, port } => (host.as_str(), *port).to_socket_addrs().map(drop),
    };
    found.map_err(|source| nbd::Error::Bind { address: address.to_string(), source }.into())
}

fn vhost_user_export(spec: &VhostUserSpec) -> Result<(), Error> {
    let path = spec.socket.clone();
    let found = if metadata(&path).is_ok_and(|found| !found.file_type().is_socket()) {
        Err(vhost_user::Error::NotASocket { path })
    } else {
        directory_of(&path)
            .and_then(|()| spec.access.check())
            .map_err(|source| vhost_user::Error::Listen { path, source })
    };
    found.map_err(|source| Error::VhostUser { disk: spec.disk.clone(), source })
}

/// Whether a file can be made in the directory of `path`.
fn directory_of(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(access(directory.unwrap_or(Path::new(".")), Access::WRITE_OK | Access::EXEC_OK)?)
}
