//! An address for NBD clients, and what they may do there.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_api as api;
use vmstrata_disk::Disk;
use vmstrata_export::nbd::{self, Address, ClientRight, Export};

use super::SpecError;

/// An NBD export to open. Clients read; they write only where that is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdSpec {
    /// Where to listen.
    pub address: Address,
    /// Whether clients may write.
    pub rw: bool,
    /// Whether they may beside writers that come in by other exports that say so, too.
    pub share: bool,
    /// Whether everybody who reaches the address may come in.
    pub insecure: bool,
    /// Who may do what; empty for the same right for all.
    pub allow: Vec<api::ClientRights>,
}

/// Why a text is no NBD export.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// It has no address.
    #[error(transparent)]
    Address(#[from] nbd::Error),
    /// What it says makes no sense.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

impl TryFrom<api::NbdSpec> for NbdSpec {
    type Error = NbdError;

    fn try_from(asked: api::NbdSpec) -> Result<Self, NbdError> {
        let api::NbdSpec { address, rw, share, insecure, allow } = asked;
        let address = address.parse()?;
        if rw && !allow.is_empty() {
            return Err(SpecError::WritersTwice.into());
        }
        for right in &allow {
            let name = ["CN=", "DNS=", "URI="].iter().find_map(|kind| right.client.strip_prefix(kind));
            if name.is_none_or(str::is_empty) {
                return Err(SpecError::ClientName { client: right.client.clone() }.into());
            }
        }
        Ok(Self { address, rw, share, insecure, allow })
    }
}

impl From<&NbdSpec> for api::NbdSpec {
    fn from(spec: &NbdSpec) -> Self {
        let NbdSpec { address, rw, share, insecure, allow } = spec.clone();
        Self { address: address.to_string(), rw, share, insecure, allow }
    }
}

impl NbdSpec {
    /// Refuses an address that other hosts can reach, and rights of clients, where clients are not known by their certificates.
    pub(crate) fn check_clients(&self, are_known: bool) -> Result<(), SpecError> {
        let address = || self.address.to_string();
        if are_known {
            Ok(())
        } else if !self.allow.is_empty() {
            Err(SpecError::ClientsUnknown { address: address() })
        } else if self.address.is_reached_from_elsewhere() && !self.insecure {
            Err(SpecError::Exposed { address: address() })
        } else {
            Ok(())
        }
    }

    /// A disk as the clients of this export get it.
    pub(crate) fn export(&self, name: &str, disk: &Arc<Disk>) -> Export {
        let mut export = Export::new(name, Arc::clone(disk));
        if self.share {
            export = export.with_share();
        }
        if self.allow.is_empty() {
            return if self.rw { export } else { export.with_read_only() };
        }
        let own = self
            .allow
            .iter()
            .filter(|right| right.disks.is_empty() || right.disks.iter().any(|disk| disk == name));
        let right =
            |right: &api::ClientRights| ClientRight { client: right.client.clone(), writes: right.rw };
        export.with_clients(own.map(right).collect())
    }

    /// The same, the path of a unix socket seen from `directory`.
    #[must_use]
    pub(crate) fn seen_from(self, directory: &Path) -> Self {
        self.with_socket(|path| directory.join(path))
    }

    /// The same with an absolute path.
    ///
    /// # Errors
    /// This process's own directory is gone, and the path is relative.
    pub(crate) fn absolute(self) -> io::Result<Self> {
        let mut failed = None;
        let spec = self.with_socket(|path| {
            std::path::absolute(&path).unwrap_or_else(|error| {
                failed = Some(error);
                path
            })
        });
        failed.map_or(Ok(spec), Err)
    }

    fn with_socket(self, change: impl FnOnce(PathBuf) -> PathBuf) -> Self {
        let address = match self.address {
            Address::Unix(path) => Address::Unix(change(path)),
            tcp @ Address::Tcp { .. } => tcp,
        };
        Self { address, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(address: &str) -> api::NbdSpec {
        api::NbdSpec { address: address.to_owned(), ..api::NbdSpec::default() }
    }

    fn rights(client: &str) -> Vec<api::ClientRights> {
        vec![api::ClientRights { client: client.to_owned(), ..api::ClientRights::default() }]
    }

    #[test]
    fn an_address_that_other_hosts_reach_needs_known_clients_or_to_be_called_insecure() {
        let check =
            |asked: api::NbdSpec, are_known| NbdSpec::try_from(asked).unwrap().check_clients(are_known);
        for address in ["tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:host"] {
            let refused = check(spec(address), false).unwrap_err().to_string();
            assert!(refused.contains("--nbd-tls-client-ca") && refused.contains("insecure"), "{refused}");
            check(spec(address), true).unwrap();
            check(api::NbdSpec { insecure: true, ..spec(address) }, false).unwrap();
        }
        for address in ["unix:/s", "tcp:localhost", "tcp:[::1]:7"] {
            check(spec(address), false).unwrap();
        }
        let named = api::NbdSpec { allow: rights("CN=backup"), ..spec("unix:/s") };
        assert!(matches!(check(named.clone(), false), Err(SpecError::ClientsUnknown { .. })));
        check(named, true).unwrap();
    }

    #[test]
    fn rights_name_clients_by_their_certificates() {
        for client in ["backup", "CN=", "IP=::1", ""] {
            let asked = api::NbdSpec { allow: rights(client), ..spec("unix:/s") };
            assert!(
                matches!(NbdSpec::try_from(asked), Err(NbdError::Spec(SpecError::ClientName { .. }))),
                "{client}"
            );
        }
        let asked = api::NbdSpec { rw: true, allow: rights("CN=backup"), ..spec("unix:/s") };
        assert!(matches!(NbdSpec::try_from(asked), Err(NbdError::Spec(SpecError::WritersTwice))));
        let asked = api::NbdSpec {
            share: true,
            insecure: true,
            allow: rights("URI=spiffe://a/b"),
            ..spec("unix:/s")
        };
        assert_eq!(api::NbdSpec::from(&NbdSpec::try_from(asked.clone()).unwrap()), asked);
    }
}
