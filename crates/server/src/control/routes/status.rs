//! `/v1/status` and `/v1/openapi.json`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use vmstrata_api::{ChangedBy, ServerStatus, StatsList};

use super::{apart, changing};
use crate::audit::What;
use crate::control::problem::Failure;
use crate::host::Host;

/// The server, its disks and its exports
#[utoipa::path(get, path = "/v1/status", tag = "server", responses((status = OK, description = "All of it", body = ServerStatus)))]
pub(in crate::control) async fn status(State(host): State<Arc<Host>>) -> Result<Json<ServerStatus>, Failure> {
    apart(host, |host| Ok(host.status())).await.map(Json)
}

/// What was done to every disk
#[utoipa::path(get, path = "/v1/stats", tag = "server", operation_id = "stats", responses((status = OK, description = "Numbers that only grow", body = StatsList)))]
pub(in crate::control) async fn stats(State(host): State<Arc<Host>>) -> Result<Json<StatsList>, Failure> {
    apart(host, |host| Ok(host.stats())).await.map(Json)
}

/// End the server as SIGTERM does: exports are drained, images closed clean
#[utoipa::path(post, path = "/v1/shutdown", tag = "server", operation_id = "shutdown", responses((status = ACCEPTED, description = "It is ending; its control socket goes last")))]
pub(in crate::control) async fn shutdown(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
) -> Result<StatusCode, Failure> {
    changing(host, by, What::of("shutdown", []), |_, _| crate::shutdown::ask()).await?;
    Ok(StatusCode::ACCEPTED)
}

/// This document
#[utoipa::path(get, path = "/v1/openapi.json", tag = "server", responses((status = OK, description = "OpenAPI 3.1", body = Object)))]
pub(in crate::control) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::control::openapi())
}
