//! JSON with its checksum, as heads and pins are written: the first line is the value, the second the BLAKE3 of the first with
//! its line feed, in hexadecimal.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A BLAKE3 in hexadecimal and a line feed.
pub(crate) const SUM_LEN: usize = 65;

pub(crate) fn seal(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).expect("plain data");
    bytes.push(b'\n');
    let sum = blake3::hash(&bytes);
    bytes.extend(format!("{sum}\n").bytes());
    bytes
}

/// What [`seal`] made.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn unseal<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let text = bytes.len().checked_sub(SUM_LEN).map(|len| &bytes[..len]).ok_or("it is too short")?;
    if bytes[text.len()..] != *format!("{}\n", blake3::hash(text)).as_bytes() {
        return Err("its checksum is wrong".to_owned());
    }
    serde_json::from_slice(text).map_err(|error| error.to_string())
}
