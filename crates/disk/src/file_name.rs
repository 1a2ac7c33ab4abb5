//! A file's name in JSON: text, or an array of its bytes where it is not UTF-8. For `#[serde(with)]`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Name {
    Text(String),
    Bytes(Vec<u8>),
}

/// For serde.
///
/// # Errors
/// The serializer's.
pub fn serialize<S: Serializer>(name: &OsStr, serializer: S) -> Result<S::Ok, S::Error> {
    match name.to_str() {
        Some(text) => text.serialize(serializer),
        None => name.as_bytes().serialize(serializer),
    }
}

/// For serde.
///
/// # Errors
/// What is no name; the deserializer's.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<OsString, D::Error> {
    Ok(match Name::deserialize(deserializer)? {
        Name::Text(text) => text.into(),
        Name::Bytes(bytes) => OsString::from_vec(bytes),
    })
}
