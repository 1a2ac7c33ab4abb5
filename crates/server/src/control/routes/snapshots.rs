//! `/v1/snapshots`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use vmstrata_api::{ChangedBy, RevertSpec, SnapshotReverted, SnapshotSpec, SnapshotTaken};

use super::{Segment, changing};
use crate::audit::What;
use crate::control::body::Body;
use crate::control::problem::Failure;
use crate::host::Host;

/// Take a snapshot of one disk, or of several at one instant
#[utoipa::path(
    post, path = "/v1/snapshots", tag = "disks", operation_id = "take_snapshot",
    request_body = SnapshotSpec,
    responses((status = CREATED, description = "It is taken, and on stable storage", body = SnapshotTaken))
)]
pub(in crate::control) async fn take(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): Body<SnapshotSpec>,
) -> Result<(StatusCode, Json<SnapshotTaken>), Failure> {
    let what = What::of("snapshot_create", asked.disks.clone()).object(&asked.name);
    let taken = changing(host, by, what, move |host, _| host.snapshot(asked)).await?;
    Ok((StatusCode::CREATED, Json(taken)))
}

/// Give up a snapshot of a tiered disk that is not published yet
#[utoipa::path(
    delete, path = "/v1/disks/{name}/snapshots/{snapshot}", tag = "disks", operation_id = "withdraw_snapshot",
    params(
        ("name" = String, Path, description = "The disk"),
        ("snapshot" = String, Path, description = "One of its `pending_snapshots`")
    ),
    responses((status = NO_CONTENT, description = "Its state gets no name"))
)]
pub(in crate::control) async fn withdraw(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment((name, snapshot)): Segment<(String, String)>,
) -> Result<StatusCode, Failure> {
    let what = What::of("snapshot_withdraw", [name.clone()]).object(&snapshot);
    changing(host, by, what, move |host, _| host.withdraw_snapshot(&name, &snapshot)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Let a disk be again what it was at a snapshot. No guest and no client may be using it
#[utoipa::path(
    post, path = "/v1/disks/{name}/revert", tag = "disks", operation_id = "revert_disk",
    params(("name" = String, Path, description = "The disk")),
    request_body = RevertSpec,
    responses((status = OK, description = "It is, behind the same exports", body = SnapshotReverted))
)]
pub(in crate::control) async fn revert(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    Body(asked): Body<RevertSpec>,
) -> Result<Json<SnapshotReverted>, Failure> {
    let what = What::of("snapshot_revert", [name.clone()]).object(&asked.snapshot);
    changing(host, by, what, move |host, _| host.revert(&name, asked)).await.map(Json)
}
