//! Where an export is: `nbd://HOST[:PORT]/NAME` or `nbd+unix:///NAME?socket=PATH`.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;
use vmstrata_types::percent_decode;

/// The port of NBD, which an address need not say.
const PORT: u16 = 10_809;

/// How its server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// By a host's name or address, and a port.
    Tcp(String, u16),
    /// By a socket of this host.
    Unix(PathBuf),
}

/// The address of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// How its server is reached.
    pub place: Place,
    /// Its name; empty for the server's default one.
    pub export: String,
    text: String,
}

/// Why a text is no address that this program can use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text}: {why}: an address is nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH")]
pub struct UriError {
    text: String,
    why: &'static str,
}

impl Uri {
    /// The address that `path` is, if it is one and no path of a file.
    ///
    /// # Errors
    /// One that is wrong, or asks for what this program cannot do.
    pub fn of(path: &Path) -> Option<Result<Self, UriError>> {
        let text = path.to_str()?;
        let is_one = ["nbd:", "nbd+unix:", "nbds:", "nbds+unix:", "nbd+vsock:", "nbds+vsock:"]
            .iter()
            .any(|scheme| text.starts_with(scheme));
        is_one.then(|| Self::parse(text))
    }

    /// Whether `path` is meant as an address.
    pub fn is_meant(path: &Path) -> bool {
        Self::of(path).is_some()
    }

    fn parse(text: &str) -> Result<Self, UriError> {
        let wrong = |why| UriError { text: text.to_owned(), why };
        let decoded = |text: &str| percent_decode(text).filter(|bytes| !bytes.contains(&0));
        let (scheme, rest) = text.split_once(":").expect("it is meant as an address");
        let rest = rest.strip_prefix("//").ok_or_else(|| wrong("names no host"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
        let place = match scheme {
            "nbd" => Place::tcp(host).ok_or_else(|| wrong("names no host, or no port after it"))?,
            "nbd+unix" => {
                let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket=")).and_then(decoded);
                Place::Unix(OsString::from_vec(socket.ok_or_else(|| wrong("names no socket"))?).into())
            }
            _ => return Err(wrong("asks for TLS or vsock, which cannot be had here")),
        };
        let export = decoded(name).and_then(|name| String::from_utf8(name).ok());
        let export = export.ok_or_else(|| wrong("has a name that no export can have"))?;
        Ok(Self { place, export, text: text.to_owned() })
    }
}

impl Place {
    /// Of `HOST`, `HOST:PORT` or, of IPv6, `[ADDRESS]:PORT`.
    fn tcp(text: &str) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(address) => address.split_once(']')?,
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        let port = match port {
            "" => PORT,
            port => port.strip_prefix(':')?.parse().ok()?,
        };
        (!host.is_empty()).then(|| Self::Tcp(host.to_owned(), port))
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(Place, String), &'static str> {
        let uri = Uri::of(Path::new(text)).expect("is meant as an address");
        uri.map(|uri| (uri.place, uri.export)).map_err(|error| error.why)
    }

    #[test]
    fn addresses_are_those_of_the_nbd_project() {
        let tcp = |host: &str, port, name: &str| Ok((Place::Tcp(host.to_owned(), port), name.to_owned()));
        assert_eq!(parsed("nbd://nas/web"), tcp("nas", 10_809, "web"));
        assert_eq!(parsed("nbd://nas:7"), tcp("nas", 7, ""));
        assert_eq!(parsed("nbd://[::1]:7/a%20b+c/d"), tcp("::1", 7, "a b+c/d"));
        let unix = Ok((Place::Unix(PathBuf::from("/run/a b.sock")), "web".to_owned()));
        assert_eq!(parsed("nbd+unix:///web?socket=/run/a%20b.sock"), unix);
    }

    #[test]
    fn what_cannot_be_reached_is_refused_by_name() {
        assert_eq!(parsed("nbd+unix:///web"), Err("names no socket"));
        assert_eq!(parsed("nbds://nas/web"), Err("asks for TLS or vsock, which cannot be had here"));
        assert_eq!(parsed("nbd:nas"), Err("names no host"));
        for wrong in ["nbd://", "nbd:///web", "nbd://nas:99999/web", "nbd://[::1/web", "nbd://nas:/web"] {
            assert_eq!(parsed(wrong), Err("names no host, or no port after it"), "{wrong}");
        }
        assert_eq!(parsed("nbd://nas/%00"), Err("has a name that no export can have"));
        assert_eq!(Uri::of(Path::new("/vms/nbd:web")), None);
    }
}
