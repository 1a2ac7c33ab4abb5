//! The doors of a server, opened together and closed together.

use std::sync::Arc;

use anyhow::{Context, Result};
use vmstrata_export::nbd::{self, Address, Export, Exports, Limits, Listener, TlsConfig, TlsMode};
use vmstrata_export::vhost_user;

use super::Served;
use crate::args::ServeArgs;
use crate::disk_spec::VhostUserSpec;

/// Everything that lets clients in.
#[derive(Debug)]
pub struct Doors {
    vhost_user: Vec<vhost_user::Server>,
    nbd: Option<nbd::Server>,
    /// Where NBD clients connect, with the ports that were taken.
    nbd_addresses: Vec<Address>,
}

impl Doors {
    /// Opens every door of `args`.
    ///
    /// # Errors
    /// When a socket cannot be had or a certificate cannot be used.
    pub fn open(args: &ServeArgs, disks: &[Served]) -> Result<Self> {
        let (nbd, nbd_addresses) = open_nbd(args, disks)?;
        let vhost_user =
            args.vhost_user.iter().map(|spec| open_vhost_user(spec, disks)).collect::<Result<_>>()?;
        Ok(Self { vhost_user, nbd, nbd_addresses })
    }

    pub fn nbd_addresses(&self) -> &[Address] {
        &self.nbd_addresses
    }

    /// Lets nobody in any more and finishes what is in flight.
    ///
    /// # Errors
    /// When what NBD clients wrote cannot be flushed.
    pub fn close(self) -> Result<()> {
        self.vhost_user.into_iter().for_each(vhost_user::Server::shutdown);
        match self.nbd {
            Some(server) => server.shutdown().context("cannot flush what NBD clients wrote"),
            None => Ok(()),
        }
    }
}

fn open_vhost_user(spec: &VhostUserSpec, disks: &[Served]) -> Result<vhost_user::Server> {
    let served = disks.iter().find(|served| served.name == spec.disk).expect("names were checked together");
    let server = vhost_user::Server::bind(&spec.socket, Arc::clone(&served.disk), vhost_user_options(spec));
    server.with_context(|| format!("--vhost-user {}", spec.disk))
}

fn vhost_user_options(spec: &VhostUserSpec) -> vhost_user::Options {
    let mut options = vhost_user::Options::default();
    if let Some(queues) = spec.queues {
        options.queues = queues.get();
        options.io_threads = options.io_threads.min(queues.get().into());
    }
    if let Some(threads) = spec.threads {
        options.io_threads = threads.get().into();
    }
    if let Some(poll_us) = spec.poll_us {
        options.poll_us = poll_us;
    }
    if let Some(serial) = &spec.serial {
        options.serial.clone_from(serial);
    }
    options
}

fn open_nbd(args: &ServeArgs, disks: &[Served]) -> Result<(Option<nbd::Server>, Vec<Address>)> {
    if args.nbd.is_empty() {
        return Ok((None, Vec::new()));
    }
    let exports = Exports::new();
    for Served { name, disk } in disks {
        exports.add(Export::new(name.as_str(), Arc::clone(disk)))?;
    }
    let server = nbd::Server::new(exports, tls_mode(args)?, Limits::default())?;
    let mut addresses = Vec::new();
    for address in &args.nbd {
        let listener = Listener::bind(address)?;
        addresses.push(listener.address().clone());
        server.listen(listener)?;
    }
    Ok((Some(server), addresses))
}

/// A certificate means that TLS is wanted, so nothing is served without it.
fn tls_mode(args: &ServeArgs) -> Result<TlsMode> {
    match (&args.nbd_tls_cert, &args.nbd_tls_key) {
        (Some(certificate), Some(key)) => {
            Ok(TlsMode::Require(TlsConfig::load(certificate, key, args.nbd_tls_client_ca.as_deref())?))
        }
        _ => Ok(TlsMode::Off),
    }
}
