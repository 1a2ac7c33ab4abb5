//! What a server can know of its disks and doors before it opens them: whoever replaces a server had better know before that
//! one has ended.
//!
//! A socket that somebody listens on is no fault: that is the server to be replaced.

use std::fs::{metadata, symlink_metadata};
use std::io;
use std::net::ToSocketAddrs as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Access, access};
use vmstrata_export::nbd::{self, Address};
use vmstrata_export::vhost_user;

use crate::error::Error;
use crate::host;
use crate::options::Options;
use crate::spec::VhostUserSpec;

/// Looks at what a server with these options would open, without opening it for itself.
///
/// # Errors
/// An image that cannot be read or has a layer that cannot, no such snapshot, a certificate that cannot be used, a socket that
/// cannot be made, an address that nothing is known of.
pub fn rehearse(options: &Options) -> Result<(), Error> {
    options.tls_mode()?;
    options.disks.iter().try_for_each(|disk| host::look_at(disk, &options.allow_backing))?;
    options.nbd.iter().try_for_each(nbd_door)?;
    options.vhost_user.iter().try_for_each(vhost_user_door)
}

fn nbd_door(address: &Address) -> Result<(), Error> {
    let found = match address {
        Address::Unix(path) if symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a socket"))
        }
        Address::Unix(path) => directory_of(path),
        Address::Tcp { host, port } => (host.as_str(), *port).to_socket_addrs().map(drop),
    };
    found.map_err(|source| nbd::Error::Bind { address: address.to_string(), source }.into())
}

fn vhost_user_door(spec: &VhostUserSpec) -> Result<(), Error> {
    let path = spec.socket.clone();
    let found = if metadata(&path).is_ok_and(|found| !found.file_type().is_socket()) {
        Err(vhost_user::Error::NotASocket { path })
    } else {
        directory_of(&path).map_err(|source| vhost_user::Error::Listen { path, source })
    };
    found.map_err(|source| Error::VhostUser { disk: spec.disk.clone(), source })
}

/// Whether a file can be made in the directory of `path`.
fn directory_of(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(access(directory.unwrap_or(Path::new(".")), Access::WRITE_OK | Access::EXEC_OK)?)
}
