//! `vmstrata replica`: what this host keeps of layers in repositories.

use std::process::ExitCode;
use std::slice;

use anyhow::{Result, bail};
use vmstrata_api::{
    JobSpec, JobStatus, Replica, ReplicaDropped, ReplicaLayer, ReplicaList, ReplicaPin, encode_segment,
};
use vmstrata_server::spec::shown_format;

use super::snapshot::live::Live;
use super::tier::served;
use crate::args::{
    ReplicaArgs, ReplicaCommand, ReplicaDropArgs, ReplicaFillArgs, ReplicaListArgs, ReplicaScrubArgs,
    TierDiskArgs,
};
use crate::attach::absolute;
use crate::client::Client;
use crate::disk_spec::format_by_name;
use crate::output::{Table, answer, percent};
use crate::units::short_size;

/// Runs the command.
///
/// # Errors
/// What could not be done.
pub fn run(args: &ReplicaArgs) -> Result<ExitCode> {
    match &args.command {
        ReplicaCommand::List(args) => list(args)?,
        ReplicaCommand::Fill(args) => fill(args)?,
        ReplicaCommand::Pin(args) => pin(args, true)?,
        ReplicaCommand::Unpin(args) => pin(args, false)?,
        ReplicaCommand::Scrub(args) => scrub(args)?,
        ReplicaCommand::Drop(args) => give_up(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn path_of(live: &Live) -> String {
    format!("/v1/disks/{}/replica", encode_segment(live.name()))
}

fn list(args: &ReplicaListArgs) -> Result<()> {
    let mut all: ReplicaList = Client::new(&args.server)?.get("/v1/replicas")?;
    if let Some(disk) = &args.disk {
        all.replicas.retain(|replica| replica.disk == *disk);
        if all.replicas.is_empty() {
            bail!(
                "disk '{disk}' has no layers in a repository that are read through a cache (its key replica=DIR)"
            );
        }
    }
    answer(args.json, &all, || table(&all.replicas))
}

fn table(replicas: &[Replica]) -> String {
    if replicas.is_empty() {
        return "no disk has layers in a repository that are read through a cache\n".to_owned();
    }
    let mut table = Table::new(["DISK", "LAYER", ">SIZE", ">HERE", "", "REPOSITORY"]);
    for replica in replicas {
        for layer in &replica.layers {
            let ReplicaLayer { id, repository, bytes, kept_bytes, pinned, .. } = layer;
            table.row([
                replica.disk.clone(),
                id.clone(),
                short_size(*bytes),
                format!("{:.0} %", percent(*kept_bytes, *bytes)),
                if *pinned { "pinned".to_owned() } else { String::new() },
                repository.clone(),
            ]);
        }
    }
    table.fitted(usize::MAX, &[])
}

fn fill(args: &ReplicaFillArgs) -> Result<()> {
    let live = served(&args.disk)?;
    let asked = JobSpec::ReplicaFill {
        disk: live.name().to_owned(),
        bytes_per_second: args.limit,
        hours: args.hours.clone(),
        from: args.from.as_deref().map(absolute),
        format: args
            .from
            .as_deref()
            .map(|from| shown_format(args.format.unwrap_or_else(|| format_by_name(from)))),
    };
    let job = live.wait_job(&asked, args.disk.json)?;
    let local = match (&args.from, job.local_bytes) {
        (Some(from), Some(bytes)) => format!(", {} taken from {}", short_size(bytes), from.display()),
        _ => String::new(),
    };
    report(&args.disk, &job, |bytes| {
        format!("all of its layers are here, {bytes} of them fetched now{local}")
    })
}

fn scrub(args: &ReplicaScrubArgs) -> Result<()> {
    let live = served(&args.disk)?;
    let asked = JobSpec::ReplicaScrub { disk: live.name().to_owned(), bytes_per_second: args.limit };
    let job = live.wait_job(&asked, args.disk.json)?;
    report(&args.disk, &job, |bytes| format!("{bytes} are what was published"))
}

fn report(args: &TierDiskArgs, job: &JobStatus, said: impl FnOnce(String) -> String) -> Result<()> {
    answer(args.json, job, || format!("{}: {}\n", job.disk, said(short_size(job.bytes))))
}

fn pin(args: &TierDiskArgs, pinned: bool) -> Result<()> {
    let live = served(args)?;
    let replica: Replica = live.client().put(&path_of(&live), &ReplicaPin { pinned })?;
    answer(args.json, &replica, || table(slice::from_ref(&replica)))
}

fn give_up(args: &ReplicaDropArgs) -> Result<()> {
    let live = served(&args.disk)?;
    if !args.yes {
        let all: ReplicaList = live.client().get("/v1/replicas")?;
        let own = all.replicas.iter().filter(|replica| replica.disk == live.name());
        let bytes = own.flat_map(|replica| &replica.layers).map(|layer| layer.kept_bytes).sum();
        bail!(
            "{}: {} would be read from the repository again, by all disks with these layers: add --yes",
            live.name(),
            short_size(bytes)
        );
    }
    let dropped: ReplicaDropped = live.client().take_away(&path_of(&live))?;
    answer(args.disk.json, &dropped, || format!("{}: {} given up\n", live.name(), short_size(dropped.bytes)))
}
