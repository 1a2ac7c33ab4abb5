//! The handlers, a module for each noun of the paths.

pub(super) mod disks;
pub(super) mod events;
pub(super) mod exports;
pub(super) mod jobs;
pub(super) mod metrics;
pub(super) mod snapshots;
pub(super) mod standby;
pub(super) mod status;

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use vmstrata_api::ChangedBy;

use super::problem::Failure;
use crate::audit::What;
use crate::error::Error;
use crate::host::Host;

/// Does what may wait on a thread of its own. It goes on to its end when the client goes away.
async fn apart<T: Send + 'static>(
    host: Arc<Host>,
    work: impl FnOnce(&Host) -> Result<T, Error> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(move || work(&host)).await {
        Ok(result) => result.map_err(Failure::from),
        Err(error) => {
            Err(Failure::new(500, "internal", format!("the server failed in carrying this out: {error}")))
        }
    }
}

/// As [`apart`], for a change, which the audit records.
async fn changing<T: Send + 'static>(
    host: Arc<Host>,
    by: ChangedBy,
    what: What,
    work: impl FnOnce(&Host, &mut What) -> Result<T, Error> + Send + 'static,
) -> Result<T, Failure> {
    apart(host, move |host| host.audit.change(by, what, |what| work(host, what))).await
}

/// The name or number in a path, or several.
pub(in crate::control) struct Segment<T = String>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segment<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(segment)) => Ok(Self(segment)),
            Err(rejected) => Err(Failure::new(422, "invalid", rejected.body_text())),
        }
    }
}

/// How something is removed: what `?force=true` says.
pub(in crate::control) struct Removal {
    force: bool,
}

impl<S: Sync> FromRequestParts<S> for Removal {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Failure> {
        match parts.uri.query() {
            None | Some("" | "force=false") => Ok(Self { force: false }),
            Some("force=true") => Ok(Self { force: true }),
            Some(other) => {
                let detail = format!("?{other} is not understood: ?force=true and ?force=false are");
                Err(Failure::new(422, "invalid", detail))
            }
        }
    }
}

/// A number in a path; what is none names nothing.
fn number(text: &str, kind: &str) -> Result<u64, Failure> {
    text.parse().map_err(|_| Failure::new(404, kind, format!("'{text}' is no number")))
}
