//! Backing names that are JSON descriptions, as QEMU writes them: those of plain files.
//!
//! ```text
//!   json:{"driver":"qcow2","file":{"driver":"file","filename":"/vms/base.qcow2"}}
//!   json:{"driver":"qcow2","file.driver":"file","file.filename":"/vms/base.qcow2"}      the same, flattened
//! ```
//!
//! Only what leads to the same bytes in QEMU and here is taken: the drivers `qcow2`, `raw` and `file`, a file's name, a
//! `backing` that is what the image itself names, `offset` and `size` of a raw layer, and options that do not change what is read.
//! The rest is refused by name.
//! A relative file name is relative to the working directory, as in QEMU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmstrata_types::HostOffset;

use crate::error::{ErrorKind, Result};
use crate::names::Format;
use crate::window::{SECTOR, Window};

/// What a description says of the layer that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) path: PathBuf,
    /// `None` where it does not say.
    pub(crate) format: Option<Format>,
    /// What of the file it is; `None` for all.
    pub(crate) window: Option<Window>,
    /// What it says of the layer below that one.
    pub(crate) below: Below,
}

/// What a description says of the layer below the one that it names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Below {
    /// Nothing: what the image itself names.
    #[default]
    AsStored,
    /// That there is none.
    Nothing,
    /// That it is this one.
    Named(Box<Described>),
}

impl Below {
    /// What lies below the image at `image`, which names `stored`.
    ///
    /// # Errors
    /// [`ErrorKind::BackingName`] where the description says something else than the image.
    pub(crate) fn check(self, image: &Path, stored: Option<Described>) -> Result<Option<Described>> {
        let real = |path: &Path| path.canonicalize().ok();
        match (self, stored) {
            (Self::AsStored, stored) => Ok(stored),
            (Self::Nothing, None) => Ok(None),
            (Self::Named(named), Some(stored))
                if real(&named.path).is_some_and(|path| Some(path) == real(&stored.path))
                    && (named.format.is_none() || named.format == stored.format)
                    && named.window == stored.window =>
            {
                let below = if named.below == Self::AsStored { stored.below } else { named.below };
                Ok(Some(Described { below, ..stored }))
            }
            (Self::Nothing | Self::Named(_), _) => {
                let name = image.display().to_string();
                let feature = "another backing file in a json: description than the image names".to_owned();
                Err(crate::Error::from(ErrorKind::BackingName { name, feature }).in_file(image))
            }
        }
    }
}

/// Options of QEMU's block nodes that do not change what is read.
const HARMLESS: [&str; 12] = [
    "node-name",
    "read-only",
    "auto-read-only",
    "discard",
    "detect-zeroes",
    "force-share",
    "locking",
    "aio",
    "aio-max-batch",
    "cache",
    "pr-manager",
    "drop-cache",
];
type Options = BTreeMap<String, Value>;

/// What the description `text`, without `json:`, names.
///
/// # Errors
/// [`ErrorKind::BackingName`]: no description, or one that says more than is supported.
pub(crate) fn parse(text: &[u8]) -> Result<Described> {
    let refuse = |feature: String| ErrorKind::BackingName {
        name: format!("json:{}", String::from_utf8_lossy(text)),
        feature,
    };
    let options: Options = serde_json::from_slice(text)
        .map_err(|error| refuse(format!("a json: description that is none ({error})")))?;
    let mut flat = Options::new();
    flatten("", options, &mut flat);
    image(flat).map_err(|feature| refuse(feature).into())
}

/// Puts nested options beside the others, under names with dots.
fn flatten(prefix: &str, options: impl IntoIterator<Item = (String, Value)>, flat: &mut Options) {
    for (key, value) in options {
        let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => flatten(&key, inner, flat),
            value => drop(flat.insert(key, value)),
        }
    }
}

/// Takes what is said of `name`, without that prefix.
fn take_all(options: &mut Options, name: &str) -> Options {
    let prefix = format!("{name}.");
    let (inner, rest) = std::mem::take(options).into_iter().partition(|(key, _)| key.starts_with(&prefix));
    *options = rest;
    Options::into_iter(inner).map(|(key, value)| (key[prefix.len()..].to_owned(), value)).collect()
}

fn take_text(options: &mut Options, name: &str) -> Result<Option<String>, String> {
    match options.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(format!("a json: description whose {name:?} is no text")),
    }
}

/// A number of bytes, which QEMU takes as text, too.
fn take_bytes(options: &mut Options, name: &str) -> Result<Option<u64>, String> {
    let bytes = match options.remove(name) {
        None => return Ok(None),
        Some(Value::Number(number)) => number.as_u64(),
        Some(Value::String(text)) => text.parse().ok(),
        Some(_) => None,
    };
    bytes.map(Some).ok_or_else(|| format!("a json: description whose {name:?} is no number of bytes"))
}

/// What of the file a layer is.
fn window(options: &mut Options, format: Option<Format>) -> Result<Option<Window>, String> {
    let (start, len) = (take_bytes(options, "offset")?, take_bytes(options, "size")?);
    if start.is_none() && len.is_none() {
        return Ok(None);
    }
    if format != Some(Format::Raw) {
        return Err(PART.to_owned());
    }
    if len.is_some_and(|len| len % SECTOR != 0) {
        return Err("a json: description whose \"size\" is no multiple of 512".to_owned());
    }
    let start = start.unwrap_or(0);
    Ok((start > 0 || len.is_some()).then_some(Window { start: HostOffset::new(start), len }))
}

/// What is refused of an image inside a file.
const PART: &str = "a qcow2 image in a part of a file, in a json: description (make a file of it: `qemu-img convert -O qcow2 'json:...' NEW`, then `qemu-img rebase -u` to that)";

/// The names of the format have at most 1,023 bytes, so there are not many levels.
fn image(mut options: Options) -> Result<Described, String> {
    let driver = take_text(&mut options, "driver")?;
    let format = match driver.as_deref() {
        None => None,
        Some("qcow2") => Some(Format::Qcow2),
        Some("raw") => Some(Format::Raw),
        Some("file") => {
            let path = file(options)?;
            return Ok(Described { path, format: Some(Format::Raw), window: None, below: Below::Nothing });
        }
        Some(other) => return Err(format!("the driver {other:?} in a json: description")),
    };
    let window = window(&mut options, format)?;
    let below = match (options.remove("backing"), take_all(&mut options, "backing")) {
        (None, named) if named.is_empty() => Below::AsStored,
        (None, named) => Below::Named(Box::new(image(named)?)),
        (Some(Value::Null), _) => Below::Nothing,
        (Some(Value::String(text)), _) if text.is_empty() => Below::Nothing,
        (Some(_), _) => return Err("a reference to a node in a json: description".to_owned()),
    };
    let path = file(take_all(&mut options, "file"))?;
    check_rest(options)?;
    Ok(Described { path, format, window, below })
}

/// The file that a node of the driver `file` opens.
fn file(mut options: Options) -> Result<PathBuf, String> {
    match take_text(&mut options, "driver")?.as_deref() {
        None | Some("file") => {}
        Some("raw") => return Err(PART.to_owned()),
        Some(other) => return Err(format!("the driver {other:?} in a json: description")),
    }
    let name = take_text(&mut options, "filename")?;
    let name = name.ok_or_else(|| "a json: description without a file's name".to_owned())?;
    check_rest(options)?;
    std::path::absolute(&name).map_err(|error| format!("a file name that leads nowhere ({error})"))
}

fn check_rest(options: Options) -> Result<(), String> {
    let first = |key: &str| key.split('.').next().is_some_and(|first| HARMLESS.contains(&first));
    match options.keys().find(|key| !first(key)) {
        Some(key) => Err(format!("the option {key:?} in a json: description")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Described> {
        super::parse(text.as_bytes())
    }

    fn named(path: &str, format: Option<Format>, below: Below) -> Described {
        Described { path: path.into(), format, window: None, below }
    }

    #[test]
    fn nested_and_flattened_descriptions_name_the_same_file() {
        let expected = named("/a/b.qcow2", Some(Format::Qcow2), Below::AsStored);
        for text in [
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"/a/b.qcow2"}}"#,
            r#"{"driver":"qcow2","file.driver":"file","file.filename":"/a/b.qcow2"}"#,
            r#"{"driver":"qcow2","file.filename":"/a/b.qcow2","read-only":true,"file.cache.direct":"on"}"#,
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
        let plain = parse(r#"{"driver":"file","filename":"/a/b"}"#).unwrap();
        assert_eq!(plain, named("/a/b", Some(Format::Raw), Below::Nothing));
        let unsaid = parse(r#"{"file":{"filename":"/a/b"}}"#).unwrap();
        assert_eq!(unsaid, named("/a/b", None, Below::AsStored));
        let here = parse(r#"{"driver":"raw","file":{"filename":"b"}}"#).unwrap();
        assert_eq!(here.path, std::env::current_dir().unwrap().join("b"));
    }

    #[test]
    fn a_description_says_what_lies_below() {
        let of = |backing: &str| {
            parse(&format!(r#"{{"driver":"qcow2","file.filename":"/a","backing":{backing}}}"#)).unwrap().below
        };
        assert_eq!((of("null"), of("\"\"")), (Below::Nothing, Below::Nothing));
        let base = of(r#"{"driver":"raw","file":{"driver":"file","filename":"/b"}}"#);
        assert_eq!(base, Below::Named(Box::new(named("/b", Some(Format::Raw), Below::AsStored))));
    }

    #[test]
    fn a_raw_layer_may_be_a_part_of_a_file() {
        let of = |said: &str| {
            parse(&format!(r#"{{"driver":"raw",{said}"file":{{"driver":"file","filename":"/a"}}}}"#))
                .unwrap()
                .window
        };
        let window = |start, len| Some(Window { start: HostOffset::new(start), len });
        assert_eq!(of(r#""offset":65536,"size":1048576,"#), window(65536, Some(1 << 20)));
        assert_eq!(of(r#""offset":"1000","#), window(1000, None));
        assert_eq!(of(r#""size":"512","#), window(0, Some(512)));
        assert_eq!((of(r#""offset":0,"#), of("")), (None, None));
    }

    #[test]
    fn what_reads_other_bytes_is_refused_by_name() {
        for (text, said) in [
            (r#"{"driver":"nbd","host":"x"}"#, "driver \"nbd\""),
            (r#"{"driver":"qcow2","file":{"driver":"https","url":"x"}}"#, "driver \"https\""),
            (r#"{"driver":"qcow2","offset":512,"file.filename":"/a"}"#, "image in a part of a file"),
            (
                r#"{"driver":"qcow2","file":{"driver":"raw","offset":512,"file":{"filename":"/a"}}}"#,
                "image in a part of a file",
            ),
            (r#"{"driver":"raw","size":513,"file.filename":"/a"}"#, "no multiple of 512"),
            (r#"{"driver":"raw","offset":-1,"file.filename":"/a"}"#, "is no number of bytes"),
            (r#"{"driver":"qcow2","file":"node"}"#, "without a file's name"),
            (r#"{"driver":"qcow2","backing":"node","file.filename":"/a"}"#, "a reference to a node"),
            (r#"{"driver":"qcow2","file":{"filename":7}}"#, "is no text"),
            ("[]", "that is none"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains("not supported"), "{text}: {error}");
        }
    }
}
