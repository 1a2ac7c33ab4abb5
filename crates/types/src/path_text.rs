//! Paths as text, for JSON, TOML and reports, which cannot carry all bytes that a file's name may have.
//!
//! A path that is UTF-8 is its own text. Another one is the `file:` URI of its absolute form (RFC 8089):
//! `file:///vms/inv%FF%FE.qcow2`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf, absolute};

const SCHEME: &str = "file://";

/// The text of a path, from which [`path_from_text`] makes it again.
pub fn path_to_text(path: &Path) -> String {
    path.to_str().map_or_else(
        || {
            let absolute = absolute(path).unwrap_or_else(|_| path.to_owned());
            let parts = absolute.as_os_str().as_bytes().split(|byte| *byte == b'/').map(percent_encode);
            format!("{SCHEME}{}", parts.collect::<Vec<_>>().join("/"))
        },
        str::to_owned,
    )
}

/// The path whose text this is. What is no whole `file:` URI of this host is a path as it stands.
pub fn path_from_text(text: &str) -> PathBuf {
    let decoded = text.strip_prefix(SCHEME).filter(|path| path.starts_with('/')).and_then(percent_decode);
    let path = decoded.filter(|bytes| !bytes.contains(&0));
    path.map_or_else(|| text.into(), |bytes| OsStr::from_bytes(&bytes).into())
}

/// Everything but RFC 3986's unreserved characters as `%` and two digits.
pub fn percent_encode(bytes: &[u8]) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// The same the other way; `None` where a `%` has no two digits behind it.
pub fn percent_decode(text: &str) -> Option<Vec<u8>> {
    let (plain, rest) = text.split_once('%').unwrap_or((text, ""));
    let mut bytes = plain.as_bytes().to_vec();
    for part in rest.split('%').filter(|_| plain.len() < text.len()) {
        let digits = part.get(..2).filter(|digits| !digits.starts_with('+'))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_any_bytes_survives_as_text() {
        for (path, text) in [
            (&b"/a/b c%41.qcow2"[..], "/a/b c%41.qcow2"),
            (b"a.qcow2", "a.qcow2"),
            (b"/a/%\xff@mon", "file:///a/%25%FF%40mon"),
        ] {
            let path = Path::new(OsStr::from_bytes(path));
            assert_eq!(path_to_text(path), text);
            assert_eq!(path_from_text(text), path);
        }
        assert!(path_to_text(Path::new(OsStr::from_bytes(b"\xff"))).starts_with("file:///"));
    }

    #[test]
    fn what_is_no_uri_is_a_path() {
        for text in [
            "file://host/a",
            "file:///a%4",
            "file:///a%+4",
            "file:///a%0",
            "file:///a%00",
            "file:///%zz",
            "nbd:x",
            "",
        ] {
            assert_eq!(path_from_text(text), Path::new(text), "{text}");
        }
    }

    #[test]
    fn no_name_leaves_its_segment() {
        assert_eq!(percent_encode(b"web-1.a_b~c"), "web-1.a_b~c");
        assert_eq!(percent_encode(b"a/b?c#d e%"), "a%2Fb%3Fc%23d%20e%25");
        assert_eq!(percent_encode("ü".as_bytes()), "%C3%BC");
    }
}
