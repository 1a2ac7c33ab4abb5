//! Where an export is: `nbd://HOST[:PORT]/NAME` or `nbd+unix:///NAME?socket=PATH`.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;
use url::Url;
use url::form_urlencoded::parse as parse_query;

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
        let url = Url::parse(text).map_err(|_| wrong("is no address"))?;
        let socket =
            || parse_query(url.query().unwrap_or_default().as_bytes()).find(|(key, _)| key == "socket");
        let place = match url.scheme() {
            "nbd" => {
                let host =
                    url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| wrong("names no host"))?;
                // As the resolver wants addresses of IPv6.
                Place::Tcp(host.trim_matches(['[', ']']).to_owned(), url.port().unwrap_or(PORT))
            }
            "nbd+unix" => {
                let (_, path) = socket().ok_or_else(|| wrong("names no socket"))?;
                Place::Unix(PathBuf::from(path.into_owned()))
            }
            _ => return Err(wrong("asks for TLS or vsock, which cannot be had here")),
        };
        let name = url.path().strip_prefix('/').unwrap_or_default();
        let name = parse_query(format!("n={}", name.replace('+', "%2B").replace('&', "%26")).as_bytes())
            .next()
            .map_or_else(String::new, |(_, name)| name.into_owned());
        Ok(Self { place, export: name, text: text.to_owned() })
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
        assert_eq!(Uri::of(Path::new("/vms/nbd:web")), None);
    }
}
