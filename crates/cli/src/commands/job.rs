//! `vmstrata job`: long work of a running server.

use std::process::ExitCode;

use anyhow::Result;
use vmstrata_api::{HostRate, JobChange, JobList, JobSpec, JobState, JobStatus};

use crate::args::{JobArgs, JobCommand};
use crate::client::Client;
use crate::commands::named::name_of;
use crate::output::{Table, answer, percent};
use crate::units::short_size;

/// Lists jobs, begins one or changes one.
///
/// # Errors
/// When no server answers, or it refuses.
pub fn run(args: &JobArgs) -> Result<ExitCode> {
    let client = Client::new(&args.server)?;
    let change = |id: u64, change| client.post::<JobStatus>(&format!("/v1/jobs/{id}"), &change);
    let job = match &args.command {
        JobCommand::List => {
            let list: JobList = client.get("/v1/jobs")?;
            answer(args.json, &list, || to_text(&list.jobs))?;
            return Ok(ExitCode::SUCCESS);
        }
        JobCommand::MoveRate { rate } => {
            let rate: HostRate = match rate {
                Some(rate) => client.put("/v1/move/rate", rate)?,
                None => client.get("/v1/move/rate")?,
            };
            answer(args.json, &rate, || match rate.bytes_a_second {
                Some(bytes) => format!("moves write {} a second together\n", short_size(bytes)),
                None => "moves write without limit\n".to_owned(),
            })?;
            return Ok(ExitCode::SUCCESS);
        }
        JobCommand::IndexBuild { disk, limit } => {
            let asked = JobSpec::IndexBuild { disk: name_of(disk, &client)?, bytes_per_second: *limit };
            client.post("/v1/jobs", &asked)?
        }
        JobCommand::SnapshotDelete { disk, snapshots, keep_files, direction, how } => client
            .post("/v1/jobs", &how.delete(&name_of(disk, &client)?, snapshots, *keep_files, *direction))?,
        JobCommand::Merge { disk, layers, yes, remove, direction, how } => client
            .post("/v1/jobs", &how.merge(&name_of(disk, &client)?, layers, *yes, *remove, *direction)?)?,
        JobCommand::Flatten { disk, onto, yes, remove, how } => client
            .post("/v1/jobs", &how.flatten(&name_of(disk, &client)?, onto.as_deref(), *yes, *remove)?)?,
        JobCommand::Pause { id } => change(*id, JobChange::Pause {})?,
        JobCommand::Resume { id } => change(*id, JobChange::Resume {})?,
        JobCommand::Cancel { id } => change(*id, JobChange::Cancel {})?,
        JobCommand::Limit { id, limit } => change(*id, JobChange::Limit { bytes_per_second: *limit })?,
    };
    answer(args.json, &job, || to_text(std::slice::from_ref(&job)))?;
    Ok(ExitCode::SUCCESS)
}

fn to_text(jobs: &[JobStatus]) -> String {
    let mut table = Table::new([
        ">JOB", "KIND", "DISK", "STATE", ">DONE", ">LEFT", ">WRITTEN", ">RATE", ">FREED", ">LIMIT", "ERROR",
    ]);
    jobs.iter().for_each(|job| table.row(row(job)));
    table.to_string()
}

fn row(job: &JobStatus) -> [String; 11] {
    let limit = job.bytes_per_second.map(|limit| format!("{}/s", short_size(limit)));
    let errors = match (&job.error, job.failures) {
        (Some(error), more @ 2..) => format!("{error} (and {} more)", more - 1),
        (error, _) => error.clone().unwrap_or_default(),
    };
    [
        job.id.to_string(),
        job.kind.replace('_', "-"),
        job.disk.clone(),
        state(job.state).to_owned(),
        format!("{} of {} {} ({:.0} %)", job.done, job.total, job.unit, percent(job.done, job.total)),
        job.seconds_left.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds} s")),
        short_size(job.bytes),
        format!("{}/s", short_size(job.bytes / job.seconds.max(1))),
        job.removed.map_or_else(|| "-".to_owned(), |removed| short_size(removed.freed_bytes)),
        limit.unwrap_or_else(|| "-".to_owned()),
        errors,
    ]
}

fn state(state: JobState) -> &'static str {
    match state {
        JobState::Running => "running",
        JobState::Paused => "paused",
        JobState::Cancelling => "cancelling",
        JobState::Done => "done",
        JobState::Cancelled => "cancelled",
        JobState::Failed => "failed",
    }
}
