//! `/v1/disks/{name}/tier/...`: a tiered disk goes from one host to another.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use vmstrata_api::{ChangedBy, TakeOver, TierStatus};

use super::{Segment, changing};
use crate::audit::What;
use crate::control::body::Body;
use crate::control::problem::Failure;
use crate::host::Host;

/// Have a disk that stands by stand on what its host has published until now, so that taking it over is quick
#[utoipa::path(
    post, path = "/v1/disks/{name}/tier/follow", tag = "disks", operation_id = "follow_tier",
    params(("name" = String, Path, description = "The disk")),
    responses((status = OK, description = "It stands on the head that this names", body = TierStatus))
)]
pub(in crate::control) async fn follow(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
) -> Result<Json<TierStatus>, Failure> {
    let what = What::of("tier_follow", [name.clone()]);
    changing(host, by, what, move |host, _| host.follow_tier(&name)).await.map(Json)
}

/// Publish all of a tiered disk, have its requests wait, and let another host take it over from the head that is named
#[utoipa::path(
    post, path = "/v1/disks/{name}/tier/hand-over", tag = "disks", operation_id = "hand_tier_over",
    params(("name" = String, Path, description = "The disk")),
    responses((status = OK, description = "It is handed over", body = TierStatus))
)]
pub(in crate::control) async fn hand_over(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
) -> Result<Json<TierStatus>, Failure> {
    let what = What::of("tier_hand_over", [name.clone()]);
    changing(host, by, what, move |host, _| host.hand_tier_over(&name)).await.map(Json)
}

/// Go on with a disk that was handed over, unless another host has taken it over
#[utoipa::path(
    delete, path = "/v1/disks/{name}/tier/hand-over", tag = "disks", operation_id = "take_tier_back",
    params(("name" = String, Path, description = "The disk")),
    responses((status = OK, description = "This host publishes it, and requests go on", body = TierStatus))
)]
pub(in crate::control) async fn take_back(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
) -> Result<Json<TierStatus>, Failure> {
    let what = What::of("tier_take_back", [name.clone()]);
    changing(host, by, what, move |host, _| host.take_tier_back(&name)).await.map(Json)
}

/// Take over a disk that stands by; its requests go on
#[utoipa::path(
    post, path = "/v1/disks/{name}/tier/take-over", tag = "disks", operation_id = "take_tier_over",
    params(("name" = String, Path, description = "The disk")),
    request_body = TakeOver,
    responses((status = OK, description = "This host publishes it from now on", body = TierStatus))
)]
pub(in crate::control) async fn take_over(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(name): Segment,
    Body(asked): Body<TakeOver>,
) -> Result<Json<TierStatus>, Failure> {
    let what = What::of("tier_take_over", [name.clone()]).object(asked.head.clone().unwrap_or_default());
    changing(host, by, what, move |host, _| host.take_tier_over(&name, &asked)).await.map(Json)
}
