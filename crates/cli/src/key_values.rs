//! The `key=value,key=value` lists of `--disk` and `--vhost-user`, read as QEMU reads its own.
//!
//! A comma inside a value is written twice, so any path can be said: `path=/a,,b.qcow2`. A key without a value
//! is a flag that is on. Unknown and repeated keys are errors: a misspelt `read-only` must not open a disk for
//! writing.

use anyhow::{Context, Result, bail, ensure};

/// A parsed list, from which the reader takes the keys it knows and then calls [`KeyValues::finish`].
#[derive(Debug)]
pub struct KeyValues {
    pairs: Vec<(String, Option<String>)>,
}

impl KeyValues {
    /// Splits `text` at single commas and each part at its first `=`.
    ///
    /// # Errors
    /// On an empty part, an empty key, or a key that comes twice.
    pub fn parse(text: &str) -> Result<Self> {
        let mut pairs: Vec<(String, Option<String>)> = Vec::new();
        for part in split_at_single_commas(text) {
            ensure!(!part.is_empty(), "an empty part in '{text}' (a comma inside a value is written ',,')");
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (part, None),
            };
            ensure!(!key.is_empty(), "'=' without a key before it in '{text}'");
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
                value.map(|value| (key, value))
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
        Some(value.map_or(key.clone(), |value| format!("{key}={value}")))
    }

    /// Removes `key` and returns its value.
    ///
    /// # Errors
    /// When the key is there without a value, or with an empty one.
    pub fn take(&mut self, key: &str) -> Result<Option<String>> {
        let Some(at) = self.pairs.iter().position(|(candidate, _)| candidate == key) else { return Ok(None) };
        let value = self.pairs.remove(at).1.unwrap_or_default();
        ensure!(!value.is_empty(), "'{key}' needs a value: {key}=...");
        Ok(Some(value))
    }

    /// Removes the flag `key`: true for `key` and `key=on`, false for `key=off` and when absent.
    ///
    /// # Errors
    /// When the value is neither on nor off.
    pub fn take_flag(&mut self, key: &str) -> Result<bool> {
        let Some(at) = self.pairs.iter().position(|(candidate, _)| candidate == key) else {
            return Ok(false);
        };
        match self.pairs.remove(at).1.as_deref() {
            None | Some("on" | "true" | "yes") => Ok(true),
            Some("off" | "false" | "no") => Ok(false),
            Some(other) => bail!("'{key}' is on or off, not '{other}'"),
        }
    }

    /// Removes `key` and reads its value as a number.
    ///
    /// # Errors
    /// When the value is not a number that fits.
    pub fn take_number<N: std::str::FromStr>(&mut self, key: &str) -> Result<Option<N>>
    where
        N::Err: std::error::Error + Send + Sync + 'static,
    {
        let Some(value) = self.take(key)? else { return Ok(None) };
        let number = value.parse().with_context(|| format!("'{key}' is a number, not '{value}'"))?;
        Ok(Some(number))
    }

    /// Ends the reading: nothing may be left.
    ///
    /// # Errors
    /// Names the first key nobody took, and those of `known` that exist.
    pub fn finish(self, known: &[&str]) -> Result<()> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => bail!("unknown key '{key}': known are {}", known.join(", ")),
        }
    }
}

/// The parts between single commas, with each double comma turned into one.
fn split_at_single_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        let last = parts.last_mut().expect("starts with one part and only grows");
        if letter != ',' {
            last.push(letter);
        } else if letters.next_if_eq(&',').is_some() {
            last.push(',');
        } else {
            parts.push(String::new());
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
    use super::*;

    #[test]
    fn values_keep_equal_signs_and_doubled_commas() {
        let mut list = KeyValues::parse("path=/a,,b=c.qcow2,read-only,name=x").unwrap();
        assert_eq!(list.take("path").unwrap().as_deref(), Some("/a,b=c.qcow2"));
        assert!(list.take_flag("read-only").unwrap());
        assert_eq!(list.take("name").unwrap().as_deref(), Some("x"));
        assert_eq!(list.take("name").unwrap(), None);
        list.finish(&[]).unwrap();
    }

    #[test]
    fn an_odd_run_of_commas_is_escaped_from_the_left_as_qemu_does() {
        assert_eq!(split_at_single_commas("a,,,b"), ["a,", "b"]);
        assert_eq!(split_at_single_commas("a,,,,b"), ["a,,b"]);
    }

    #[test]
    fn escaping_and_splitting_are_inverse() {
        for value in ["", ",", ",,", "a,b", "/run/x,", ",x,,y,,,"] {
            let list = format!("first={},second=2", escape(value));
            assert_eq!(
                split_at_single_commas(&list),
                [format!("first={value}"), "second=2".to_owned()],
                "{value:?}"
            );
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
            let error = KeyValues::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn flags_and_numbers_are_checked() {
        let mut list = KeyValues::parse("a=on,b=off,c=maybe,d=7,e=-1,f,g=").unwrap();
        assert!(list.take_flag("a").unwrap());
        assert!(!list.take_flag("b").unwrap());
        assert!(list.take_flag("c").unwrap_err().to_string().contains("on or off"));
        assert!(!list.take_flag("absent").unwrap());
        assert_eq!(list.take_number::<u16>("d").unwrap(), Some(7));
        assert!(list.take_number::<u16>("e").is_err());
        assert!(list.take("f").unwrap_err().to_string().contains("needs a value"));
        assert!(list.take("g").is_err());
    }

    #[test]
    fn an_unknown_key_is_named_with_the_known_ones() {
        let list = KeyValues::parse("readonly").unwrap();
        let error = list.finish(&["path", "read-only"]).unwrap_err().to_string();
        assert_eq!(error, "unknown key 'readonly': known are path, read-only");
    }

    #[test]
    fn the_first_pair_can_be_taken_whatever_its_key() {
        let mut list = KeyValues::parse("web=/run/a,,b.sock,queues=2").unwrap();
        assert_eq!(list.take_first(), Some(("web".to_owned(), "/run/a,b.sock".to_owned())));
        assert_eq!(list.take_number::<u16>("queues").unwrap(), Some(2));
        assert_eq!(KeyValues::parse("web").unwrap().take_first(), None);
    }
}
