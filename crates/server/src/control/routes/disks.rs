//! `/v1/disks`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::{Extension, Json};
use vmstrata_api::{
    ChangedBy, DiskDetail, DiskLimits, DiskList, DiskSpec, HostRate, Replica, ReplicaDropped, ReplicaList,
    ReplicaPin, SizeChange, SizeSpec, TierHold, TierStatus,
};
use vmstrata_types::path_to_text;

use super::{Removal, Segment, apart, changing};
use crate::audit::What;
use crate::control::body::Body;
use crate::control::problem::Failure;
use crate::error::Error;
use crate::host::Host;
use crate::spec;

/// All disks
#[utoipa::path(get, path = "/v1/disks", tag = "disks", operation_id = "list_disks", responses((status = OK, description = "In the order in which they were added", body = DiskList)))]
pub(in crate::control) async fn list(State(host): State<Arc<Host>>) -> Result<Json<DiskList>, Failure> {
    apart(host, |host| Ok(DiskList { disks: host.disks() })).await.map(Json)
}

/// One disk, with its chain and its exports
#[utoipa::path(
    get, path = "/v1/disks/{name}", tag = "disks", operation_id = "show_disk",
    params(("name" = String, Path, description = "The disk")),
    responses((status = OK, description = "The disk", body = DiskDetail))
)]
pub(in crate::control) async fn show(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
) -> Result<Json<DiskDetail>, Failure> {
    apart(host, move |host| host.disk(&name)).await.map(Json)
}

/// Open a disk; every NBD export serves it from then on
#[utoipa::path(
    post, path = "/v1/disks", tag = "disks", operation_id = "add_disk",
    request_body = DiskSpec,
    responses((status = CREATED, description = "It is served", body = DiskDetail))
)]
pub(in crate::control) async fn add(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): Body<DiskSpec>,
) -> Result<impl IntoResponse, Failure> {
    let asked = spec::DiskSpec::try_from(asked).map_err(Error::from)?;
    let what = What::of("disk_add", [asked.name.clone()]).object(path_to_text(&asked.path));
    let add = move |host: &Host, _: &mut What| {
        let name = asked.name.clone();
        host.add_disk(asked)?;
        host.disk(&name)
    };
    let added = changing(host, by, what, add).await?;
    let location = format!("/v1/disks/{}", vmstrata_api::encode_segment(&added.disk.name));
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(added)))
}

/// Give a disk another size; its guests are told
#[utoipa::path(
    put, path = "/v1/disks/{name}/size", tag = "disks", operation_id = "resize_disk",
    params(("name" = String, Path, description = "The disk")),
    request_body = SizeSpec,
    responses((status = OK, description = "It has that size, on stable storage", body = SizeChange))
)]
pub(in crate::control) async fn resize(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    Body(asked): Body<SizeSpec>,
) -> Result<Json<SizeChange>, Failure> {
    let what = What { bytes: Some(asked.size_bytes), ..What::of("disk_resize", [name.clone()]) };
    changing(host, by, what, move |host, _| host.resize(&name, &asked)).await.map(Json)
}

/// Give a disk other limits; without any, requests that wait for them go on at once
#[utoipa::path(
    put, path = "/v1/disks/{name}/limits", tag = "disks", operation_id = "limit_disk",
    params(("name" = String, Path, description = "The disk")),
    request_body = DiskLimits,
    responses((status = OK, description = "It has these limits, and no others", body = DiskLimits))
)]
pub(in crate::control) async fn limit(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    Body(asked): Body<DiskLimits>,
) -> Result<Json<DiskLimits>, Failure> {
    let what = What::of("disk_limit", [name.clone()]).object(asked.to_string());
    changing(host, by, what, move |host, _| host.limit(&name, &asked)).await.map(Json)
}

/// Cut a tiered disk now, and wait until that is published, and `path` leads to it
#[utoipa::path(
    post, path = "/v1/disks/{name}/tier/sync", tag = "disks", operation_id = "sync_tier",
    params(("name" = String, Path, description = "The disk")),
    responses((status = OK, description = "All that was written before is published", body = TierStatus))
)]
pub(in crate::control) async fn sync_tier(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
) -> Result<Json<TierStatus>, Failure> {
    let what = What::of("tier_sync", [name.clone()]);
    changing(host, by, what, move |host, _| host.sync_tier(&name)).await.map(Json)
}

/// Hold what a tiered disk's guests write on this host, and publish nothing meanwhile; a restart of the server ends that
#[utoipa::path(
    put, path = "/v1/disks/{name}/tier/hold", tag = "disks", operation_id = "hold_tier",
    params(("name" = String, Path, description = "The disk")),
    request_body = TierHold,
    responses((status = OK, description = "It is held, or is not any more", body = TierStatus))
)]
pub(in crate::control) async fn hold_tier(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    Body(asked): Body<TierHold>,
) -> Result<Json<TierStatus>, Failure> {
    let what = What::of("tier_hold", [name.clone()]).object(format!("{} s", asked.seconds));
    changing(host, by, what, move |host, _| host.hold_tier(&name, asked)).await.map(Json)
}

/// The host's copies of layers in repositories, by disk
#[utoipa::path(get, path = "/v1/replicas", tag = "disks", operation_id = "list_replicas", responses((status = OK, description = "Layer by layer", body = ReplicaList)))]
pub(in crate::control) async fn replicas(
    State(host): State<Arc<Host>>,
) -> Result<Json<ReplicaList>, Failure> {
    apart(host, |host| host.replicas()).await.map(Json)
}

/// Keep what comes of a disk's layers in repositories on this host, or let it go when others need the room
#[utoipa::path(
    put, path = "/v1/disks/{name}/replica", tag = "disks", operation_id = "pin_replica",
    params(("name" = String, Path, description = "The disk")),
    request_body = ReplicaPin,
    responses((status = OK, description = "It stays, or may go", body = Replica))
)]
pub(in crate::control) async fn pin_replica(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    Body(asked): Body<ReplicaPin>,
) -> Result<Json<Replica>, Failure> {
    let what =
        What::of("replica_pin", [name.clone()]).object(if asked.pinned { "pinned" } else { "not pinned" });
    changing(host, by, what, move |host, _| host.pin_replica(&name, asked)).await.map(Json)
}

/// Give up what this host keeps of a disk's layers in repositories
#[utoipa::path(
    delete, path = "/v1/disks/{name}/replica", tag = "disks", operation_id = "drop_replica",
    params(("name" = String, Path, description = "The disk")),
    responses((status = OK, description = "It is read from the repository again", body = ReplicaDropped))
)]
pub(in crate::control) async fn drop_replica(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
) -> Result<Json<ReplicaDropped>, Failure> {
    let what = What::of("replica_drop", [name.clone()]);
    changing(host, by, what, move |host, _| host.drop_replica(&name)).await.map(Json)
}

/// How fast all tiered disks together ship what they publish
#[utoipa::path(get, path = "/v1/tier/rate", tag = "disks", operation_id = "show_tier_rate", responses((status = OK, description = "The rate", body = HostRate)))]
pub(in crate::control) async fn tier_rate(State(host): State<Arc<Host>>) -> Result<Json<HostRate>, Failure> {
    apart(host, |host| Ok(host.tier_rate())).await.map(Json)
}

/// Have all tiered disks together ship so fast, from now on and until the server ends
#[utoipa::path(
    put, path = "/v1/tier/rate", tag = "disks", operation_id = "set_tier_rate",
    request_body = HostRate,
    responses((status = OK, description = "They do", body = HostRate))
)]
pub(in crate::control) async fn set_tier_rate(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): Body<HostRate>,
) -> Result<Json<HostRate>, Failure> {
    let what = What { bytes: asked.bytes_a_second, ..What::of("tier_rate", []) };
    changing(host, by, what, move |host, _| host.set_tier_rate(asked)).await.map(Json)
}

/// Close a disk: its exports are drained, its image is left clean, its files are unlocked
#[utoipa::path(
    delete, path = "/v1/disks/{name}", tag = "disks", operation_id = "remove_disk",
    params(
        ("name" = String, Path, description = "The disk"),
        ("force" = Option<bool>, Query, description = "Also from under a guest that is attached")
    ),
    responses((status = NO_CONTENT, description = "It is gone"))
)]
pub(in crate::control) async fn remove(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    how: Removal,
) -> Result<StatusCode, Failure> {
    let what = What::of("disk_remove", [name.clone()]);
    changing(host, by, what, move |host, _| host.remove_disk(&name, how.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}
