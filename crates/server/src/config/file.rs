//! The file as it is written: keys, types, and the line each value stands on.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;
use vmstrata_api as api;
use vmstrata_export::SocketAccess;

use super::{ConfigFault, Settings};
use crate::options::{ControlPlace, LogFormat, TlsFiles};
use crate::size::parse_size;
use crate::spec::{
    DiskSpec, FuseSpec, NbdSpec, SpecError, VhostUserSpec, parse_account, parse_host_rate, parse_metrics,
    parse_mode, parse_tier_cache,
};

/// What is wrong, and the byte at which.
type At = (usize, ConfigFault);

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    disk: Vec<Spanned<api::DiskSpec>>,
    vhost_user: Vec<Spanned<api::VhostUserSpec>>,
    keep_going: bool,
    nbd: Vec<Spanned<Export<api::NbdSpec>>>,
    fuse: Vec<Spanned<Export<api::FuseSpec>>>,
    nbd_owner: Option<Spanned<String>>,
    nbd_group: Option<Spanned<String>>,
    nbd_mode: Option<Spanned<String>>,
    nbd_tls_cert: Option<Spanned<FilePath>>,
    nbd_tls_key: Option<Spanned<FilePath>>,
    nbd_tls_client_ca: Option<Spanned<FilePath>>,
    allow_backing: Vec<FilePath>,
    metadata_cache: Option<Spanned<Text>>,
    max_open_files: Option<Spanned<u32>>,
    workers: Option<Spanned<u32>>,
    tier_cache: Option<Spanned<Text>>,
    tier_rate: Option<Spanned<Text>>,
    move_rate: Option<Spanned<Text>>,
    flush_log: Option<FilePath>,
    flush_log_size: Option<Spanned<Text>>,
    runtime_dir: Option<FilePath>,
    control: Option<Spanned<FilePath>>,
    no_control: bool,
    metrics: Option<Spanned<Text>>,
    audit: Option<FilePath>,
    log_format: Option<LogFormat>,
}

/// A path, which is not empty: joined to a directory it would mean that.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "PathBuf")]
struct FilePath(PathBuf);

impl TryFrom<PathBuf> for FilePath {
    type Error = &'static str;

    fn try_from(path: PathBuf) -> Result<Self, &'static str> {
        if path.as_os_str().is_empty() { Err("a path is not empty") } else { Ok(Self(path)) }
    }
}

/// An export of all disks: its place, or a table with more.
#[derive(Clone, Debug)]
struct Export<T>(T);

/// What an export is that says no more than its place.
trait AtPlace: for<'de> Deserialize<'de> {
    /// What that is, for messages.
    const PLACE: &str;

    fn at(place: String) -> Self;
}

impl AtPlace for api::NbdSpec {
    const PLACE: &str = "an address";

    fn at(address: String) -> Self {
        Self { address, ..Self::default() }
    }
}

impl AtPlace for api::FuseSpec {
    const PLACE: &str = "a directory";

    fn at(directory: String) -> Self {
        Self { directory, ..Self::default() }
    }
}

impl<'de, T: AtPlace> Deserialize<'de> for Export<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PlaceOrTable<T>(PhantomData<T>);
        impl<'de, T: AtPlace> Visitor<'de> for PlaceOrTable<T> {
            type Value = Export<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{0}, or a table with {0}", T::PLACE)
            }

            fn visit_str<E: de::Error>(self, place: &str) -> Result<Export<T>, E> {
                Ok(Export(T::at(place.to_owned())))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, table: A) -> Result<Export<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(table)).map(Export)
            }
        }
        deserializer.deserialize_any(PlaceOrTable(PhantomData))
    }
}

/// A size or a place: a number needs no quotes.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Text {
    Number(u64),
    Text(String),
}

impl Text {
    fn into_string(self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text,
        }
    }
}

/// Reads a file that lies in `directory`.
///
/// # Errors
/// The first thing that is wrong, and the byte at which.
pub(super) fn parse(text: &str, directory: &Path) -> Result<Settings, At> {
    let parsed: Result<File, toml::de::Error> = toml::from_str(text);
    let file = parsed.map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        (at.min(text.len()), ConfigFault::Toml(Box::new(error)))
    })?;
    let here = |path: FilePath| directory.join(path.0);
    let nbd_tls = file.tls(directory)?;
    let control = file.control(directory)?;
    Ok(Settings {
        disks: each(file.disk, |asked| Ok(DiskSpec::try_from(asked)?.seen_from(directory)))?,
        keep_going: file.keep_going,
        vhost_user: each(file.vhost_user, |asked| {
            // An empty one stays empty, and is refused.
            let socket = Some(asked.socket).filter(|socket| !socket.is_empty());
            let socket =
                socket.map(|socket| directory.join(socket).display().to_string()).unwrap_or_default();
            Ok(VhostUserSpec::try_from(api::VhostUserSpec { socket, ..asked })?)
        })?,
        nbd: each(file.nbd, |Export(export)| Ok(NbdSpec::try_from(export)?.seen_from(directory)))?,
        fuse: each(file.fuse, |Export(export)| Ok(FuseSpec::try_from(export)?.seen_from(directory)))?,
        nbd_access: SocketAccess {
            owner: one(file.nbd_owner, |owner| Ok(parse_account(owner)?))?,
            group: one(file.nbd_group, |group| Ok(parse_account(group)?))?,
            mode: one(file.nbd_mode, |mode| Ok(parse_mode(&mode).map_err(SpecError::from)?))?,
        },
        nbd_tls,
        allow_backing: file.allow_backing.into_iter().map(here).collect(),
        metadata_cache_bytes: one(file.metadata_cache, |size| Ok(parse_size(&size.into_string())?))?,
        max_open_files: one(file.max_open_files, |files| {
            in_range("max-open-files", files, 16..u32::MAX, "at least 16")
        })?,
        workers: one(file.workers, |workers| in_range("workers", workers, 1..1025, "1 to 1024"))?,
        tier_cache_bytes: one(file.tier_cache, |size| Ok(parse_tier_cache(&size.into_string())?))?,
        tier_rate: rate("tier-rate", file.tier_rate)?,
        move_rate: rate("move-rate", file.move_rate)?,
        flush_log: file.flush_log.map(here),
        flush_log_bytes: one(file.flush_log_size, |size| Ok(parse_size(&size.into_string())?))?,
        runtime_dir: file.runtime_dir.map(here),
        control,
        audit: file.audit.map(here),
        log_format: file.log_format,
        metrics: one(file.metrics, |place| Ok(parse_metrics(&place.into_string())?))?,
    })
}

impl File {
    fn tls(&self, directory: &Path) -> Result<Option<TlsFiles>, At> {
        let path = |file: &Spanned<FilePath>| directory.join(&file.get_ref().0);
        match (&self.nbd_tls_cert, &self.nbd_tls_key, &self.nbd_tls_client_ca) {
            (Some(certificate), Some(key), client_ca) => Ok(Some(TlsFiles {
                certificate: path(certificate),
                key: path(key),
                client_ca: client_ca.as_ref().map(path),
            })),
            (None, None, None) => Ok(None),
            (certificate, key, client_ca) => {
                let odd = certificate.as_ref().or(key.as_ref()).or(client_ca.as_ref());
                Err((odd.map_or(0, |file| file.span().start), ConfigFault::HalfTls))
            }
        }
    }

    fn control(&self, directory: &Path) -> Result<Option<ControlPlace>, At> {
        match (&self.control, self.no_control) {
            (Some(path), true) => Err((path.span().start, ConfigFault::ControlTwice)),
            (Some(path), false) => Ok(Some(ControlPlace::At(directory.join(&path.get_ref().0)))),
            (None, true) => Ok(Some(ControlPlace::Off)),
            (None, false) => Ok(None),
        }
    }
}

/// Converts a value that knows where it stands.
fn one<T, U>(
    value: Option<Spanned<T>>,
    convert: impl FnOnce(T) -> Result<U, ConfigFault>,
) -> Result<Option<U>, At> {
    let Some(value) = value else { return Ok(None) };
    let at = value.span().start;
    convert(value.into_inner()).map(Some).map_err(|fault| (at, fault))
}

fn each<T, U>(
    values: Vec<Spanned<T>>,
    mut convert: impl FnMut(T) -> Result<U, ConfigFault>,
) -> Result<Vec<U>, At> {
    let converted = values.into_iter().map(|value| {
        let at = value.span().start;
        convert(value.into_inner()).map_err(|fault| (at, fault))
    });
    converted.collect()
}

fn rate(key: &'static str, value: Option<Spanned<Text>>) -> Result<Option<NonZeroU64>, At> {
    one(value, |rate| {
        parse_host_rate(&rate.into_string()).map_err(|error| ConfigFault::HostRate { key, error })
    })
}

fn in_range(
    key: &'static str,
    value: u32,
    range: Range<u32>,
    allowed: &'static str,
) -> Result<usize, ConfigFault> {
    if range.contains(&value) { Ok(value as usize) } else { Err(ConfigFault::Range { key, allowed, value }) }
}
