//! `vmstrata disk`: disks of a running server come and go, are shown and limited.

mod show;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use vmstrata_api::{DiskDetail, DiskLimits, DiskList, DiskRole, DiskSpec, encode_segment};
use vmstrata_types::path_from_text;

use crate::args::{DiskArgs, DiskCommand};
use crate::attach::absolute;
use crate::client::Client;
use crate::commands::named::name_of;
use crate::commands::serve::attachments;
use crate::output::{counted, print, print_json};
use crate::units::short_size;

/// Shows, adds, limits or removes a disk.
///
/// # Errors
/// When no server answers, or it refuses.
pub fn run(args: &DiskArgs) -> Result<ExitCode> {
    match &args.command {
        DiskCommand::Show { name, server, json } => {
            let client = Client::new(server)?;
            let name = name_of(name, &client)?;
            let shown: DiskDetail = client.get(&format!("/v1/disks/{}", encode_segment(&name)))?;
            if *json {
                print_json(&shown)?;
            } else {
                print(&show::to_text(&shown, number(&client, &shown)?))?;
            }
        }
        DiskCommand::Add { spec, server, json } => {
            let client = Client::new(server)?;
            let added = add(&client, spec)?;
            if *json { print_json(&added)? } else { print(&to_text(&added, number(&client, &added)?))? }
        }
        DiskCommand::Limit { name, limits, server, json } => {
            let path = format!("/v1/disks/{}/limits", encode_segment(name));
            let limits: DiskLimits = Client::new(server)?.put(&path, limits)?;
            if *json {
                print_json(&limits)?;
            }
        }
        DiskCommand::Remove { name, force, yes, server, json } => {
            let client = Client::new(server)?;
            let path = format!("/v1/disks/{}", encode_segment(&name_of(name, &client)?));
            // What it was: afterwards nobody knows.
            let was: DiskDetail = client.get(&path)?;
            ensure!(
                *yes || was.disk.role != DiskRole::Local,
                "{} goes with the disk, which is local to this host: say --yes",
                was.disk.path
            );
            client.delete(&format!("{path}?force={force}"))?;
            if *json {
                print_json(&was.disk)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The server may have been started elsewhere: what is relative here must not be relative there.
fn add(client: &Client, spec: &DiskSpec) -> Result<DiskDetail> {
    let here = |path: &String| absolute(&path_from_text(path));
    let spec = DiskSpec {
        path: here(&spec.path),
        clone: spec.clone.as_ref().map(here),
        agent: spec.agent.as_ref().map(here),
        tier: spec.tier.as_ref().map(here),
        backing: spec.backing.as_ref().map(|paths| paths.iter().map(here).collect()),
        ..spec.clone()
    };
    client.post("/v1/disks", &spec)
}

/// The place of a disk in the server's list, from 0.
fn number(client: &Client, disk: &DiskDetail) -> Result<usize> {
    let disks = client.get::<DiskList>("/v1/disks")?.disks;
    Ok(disks.iter().position(|other| other.name == disk.disk.name).unwrap_or_default())
}

fn to_text(added: &DiskDetail, number: usize) -> String {
    let disk = &added.disk;
    let layers = counted(disk.layers.unwrap_or_default(), "layer");
    let size = short_size(disk.size_bytes.unwrap_or_default());
    let attach = attachments(&disk.name, number, &added.exports);
    let hint = if added.exports.is_empty() {
        format!("  no export leads to it: vmstrata export add --vhost-user {}=/path.sock\n", disk.name)
    } else {
        String::new()
    };
    format!("{}: {size}, {layers}, {}\n{attach}{hint}", disk.name, disk.path)
}
