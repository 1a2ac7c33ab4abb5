//! `vmstrata door`: doors of a running server come and go.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use vmstrata_api::{DiskList, DoorList, DoorSpec, DoorStatus, NbdSpec, VhostUserSpec};
use vmstrata_export::nbd::Address;

use crate::args::{DoorArgs, DoorCommand, NewDoor};
use crate::attach::absolute;
use crate::client::Client;
use crate::commands::serve::attachments;
use crate::output::{print, print_json};

/// Adds or removes a door.
///
/// # Errors
/// When no server answers, or it refuses.
pub fn run(args: &DoorArgs) -> Result<ExitCode> {
    match &args.command {
        DoorCommand::Add { door, server, json } => {
            let client = Client::new(server)?;
            let added: DoorStatus = client.post("/v1/doors", &asked(door)?)?;
            if *json { print_json(&added)? } else { print(&to_text(&client, &added)?)? }
        }
        DoorCommand::Remove { door, force, server, json } => {
            let client = Client::new(server)?;
            let doors: DoorList = client.get("/v1/doors")?;
            let meant = doors.doors.iter().find(|candidate| is_meant(candidate, door));
            let meant = meant.with_context(|| format!("no door is at {door}: see `vmstrata status`"))?;
            client.delete(&format!("/v1/doors/{}?force={force}", meant.id))?;
            if *json {
                print_json(meant)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The server may have been started elsewhere: what is relative here must not be relative there.
fn asked(door: &NewDoor) -> Result<DoorSpec> {
    if let Some(spec) = &door.vhost_user {
        let socket = absolute(&spec.socket);
        return Ok(DoorSpec::VhostUser(VhostUserSpec { socket, ..spec.into() }));
    }
    let spec = door.nbd.as_ref().context("either --vhost-user or --nbd")?;
    let address = match &spec.address {
        Address::Unix(path) => Address::Unix(absolute(path).into()),
        tcp @ Address::Tcp { .. } => tcp.clone(),
    };
    Ok(DoorSpec::Nbd(NbdSpec { address: address.to_string(), ..spec.into() }))
}

/// Whether a person who writes `text` means this door.
fn is_meant(door: &DoorStatus, text: &str) -> bool {
    door.id.to_string() == text
        || match &door.door {
            DoorSpec::VhostUser(spec) => spec.socket == text || spec.socket == absolute(Path::new(text)),
            DoorSpec::Nbd(spec) => {
                spec.address == text || spec.address == format!("unix:{}", absolute(Path::new(text)))
            }
        }
}

fn to_text(client: &Client, added: &DoorStatus) -> Result<String> {
    let disks = client.get::<DiskList>("/v1/disks")?.disks;
    let leads_to = |disk: &str| match &added.door {
        DoorSpec::VhostUser(spec) => spec.disk == disk,
        DoorSpec::Nbd(_) => true,
    };
    let shown = disks.iter().enumerate().filter(|(_, disk)| leads_to(&disk.name)).map(|(number, disk)| {
        format!("{}:\n{}", disk.name, attachments(&disk.name, number, std::slice::from_ref(added)))
    });
    Ok(format!("door {}\n{}", added.id, shown.collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_is_meant_by_number_socket_or_address() {
        let door = |door| DoorStatus {
            added: false,
            id: 7,
            door,
            open_error: None,
            connections: None,
            tls: false,
            counters: None,
        };
        let nbd =
            door(DoorSpec::Nbd(NbdSpec { address: "unix:/run/nbd.sock".to_owned(), ..NbdSpec::default() }));
        for text in ["7", "unix:/run/nbd.sock", "/run/nbd.sock"] {
            assert!(is_meant(&nbd, text), "{text}");
        }
        assert!(!is_meant(&nbd, "70") && !is_meant(&nbd, "nbd.sock"));
        let spec = VhostUserSpec { disk: "web".into(), socket: "/run/web.sock".into(), ..Default::default() };
        let guest = door(DoorSpec::VhostUser(spec));
        assert!(is_meant(&guest, "/run/web.sock") && !is_meant(&guest, "web"));
    }
}
