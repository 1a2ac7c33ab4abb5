//! The `key=value,key=value` lists of `--disk`, `--vhost-user` and `--nbd`, read as QEMU reads its own into the API's types.
//!
//! A comma inside a value is written twice, so any path can be said: `path=/a,,b.qcow2`. A key without a value
//! is a flag that is on. Unknown and repeated keys are errors: a misspelt `read-only` must not open a disk for
//! writing.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use vmstrata_types::path_to_text;

/// Keys that are on or off.
const FLAGS: [&str; 6] = ["read-only", "force", "share", "any-memory", "rw", "insecure"];
/// Keys with a number.
const NUMBERS: [&str; 4] = ["queues", "threads", "poll-us", "window"];

/// A parsed list: the reader takes what it knows better, and then calls [`KeyValues::read`].
#[derive(Debug)]
pub struct KeyValues {
    pairs: Vec<(String, Option<OsString>)>,
}

impl KeyValues {
    /// Splits `text` at single commas and each part at its first `=`.
    ///
    /// # Errors
    /// On an empty part, an empty key, or a key that comes twice.
    pub fn parse(text: &OsStr) -> Result<Self> {
        let mut pairs: Vec<(String, Option<OsString>)> = Vec::new();
        let shown = text.display();
        for part in split_at_single_commas(text.as_bytes()) {
            ensure!(!part.is_empty(), "an empty part in '{shown}' (a comma inside a value is written ',,')");
            let mut halves = part.splitn(2, |byte| *byte == b'=').map(OsStr::from_bytes);
            let key = halves.next().unwrap_or_default().to_string_lossy().into_owned();
            let value = halves.next().map(OsStr::to_owned);
            ensure!(!key.is_empty(), "'=' without a key before it in '{shown}'");
            ensure!(pairs.iter().all(|(seen, _)| *seen != key), "'{key}' is given twice");
            pairs.push((key, value));
        }
        Ok(Self { pairs })
    }

    /// Removes and returns the first pair when it is `key=value`: the `NAME=SOCKET` that opens a list.
    pub fn take_first(&mut self) -> Option<(String, String)> {
        match self.pairs.first() {
            Some((_, Some(_))) => {
                let (key, value) = self.pairs.remove(0);
                value.map(|value| (key, text_of(value)))
            }
            _ => None,
        }
    }

    /// Removes and returns the first part, whatever it is: the address that opens a list.
    pub fn take_head(&mut self) -> Option<String> {
        if self.pairs.is_empty() {
            return None;
        }
        let (key, value) = self.pairs.remove(0);
        Some(value.map_or(key.clone(), |value| format!("{key}={}", text_of(value))))
    }

    /// Adds a pair.
    pub fn put(&mut self, key: &str, value: String) {
        self.pairs.push((key.to_owned(), Some(value.into())));
    }

    /// Removes `key` and returns its value.
    ///
    /// # Errors
    /// When the key is there without a value, or with an empty one.
    pub fn take(&mut self, key: &str) -> Result<Option<OsString>> {
        let Some(at) = self.pairs.iter().position(|(candidate, _)| candidate == key) else { return Ok(None) };
        said(key, self.pairs.remove(at).1).map(Some)
    }

    /// Makes what the keys say, by the names of the API's fields.
    ///
    /// # Errors
    /// A key that is unknown or missing; a value that the key cannot have.
    pub fn read<T: DeserializeOwned>(self) -> Result<T> {
        let mut fields = serde_json::Map::new();
        for (key, value) in self.pairs {
            let value = value.map(text_of);
            let value = match (&*key, value) {
                (flag, value) if FLAGS.contains(&flag) => match value.as_deref() {
                    None | Some("on" | "true" | "yes") => true.into(),
                    Some("off" | "false" | "no") => false.into(),
                    Some(other) => bail!("'{key}' is on or off, not '{other}'"),
                },
                (number, value) if NUMBERS.contains(&number) => {
                    let value = said(&key, value)?;
                    let number: u32 =
                        value.parse().with_context(|| format!("'{key}' is a number, not '{value}'"))?;
                    number.into()
                }
                // Another flag: whether there is one, or a value is missing, the fields say.
                (_, None) => true.into(),
                (_, value) => said(&key, value)?.into(),
            };
            ensure!(!fields.contains_key(&key), "'{key}' is given twice");
            fields.insert(key, value);
        }
        Ok(serde_json::from_value(fields.into())?)
    }
}

/// The value of `key`, of which there must be something.
fn said<T: AsRef<OsStr>>(key: &str, value: Option<T>) -> Result<T> {
    value
        .filter(|value| !value.as_ref().is_empty())
        .with_context(|| format!("'{key}' needs a value: {key}=..."))
}

/// A value as the API has it: a path that is not UTF-8 is a `file:` URI there.
fn text_of(value: OsString) -> String {
    value.into_string().unwrap_or_else(|path| path_to_text(Path::new(&path)))
}

/// The parts between single commas, with each double comma turned into one.
fn split_at_single_commas(text: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut bytes = text.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let last = parts.last_mut().expect("starts with one part and only grows");
        if byte != b',' {
            last.push(byte);
        } else if bytes.next_if_eq(&b',').is_some() {
            last.push(b',');
        } else {
            parts.push(Vec::new());
        }
    }
    parts
}

/// `text` as a value inside such a list: the inverse of the splitting.
pub fn escape(text: &str) -> String {
    text.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use vmstrata_api::{DiskSpec, VhostUserSpec};

    use super::*;

    fn parse(text: &str) -> Result<KeyValues> {
        KeyValues::parse(text.as_ref())
    }

    #[test]
    fn values_keep_equal_signs_and_doubled_commas() {
        let disk: DiskSpec = parse("path=/a,,b=c.qcow2,read-only,name=x").unwrap().read().unwrap();
        let name = Some("x".to_owned());
        assert_eq!(
            disk,
            DiskSpec { path: "/a,b=c.qcow2".to_owned(), name, read_only: true, ..Default::default() }
        );
    }

    #[test]
    fn an_odd_run_of_commas_is_escaped_from_the_left_as_qemu_does() {
        assert_eq!(split_at_single_commas(b"a,,,b"), [&b"a,"[..], b"b"]);
        assert_eq!(split_at_single_commas(b"a,,,,b"), [b"a,,b"]);
    }

    #[test]
    fn escaping_and_splitting_are_inverse() {
        for value in ["", ",", ",,", "a,b", "/run/x,", ",x,,y,,,"] {
            let list = format!("first={},second=2", escape(value));
            let parts = [format!("first={value}"), "second=2".to_owned()].map(String::into_bytes);
            assert_eq!(split_at_single_commas(list.as_bytes()), parts, "{value:?}");
        }
    }

    #[test]
    fn malformed_lists_are_refused() {
        for (text, part) in [
            ("", "an empty part"),
            ("path=a,", "an empty part"),
            ("path=a, ,x,", "an empty part"),
            ("=a", "without a key"),
            ("path=a,path=b", "'path' is given twice"),
            ("ro,ro=off", "'ro' is given twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn flags_and_numbers_are_checked() {
        let read = |text: &str| parse(text).unwrap().read::<VhostUserSpec>();
        let socket = read("disk=a,socket=b,share=on,any-memory=off,queues=7").unwrap();
        assert_eq!(
            (socket.share, socket.any_memory, socket.queues, socket.threads),
            (true, false, Some(7), None)
        );
        for (text, part) in [
            ("disk=a,socket=b,share=maybe", "on or off"),
            ("disk=a,socket=b,queues=-1", "'queues' is a number"),
            ("disk=a,socket=b,queues", "'queues' needs a value"),
            ("disk=a,socket=", "'socket' needs a value"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_the_known_ones() {
        let list = parse("path=a,readonly").unwrap();
        let error = list.read::<DiskSpec>().unwrap_err().to_string();
        assert!(error.starts_with("unknown field `readonly`") && error.contains("`read-only`"), "{error}");
    }

    #[test]
    fn the_first_pair_can_be_taken_whatever_its_key() {
        let mut list = parse("web=/run/a,,b.sock,queues=2").unwrap();
        assert_eq!(list.take_first(), Some(("web".to_owned(), "/run/a,b.sock".to_owned())));
        assert_eq!(list.take("queues").unwrap().unwrap(), "2");
        assert_eq!(parse("web").unwrap().take_first(), None);
    }
}
