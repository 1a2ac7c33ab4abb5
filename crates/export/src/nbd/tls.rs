//! TLS under a connection, by rustls; certificates and keys as PEM files.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::Error;
use super::error::{CredentialFault, End};
use super::transport::Received;

/// Ciphertext kept for a client that does not read, in bytes.
const MAX_BUFFERED: usize = 256 << 10;

/// A server's certificate and key, and whose clients it takes.
#[derive(Clone, Debug)]
pub struct TlsConfig(pub(crate) Arc<ServerConfig>);

/// Whether clients may, must or cannot use TLS.
#[derive(Clone, Debug, Default)]
pub enum TlsMode {
    /// No TLS: clients that ask for it are told so.
    #[default]
    Off,
    /// Clients choose.
    Allow(TlsConfig),
    /// Nothing but the request for TLS is answered before TLS.
    Require(TlsConfig),
}

impl TlsMode {
    pub(crate) fn config(&self) -> Option<&TlsConfig> {
        match self {
            Self::Off => None,
            Self::Allow(config) | Self::Require(config) => Some(config),
        }
    }
}

impl TlsConfig {
    /// Reads an X.509 certificate chain (the server's own first), its key, and, where clients must show a
    /// certificate, the authorities that may have issued it. All files are PEM.
    ///
    /// # Errors
    /// [`Error::Credential`] naming the file that cannot be read or used.
    pub fn load(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Self, Error> {
        let in_file = |path: &Path| {
            let path = path.to_owned();
            move |source: CredentialFault| Error::Credential { path, source }
        };
        let chain = certificates(certificate).map_err(in_file(certificate))?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| in_file(key)(error.into()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| in_file(certificate)(error.into()))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(authorities(path).map_err(in_file(path))?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
                    .build()
                    .map_err(|error| in_file(path)(error.into()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config =
            builder.with_single_cert(chain, private).map_err(|error| in_file(certificate)(error.into()))?;
        Ok(Self(Arc::new(config)))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialFault> {
    let chain = CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>()?;
    if chain.is_empty() { Err(CredentialFault::Empty) } else { Ok(chain) }
}

fn authorities(path: &Path) -> Result<RootCertStore, CredentialFault> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate)?;
    }
    Ok(roots)
}

/// The common names, DNS names and URIs that a certificate is for, as `CN=`, `DNS=` and `URI=`.
fn certificate_names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else { return Vec::new() };
    let common = common_names(parsed.subject()).into_iter().map(|name| format!("CN={name}"));
    let dns = parsed.valid_dns_names().map(|name| format!("DNS={name}"));
    common.chain(dns).chain(parsed.valid_uri_names().map(|name| format!("URI={name}"))).collect()
}

/// The common names in a subject (X.501 `RDNSequence`): a sequence of sets of sequences of a type and a value.
fn common_names(subject: &[u8]) -> Vec<&str> {
    const SEQUENCE: u8 = 0x30;
    const SET: u8 = 0x31;
    const OID: u8 = 0x06;
    const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];
    /// UTF8String, PrintableString and IA5String.
    const STRINGS: [u8; 3] = [0x0c, 0x13, 0x16];
    // webpki leaves the outermost header out.
    let sets = Values(subject).filter(|(tag, _)| *tag == SET);
    let pairs = sets.flat_map(|(_, set)| Values(set)).filter(|(tag, _)| *tag == SEQUENCE);
    let names = pairs.filter_map(|(_, pair)| {
        let mut pair = Values(pair);
        let (tag, name) =
            pair.next().filter(|kind| *kind == (OID, &COMMON_NAME[..])).and_then(|_| pair.next())?;
        STRINGS.contains(&tag).then(|| std::str::from_utf8(name).ok())?
    });
    names.collect()
}

/// The tags and contents of DER values that stand one behind the other; ends where they are none.
struct Values<'a>(&'a [u8]);

impl<'a> Iterator for Values<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (&[tag, short], rest) = self.0.split_first_chunk()?;
        let (len, rest) = match short {
            0..=0x7f => (usize::from(short), rest),
            0x81..=0x84 => {
                let (long, rest) = rest.split_at_checked(usize::from(short & 0x7f))?;
                (long.iter().fold(0, |len, byte| len << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(len)?;
        self.0 = rest;
        Some((tag, content))
    }
}

/// What one read of ciphertext brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    Some,
    Nothing,
    End,
}

/// The TLS state of one connection, over a non-blocking socket that its owner holds.
#[derive(Debug)]
pub(crate) struct TlsSession(ServerConnection);

impl TlsSession {
    pub(crate) fn new(config: &TlsConfig) -> Result<Self, End> {
        let mut connection = ServerConnection::new(config.0.clone())?;
        connection.set_buffer_limit(Some(MAX_BUFFERED));
        Ok(Self(connection))
    }

    /// Whether the handshake is still going on, and then whether it waits to write rather than to read.
    pub(crate) fn handshake_wants_write(&self) -> Option<bool> {
        let pending = self.0.is_handshaking() || self.0.wants_write();
        pending.then(|| self.0.wants_write())
    }

    /// The names in the client's certificate, which rustls has verified.
    pub(crate) fn client_names(&self) -> Vec<String> {
        self.0.peer_certificates().and_then(<[_]>::first).map(certificate_names).unwrap_or_default()
    }

    /// Takes up what the client sent.
    pub(crate) fn fill(&mut self, socket: BorrowedFd<'_>) -> Result<Fill, End> {
        match self.0.read_tls(&mut Raw(socket)) {
            Ok(0) => return Ok(Fill::End),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Fill::Nothing),
            Err(error) => return Err(error.into()),
        }
        if let Err(error) = self.0.process_new_packets() {
            // The alert tells the client why; it goes out if the socket takes it at once.
            let _ = self.flush(socket);
            return Err(error.into());
        }
        Ok(Fill::Some)
    }

    /// Sends waiting ciphertext; `true` when none is left.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<bool, End> {
        while self.0.wants_write() {
            match self.0.write_tls(&mut Raw(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<Received, End> {
        loop {
            match self.0.reader().read_vectored(into) {
                Ok(0) => return Ok(Received::End),
                // More may be decrypted already, which the socket would not show.
                Ok(len) => return Ok(Received::Bytes { len, drained: false }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Received::End),
                Err(error) => return Err(error.into()),
            }
            match self.fill(socket)? {
                Fill::Some => {}
                Fill::Nothing => return Ok(Received::Nothing),
                Fill::End => return Ok(Received::End),
            }
        }
    }

    /// Encrypts and sends; returns the bytes of `from` taken, 0 while the client does not read.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, from: &[IoSlice<'_>]) -> Result<usize, End> {
        if !self.flush(socket)? {
            return Ok(0);
        }
        let taken = self.0.writer().write_vectored(from)?;
        self.flush(socket)?;
        Ok(taken)
    }

    /// Whether ciphertext waits to be sent.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.wants_write()
    }

    /// Tells the client that nothing more will come.
    pub(crate) fn close(&mut self, socket: BorrowedFd<'_>) {
        self.0.send_close_notify();
        let _ = self.flush(socket);
    }
}

/// The socket as rustls wants it.
struct Raw<'fd>(BorrowedFd<'fd>);

impl Read for Raw<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        rustix::io::retry_on_intr(|| rustix::io::read(self.0, &mut *into)).map_err(Errno::into)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let send = || {
            let mut control = SendAncillaryBuffer::default();
            rustix::net::sendmsg(self.0.as_fd(), from, &mut control, SendFlags::NOSIGNAL)
        };
        rustix::io::retry_on_intr(send).map_err(Errno::into)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
