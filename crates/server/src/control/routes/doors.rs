//! `/v1/doors`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::{Extension, Json};
use vmstrata_api::{ChangedBy, DoorList, DoorSpec, DoorStatus};

use super::{Removal, Segment, changing, number};
use crate::audit::What;
use crate::control::body::Body;
use crate::control::problem::Failure;
use crate::error::Error;
use crate::host::Host;

/// All doors
#[utoipa::path(get, path = "/v1/doors", tag = "doors", operation_id = "list_doors", responses((status = OK, description = "In the order in which they were added", body = DoorList)))]
pub(in crate::control) async fn list(State(host): State<Arc<Host>>) -> Json<DoorList> {
    Json(DoorList { doors: host.doors() })
}

/// Open a door
#[utoipa::path(
    post, path = "/v1/doors", tag = "doors", operation_id = "add_door",
    request_body = DoorSpec,
    responses((status = CREATED, description = "It is open", body = DoorStatus))
)]
pub(in crate::control) async fn add(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): Body<DoorSpec>,
) -> Result<impl IntoResponse, Failure> {
    let what = about("door_add", &asked);
    let added = changing(host, by, what, move |host, _| add_door(host, asked)).await?;
    let location = format!("/v1/doors/{}", added.id);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(added)))
}

/// One door
#[utoipa::path(
    get, path = "/v1/doors/{id}", tag = "doors", operation_id = "show_door",
    params(("id" = u64, Path, description = "The door's number")),
    responses((status = OK, description = "As it is now", body = DoorStatus))
)]
pub(in crate::control) async fn show(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
) -> Result<Json<DoorStatus>, Failure> {
    let id = number(&id, "no-such-door")?;
    Ok(Json(host.door(id)?))
}

/// The place of a door, and the disk that it is for.
fn about(change: &'static str, door: &DoorSpec) -> What {
    match door {
        DoorSpec::VhostUser(spec) => What::of(change, [spec.disk.clone()]).object(&spec.socket),
        DoorSpec::Nbd(spec) => What::of(change, []).object(&spec.address),
    }
}

fn add_door(host: &Host, asked: DoorSpec) -> Result<DoorStatus, Error> {
    // Someone may have closed it again already.
    host.door(host.add_door_by_hand(asked)?)
}

/// Close a door: requests in flight are finished, its clients are let go, its disks stay
#[utoipa::path(
    delete, path = "/v1/doors/{id}", tag = "doors", operation_id = "remove_door",
    params(
        ("id" = u64, Path, description = "The door's number"),
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
    let id = number(&id, "no-such-door")?;
    let what = about("door_remove", &host.door(id)?.door);
    changing(host, by, what, move |host, _| host.remove_door(id, how.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}
