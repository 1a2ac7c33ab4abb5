//! `/v1/exports`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::{Extension, Json};
use vmstrata_api::{ChangedBy, ExportList, ExportSpec, ExportStatus};

use super::{Removal, Segment, changing, number};
use crate::audit::What;
use crate::control::body::Body;
use crate::control::problem::Failure;
use crate::error::Error;
use crate::host::Host;

/// All exports
#[utoipa::path(get, path = "/v1/exports", tag = "exports", operation_id = "list_exports", responses((status = OK, description = "In the order in which they were added", body = ExportList)))]
pub(in crate::control) async fn list(State(host): State<Arc<Host>>) -> Json<ExportList> {
    Json(ExportList { exports: host.exports() })
}

/// Open an export
#[utoipa::path(
    post, path = "/v1/exports", tag = "exports", operation_id = "add_export",
    request_body = ExportSpec,
    responses((status = CREATED, description = "It is open", body = ExportStatus))
)]
pub(in crate::control) async fn add(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): Body<ExportSpec>,
) -> Result<impl IntoResponse, Failure> {
    let what = about("export_add", &asked);
    let added = changing(host, by, what, move |host, _| add_export(host, asked)).await?;
    let location = format!("/v1/exports/{}", added.id);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(added)))
}

/// One export
#[utoipa::path(
    get, path = "/v1/exports/{id}", tag = "exports", operation_id = "show_export",
    params(("id" = u64, Path, description = "The export's number")),
    responses((status = OK, description = "As it is now", body = ExportStatus))
)]
pub(in crate::control) async fn show(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
) -> Result<Json<ExportStatus>, Failure> {
    let id = number(&id, "no-such-export")?;
    Ok(Json(host.export(id)?))
}

/// The place of an export, and the disk that it is for.
fn about(change: &'static str, export: &ExportSpec) -> What {
    let disk = match export {
        ExportSpec::VhostUser(spec) => Some(spec.disk.clone()),
        ExportSpec::Nbd(_) | ExportSpec::Fuse(_) => None,
    };
    What::of(change, disk).object(export.place())
}

fn add_export(host: &Host, asked: ExportSpec) -> Result<ExportStatus, Error> {
    // Someone may have closed it again already.
    host.export(host.add_export(asked)?)
}

/// Close an export: requests in flight are finished, its clients are let go, its disks stay
#[utoipa::path(
    delete, path = "/v1/exports/{id}", tag = "exports", operation_id = "remove_export",
    params(
        ("id" = u64, Path, description = "The export's number"),
        ("force" = Option<bool>, Query, description = "Also from under a guest that is attached")
    ),
    responses((status = NO_CONTENT, description = "It is gone"))
)]
pub(in crate::control) async fn remove(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(id): Segment,
    how: Removal,
) -> Result<StatusCode, Failure> {
    let id = number(&id, "no-such-export")?;
    let what = about("export_remove", &host.export(id)?.export);
    changing(host, by, what, move |host, _| host.remove_export(id, how.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}
