//! What a request brings: JSON, bounded in bytes and time, checked strictly.

use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use hyper::body::Body as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::error::Category;

use super::problem::Failure;

/// Bytes of a body: nearly every request's is far shorter.
const BODY_BYTES_MAX: usize = 64 << 10;
/// Bytes of a body that names snapshots: as many as a chain can have, each as long as a name can be, fit.
const NAMES_BYTES_MAX: usize = 8 << 20;
/// Time to send it.
const BODY_PATIENCE: Duration = Duration::from_secs(10);

/// A request's body as a `T`, of at most `MAX` bytes.
pub(super) struct Body<T, const MAX: usize = BODY_BYTES_MAX>(pub(super) T);

/// One that may name all snapshots of a disk.
pub(super) type BodyOfNames<T> = Body<T, NAMES_BYTES_MAX>;

impl<S: Sync, T: DeserializeOwned + Serialize, const MAX: usize> FromRequest<S> for Body<T, MAX> {
    type Rejection = Failure;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Failure> {
        let body = request.into_body();
        // One that is announced to be too long is not waited for.
        if body.size_hint().lower() > MAX as u64 {
            return Err(too_long(MAX));
        }
        let received = to_bytes(body, MAX);
        let bytes = match tokio::time::timeout(BODY_PATIENCE, received).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) if is_too_long(&error) => return Err(too_long(MAX)),
            Ok(Err(error)) => return Err(Failure::new(400, "bad-request", error.to_string())),
            Err(_) => return Err(Failure::new(408, "too-slow", "the request's body did not arrive in time")),
        };
        parse(&bytes).map(Self).map_err(|error| match error.classify() {
            Category::Data => Failure::new(422, "invalid", error.to_string()),
            _ => Failure::new(400, "bad-json", error.to_string()),
        })
    }
}

/// serde takes a list of its fields for an object; the API does not.
fn parse<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> serde_json::Result<T> {
    let parsed = serde_json::from_slice(bytes)?;
    if has_list_for_object(&serde_json::from_slice(bytes)?, &serde_json::to_value(&parsed)?) {
        return Err(serde::de::Error::custom("a list in the place of an object"));
    }
    Ok(parsed)
}

fn has_list_for_object(given: &Value, meant: &Value) -> bool {
    match (given, meant) {
        (Value::Array(_), Value::Object(_)) => true,
        (Value::Array(given), Value::Array(meant)) => {
            given.iter().zip(meant).any(|(given, meant)| has_list_for_object(given, meant))
        }
        (Value::Object(given), Value::Object(meant)) => given.iter().any(|(key, given)| {
            // Options are known by their names with hyphens, too.
            let meant = meant.get(key).or_else(|| meant.get(&key.replace('-', "_")));
            meant.is_some_and(|meant| has_list_for_object(given, meant))
        }),
        _ => false,
    }
}

fn too_long(max: usize) -> Failure {
    Failure::new(413, "too-large", format!("this request has at most {max} bytes"))
}

fn is_too_long(error: &axum::Error) -> bool {
    std::error::Error::source(error).is_some_and(|cause| cause.is::<http_body_util::LengthLimitError>())
}

#[cfg(test)]
mod tests {
    use vmstrata_api::{DiskLimits, SizeSpec};

    use super::*;

    #[test]
    fn a_list_is_no_object() {
        assert!(parse::<SizeSpec>(b"[4096, true]").is_err());
        assert!(parse::<DiskLimits>(b"[null, null]").is_err());
        assert!(parse::<DiskLimits>(br#"{"iops_read": [5]}"#).is_err());
        assert!(parse::<DiskLimits>(br#"{"iops-read": [5]}"#).is_err());
        assert!(parse::<DiskLimits>(br#"{"iops_read": {"rate": 5}}"#).is_ok());
    }
}
