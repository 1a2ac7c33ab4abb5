//! `/v1/jobs`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::{Extension, Json};
use vmstrata_api::{ChangedBy, HostRate, JobChange, JobList, JobSpec, JobStatus};

use super::{Segment, apart, changing, number};
use crate::audit::What;
use crate::control::body::{Body, BodyOfNames};
use crate::control::problem::Failure;
use crate::host::Host;

/// Jobs under way, and the last ones that ended
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", operation_id = "list_jobs", responses((status = OK, description = "In the order in which they began", body = JobList)))]
pub(in crate::control) async fn list(State(host): State<Arc<Host>>) -> Json<JobList> {
    Json(JobList { jobs: host.jobs() })
}

/// Begin a job
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs", operation_id = "start_job",
    request_body = JobSpec,
    responses((status = CREATED, description = "It is under way", body = JobStatus))
)]
pub(in crate::control) async fn start(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): BodyOfNames<JobSpec>,
) -> Result<impl IntoResponse, Failure> {
    let begun = apart(host, move |host| host.start_job(asked, by)).await?;
    let location = format!("/v1/jobs/{}", begun.id);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(begun)))
}

/// One job
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs", operation_id = "show_job",
    params(("id" = u64, Path, description = "The job's number")),
    responses((status = OK, description = "The job", body = JobStatus))
)]
pub(in crate::control) async fn show(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
) -> Result<Json<JobStatus>, Failure> {
    let id = number(&id, "no-such-job")?;
    Ok(Json(host.job(id)?))
}

/// Pause, resume, cancel or slow a job; one that has ended stays as it is
#[utoipa::path(
    post, path = "/v1/jobs/{id}", tag = "jobs", operation_id = "change_job",
    params(("id" = u64, Path, description = "The job's number")),
    request_body = JobChange,
    responses((status = OK, description = "The job as it is now", body = JobStatus))
)]
pub(in crate::control) async fn change(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Segment(id): Segment,
    Body(change): Body<JobChange>,
) -> Result<Json<JobStatus>, Failure> {
    let id = number(&id, "no-such-job")?;
    let how = match change {
        JobChange::Pause {} => "pause".to_owned(),
        JobChange::Resume {} => "resume".to_owned(),
        JobChange::Cancel {} => "cancel".to_owned(),
        JobChange::Limit { bytes_per_second: None } => "no limit".to_owned(),
        JobChange::Limit { bytes_per_second: Some(bytes) } => format!("limit {bytes} bytes a second"),
    };
    let disk = host.job(id).ok().map(|job| job.disk);
    let what = What::of("job_change", disk).object(format!("job {id}: {how}"));
    changing(host, by, what, move |host, _| host.change_job(id, change)).await.map(Json)
}

/// How fast all moves together write
#[utoipa::path(get, path = "/v1/move/rate", tag = "jobs", operation_id = "show_move_rate", responses((status = OK, description = "The rate", body = HostRate)))]
pub(in crate::control) async fn move_rate(State(host): State<Arc<Host>>) -> Json<HostRate> {
    Json(host.move_rate())
}

/// Have all moves together write so fast, those that run, too, from now on and until the server ends
#[utoipa::path(
    put, path = "/v1/move/rate", tag = "jobs", operation_id = "set_move_rate",
    request_body = HostRate,
    responses((status = OK, description = "They do", body = HostRate))
)]
pub(in crate::control) async fn set_move_rate(
    State(host): State<Arc<Host>>,
    Extension(by): Extension<ChangedBy>,
    Body(asked): Body<HostRate>,
) -> Result<Json<HostRate>, Failure> {
    let what = What { bytes: asked.bytes_a_second, ..What::of("move_rate", []) };
    changing(host, by, what, move |host, _| host.set_move_rate(asked)).await.map(Json)
}
