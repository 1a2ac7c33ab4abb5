//! Where a repository is, as people write it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::error::{Error, Result};

const HDFS: &str = "hdfs://";
const HDFS_FORM: &str = "hdfs://NAMENODE[:PORT]/DIR[?block=SIZE], with blocks of 64K to 1024M";
const S3: &str = "s3://";
const ENDPOINT: &str = "?endpoint=";
const S3_FORM: &str =
    "s3://BUCKET[/PREFIX][?endpoint=http[s]://HOST[:PORT]], with letters, digits, '.', '_' and '-' in names";

/// A block is what is lost with a DataNode, and HDFS allows a file 10,000 of them.
const BLOCK_BYTES: u64 = 8 << 20;
const MIN_BLOCK_BYTES: u64 = 64 << 10;
const MAX_BLOCK_BYTES: u64 = 1 << 30;

/// Where a repository is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A directory of this host: `/mnt/nas/vms`.
    Directory(PathBuf),
    /// A directory of HDFS: `hdfs://NAMENODE[:PORT]/DIR[?block=SIZE]`.
    Hdfs(HdfsAddress),
    /// A part of a bucket of an object store that speaks S3: `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    S3(S3Address),
}

/// A directory of HDFS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HdfsAddress {
    /// A NameNode with its port, or a name service of the configuration in `HADOOP_CONF_DIR`.
    pub authority: String,
    /// Empty for the root, or with a slash before and none behind.
    pub dir: String,
    /// Bytes of the blocks of new objects.
    pub block_bytes: u64,
}

/// A part of a bucket of an object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Address {
    /// The bucket.
    pub bucket: String,
    /// What the names of all objects begin with: nothing, or with a slash behind and none before.
    pub prefix: String,
    /// The store, if the address says it: `http://HOST[:PORT]`.
    pub endpoint: Option<String>,
}

impl Address {
    /// The address that people write as `text`.
    ///
    /// # Errors
    /// `InvalidInput`, with what is accepted.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |expected: String| {
            Err(Error::of(text, "parsing")(io::Error::new(io::ErrorKind::InvalidInput, expected)))
        };
        match scheme(text) {
            Some("hdfs") => match HdfsAddress::parse(text) {
                Some(address) => Ok(Self::Hdfs(address)),
                None => wrong(format!("expected {HDFS_FORM}")),
            },
            Some("s3") => match S3Address::parse(text) {
                Some(address) => Ok(Self::S3(address)),
                None => wrong(format!("expected {S3_FORM}")),
            },
            None if !text.is_empty() => Ok(Self::Directory(text.into())),
            _ => wrong(format!("expected a directory, {HDFS_FORM}, or {S3_FORM}")),
        }
    }

    /// Whether `text` names a repository that is no directory of this host, rightly or not.
    pub fn is_elsewhere(text: &str) -> bool {
        [HDFS, S3].iter().any(|scheme| text.starts_with(scheme))
    }

    /// The addresses in a text that has `:` between them, as search paths have.
    pub fn split_list(text: &str) -> Vec<&str> {
        let (mut addresses, mut rest) = (Vec::new(), Some(text));
        while let Some(text) = rest {
            let end = end_of_first(text);
            let (address, after) = text.split_at(end);
            if !address.is_empty() {
                addresses.push(address);
            }
            rest = after.strip_prefix(':');
        }
        addresses
    }
}

/// Where the first address of a list ends: the colons of `SCHEME://HOST:PORT/DIR` and `?endpoint=SCHEME://HOST:PORT` separate nothing.
fn end_of_first(text: &str) -> usize {
    let next_colon = |from: usize| text[from..].find(':').map_or(text.len(), |at| from + at);
    let path = scheme(text).map_or(0, |scheme| {
        let host = scheme.len() + "://".len();
        text[host..].find(['/', '?']).map_or(text.len(), |at| host + at)
    });
    let end = next_colon(path);
    let Some(endpoint) = text[path..end].rfind(ENDPOINT).map(|at| path + at + ENDPOINT.len()) else {
        return end;
    };
    let Some(scheme) = scheme(&text[endpoint..]) else { return end };
    let host = endpoint + scheme.len() + "://".len();
    // An IPv6 address has colons of its own.
    let end = next_colon(
        text[host..].find(']').filter(|_| text[host..].starts_with('[')).map_or(host, |at| host + at),
    );
    let port = text[end..].strip_prefix(':').unwrap_or_default();
    let digits = port.bytes().take_while(u8::is_ascii_digit).count();
    if digits == 0 { end } else { end + 1 + digits }
}

/// What comes before the first `://`, if that is a word.
fn scheme(text: &str) -> Option<&str> {
    let (scheme, _) = text.split_once("://")?;
    let is_word = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_word.then_some(scheme)
}

impl HdfsAddress {
    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix(HDFS)?;
        let (place, block_bytes) = match text.split_once('?') {
            Some((place, query)) => (place, parse_block(query.strip_prefix("block=")?)?),
            None => (text, BLOCK_BYTES),
        };
        let (authority, dir) = place.split_once('/')?;
        let dir = dir.trim_matches('/');
        let dir = if dir.is_empty() { String::new() } else { format!("/{dir}") };
        (!authority.is_empty()).then(|| Self { authority: authority.to_owned(), dir, block_bytes })
    }
}

impl fmt::Display for HdfsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HDFS}{}{}", self.authority, self.dir)
    }
}

impl S3Address {
    fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix(S3)?;
        let (place, endpoint) = match text.split_once('?') {
            Some((place, query)) => (place, Some(query.strip_prefix("endpoint=")?.trim_end_matches('/'))),
            None => (text, None),
        };
        let host = endpoint.map(|url| url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")));
        let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', '@', ' ']);
        if host.is_some_and(|host| !host.is_some_and(is_host)) {
            return None;
        }
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_end_matches('/');
        let is_word = |word: &str| {
            let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            !word.is_empty() && !word.starts_with('.') && word.bytes().all(is_fit)
        };
        let is_right = is_word(bucket) && (prefix.is_empty() || prefix.split('/').all(is_word));
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        is_right.then(|| Self { bucket: bucket.to_owned(), prefix, endpoint: endpoint.map(str::to_owned) })
    }
}

impl fmt::Display for S3Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{S3}{}/{}", self.bucket, self.prefix.trim_end_matches('/'))?;
        self.endpoint.iter().try_for_each(|endpoint| write!(f, "?endpoint={endpoint}"))
    }
}

/// A number of bytes, or of `K` or `M`, that HDFS can take for the size of blocks.
fn parse_block(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    let fits = (MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&bytes) && bytes.is_multiple_of(512);
    fits.then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colons_part_addresses_and_not_ports() {
        let list = Address::split_list;
        assert_eq!(list("/srv/a"), ["/srv/a"]);
        assert_eq!(list("/srv/a:b::/srv/c:"), ["/srv/a", "b", "/srv/c"]);
        assert_eq!(list("hdfs://nn:8020/v"), ["hdfs://nn:8020/v"]);
        let mixed = "/srv/a:hdfs://nn:8020/v?block=1M:hdfs://cluster/w:/srv/b";
        assert_eq!(list(mixed), ["/srv/a", "hdfs://nn:8020/v?block=1M", "hdfs://cluster/w", "/srv/b"]);
        assert_eq!(list("hdfs://nn:8020"), ["hdfs://nn:8020"]);
        assert_eq!(list("s3://host:9000/v:/srv/a://b"), ["s3://host:9000/v", "/srv/a", "//b"]);
        for store in ["http://h:9000", "https://h", "http://[::1]:9000", "http://[::1]"] {
            for place in ["vms/v", "vms"] {
                let address = format!("s3://{place}?endpoint={store}");
                assert_eq!(list(&address), [&*address]);
                let mixed = format!("/srv/a:{address}:/srv/b:{address}");
                assert_eq!(list(&mixed), ["/srv/a", &*address, "/srv/b", &*address]);
            }
        }
        assert_eq!(list(""), [""; 0]);
    }

    #[test]
    fn addresses_are_directories_or_name_a_namenode_and_a_directory() {
        for directory in ["/mnt/nas/vms", "vms", "hdfs", "s3", "./s3://v", "://v"] {
            assert_eq!(Address::parse(directory).unwrap(), Address::Directory(directory.into()));
        }
        let hdfs = |text| match Address::parse(text) {
            Ok(Address::Hdfs(at)) => (at.to_string(), at.authority, at.dir, at.block_bytes >> 10),
            other => panic!("{text}: {other:?}"),
        };
        let at = |text: &str, authority: &str, dir: &str, block| {
            (text.to_owned(), authority.to_owned(), dir.to_owned(), block)
        };
        assert_eq!(hdfs("hdfs://nn:8020/a/b"), at("hdfs://nn:8020/a/b", "nn:8020", "/a/b", 8192));
        assert_eq!(hdfs("hdfs://cluster/a/?block=1M"), at("hdfs://cluster/a", "cluster", "/a", 1024));
        assert_eq!(hdfs("hdfs://nn/?block=65536"), at("hdfs://nn", "nn", "", 64));
        assert_eq!(hdfs("hdfs://nn/a?block=1024M"), at("hdfs://nn/a", "nn", "/a", 1 << 20));
    }

    #[test]
    fn an_address_in_s3_is_a_bucket_and_a_prefix() {
        let s3 = |text| match Address::parse(text) {
            Ok(Address::S3(at)) => (at.to_string(), at.bucket, at.prefix),
            other => panic!("{text}: {other:?}"),
        };
        let at = |text: &str, prefix: &str| (text.to_owned(), "vms.example".to_owned(), prefix.to_owned());
        let elsewhere = "s3://vms.example/a?endpoint=http://[::1]:9000";
        assert_eq!(s3(elsewhere), at(elsewhere, "a/"));
        assert_eq!(
            s3("s3://vms.example/a?endpoint=https://h/"),
            at("s3://vms.example/a?endpoint=https://h", "a/")
        );
        assert_eq!(s3("s3://vms.example"), at("s3://vms.example/", ""));
        assert_eq!(s3("s3://vms.example/"), at("s3://vms.example/", ""));
        assert_eq!(s3("s3://vms.example/a/web_1"), at("s3://vms.example/a/web_1", "a/web_1/"));
        assert_eq!(s3("s3://vms.example/a//"), at("s3://vms.example/a", "a/"));
    }

    #[test]
    fn what_is_accepted_is_said() {
        let said = |text: &str| {
            let error = Address::parse(text).unwrap_err();
            assert_eq!((error.kind(), &*error.repository), (io::ErrorKind::InvalidInput, text));
            error.source.to_string()
        };
        for wrong in ["hdfs://nn:8020", "hdfs:///a", "hdfs://nn/a?size=1M", "hdfs://nn/a?block="] {
            assert_eq!(said(wrong), format!("expected {HDFS_FORM}"));
        }
        for wrong in [
            "s3://",
            "s3:///v",
            "s3://host:9000/v",
            "s3://b//v",
            "s3://b/.new",
            "s3://b/v?x=1",
            "s3://b?endpoint=",
            "s3://b?endpoint=h:1",
            "s3://b?endpoint=http://h/x",
            "s3://b/../v",
        ] {
            assert_eq!(said(wrong), format!("expected {S3_FORM}"));
        }
        for wrong in ["", "file:///v"] {
            assert_eq!(said(wrong), format!("expected a directory, {HDFS_FORM}, or {S3_FORM}"));
        }
        for wrong in ["", "M", "63K", "1025M", "65537", "1G", "-1M", "99999999999999999999M"] {
            assert_eq!(parse_block(wrong), None, "{wrong}");
        }
    }
}
