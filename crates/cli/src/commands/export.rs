//! `vmstrata export`: exports of a running server come and go.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use vmstrata_api::{DiskList, ExportList, ExportSpec, ExportStatus, FuseSpec, NbdSpec, VhostUserSpec};
use vmstrata_export::nbd::Address;

use crate::args::{ExportArgs, ExportCommand, NewExport};
use crate::attach::absolute;
use crate::client::Client;
use crate::commands::serve::attachments;
use crate::output::{print, print_json};

/// Adds or removes an export.
///
/// # Errors
/// When no server answers, or it refuses.
pub fn run(args: &ExportArgs) -> Result<ExitCode> {
    match &args.command {
        ExportCommand::Add { export, server, json } => {
            let client = Client::new(server)?;
            let added: ExportStatus = client.post("/v1/exports", &asked(export)?)?;
            if *json { print_json(&added)? } else { print(&to_text(&client, &added)?)? }
        }
        ExportCommand::Remove { export, force, server, json } => {
            let client = Client::new(server)?;
            let exports: ExportList = client.get("/v1/exports")?;
            let meant = exports.exports.iter().find(|candidate| is_meant(candidate, export));
            let meant = meant.with_context(|| format!("no export is at {export}: see `vmstrata status`"))?;
            client.delete(&format!("/v1/exports/{}?force={force}", meant.id))?;
            if *json {
                print_json(meant)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The server may have been started elsewhere: what is relative here must not be relative there.
fn asked(export: &NewExport) -> Result<ExportSpec> {
    if let Some(spec) = &export.vhost_user {
        let socket = absolute(&spec.socket);
        return Ok(ExportSpec::VhostUser(VhostUserSpec { socket, ..spec.into() }));
    }
    if let Some(spec) = &export.fuse {
        let directory = absolute(&spec.directory);
        return Ok(ExportSpec::Fuse(FuseSpec { directory, ..spec.into() }));
    }
    let spec = export.nbd.as_ref().context("one of --vhost-user, --nbd and --fuse")?;
    let address = match &spec.address {
        Address::Unix(path) => Address::Unix(absolute(path).into()),
        tcp @ Address::Tcp { .. } => tcp.clone(),
    };
    Ok(ExportSpec::Nbd(NbdSpec { address: address.to_string(), ..spec.into() }))
}

/// Whether a person who writes `text` means this export.
fn is_meant(export: &ExportStatus, text: &str) -> bool {
    export.id.to_string() == text
        || match &export.export {
            ExportSpec::VhostUser(spec) => spec.socket == text || spec.socket == absolute(Path::new(text)),
            ExportSpec::Nbd(spec) => {
                spec.address == text || spec.address == format!("unix:{}", absolute(Path::new(text)))
            }
            ExportSpec::Fuse(spec) => spec.directory == text || spec.directory == absolute(Path::new(text)),
        }
}

fn to_text(client: &Client, added: &ExportStatus) -> Result<String> {
    let disks = client.get::<DiskList>("/v1/disks")?.disks;
    let own = disks.iter().enumerate().filter(|(_, disk)| added.export.serves(&disk.name));
    let shown = own.map(|(number, disk)| {
        format!("{}:\n{}", disk.name, attachments(&disk.name, number, std::slice::from_ref(added)))
    });
    Ok(format!("export {}\n{}", added.id, shown.collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_meant_by_number_socket_or_address() {
        let export = |export| ExportStatus {
            added: false,
            id: 7,
            export,
            open_error: None,
            connections: None,
            has_spoken: false,
            tls: false,
            counters: None,
        };
        let nbd = export(ExportSpec::Nbd(NbdSpec {
            address: "unix:/run/nbd.sock".to_owned(),
            ..NbdSpec::default()
        }));
        for text in ["7", "unix:/run/nbd.sock", "/run/nbd.sock"] {
            assert!(is_meant(&nbd, text), "{text}");
        }
        assert!(!is_meant(&nbd, "70") && !is_meant(&nbd, "nbd.sock"));
        let spec = VhostUserSpec { disk: "web".into(), socket: "/run/web.sock".into(), ..Default::default() };
        let guest = export(ExportSpec::VhostUser(spec));
        assert!(is_meant(&guest, "/run/web.sock") && !is_meant(&guest, "web"));
    }
}
