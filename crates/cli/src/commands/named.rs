//! Disks as people name them: by path, or by the name under which a running server serves them. Commands see paths only.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use vmstrata_api::{DiskList, DiskStatus};
use vmstrata_disk::snapshot::state_of;
use vmstrata_tier::DiskAddress;
use vmstrata_types::path_from_text;

use super::snapshot::live::is_file_of;
use super::tiered::{address_of, disk_at, split};
use crate::args::{Command, ControlArgs, IndexCommand, ReplicaCommand, SnapshotCommand, TierCommand};
use crate::client::Client;

/// Puts the path of its disk in the place of a name under which a server serves it. What leads to a file, or has a slash, is no
/// name; what no server knows stays.
pub fn find_served(command: &mut Command) {
    let Some((paths, server)) = disks_of(command) else { return };
    for path in paths {
        if let Some(found) = path_of(path, &server) {
            *path = found;
        }
    }
}

/// The arguments of a command that are disks, or their states, and the server that may be serving them.
pub fn disks_of(command: &mut Command) -> Option<(Vec<&mut PathBuf>, ControlArgs)> {
    let any = ControlArgs::of_environment;
    Some(match command {
        Command::Info(args) => (vec![&mut args.file], any()),
        Command::Map(args) => (vec![&mut args.file], any()),
        Command::Check(args) => (vec![&mut args.file], any()),
        Command::Gc(args) => (vec![&mut args.path], any()),
        Command::Convert(args) => (vec![&mut args.source], any()),
        Command::Mount(args) => (vec![&mut args.disk], any()),
        Command::Diff(args) => (vec![&mut args.old, &mut args.new], any()),
        Command::Backup(args) => {
            (args.state.iter_mut().chain(&mut args.since).collect(), args.server.clone())
        }
        Command::Merge(args) => (vec![&mut args.disk], args.access.server.clone()),
        Command::Flatten(args) => (vec![&mut args.disk], args.access.server.clone()),
        Command::Resize(args) => (vec![&mut args.disk], args.access.server.clone()),
        Command::Move(args) => (vec![&mut args.disk], args.access.server.clone()),
        Command::Tier(args) => match &mut args.command {
            TierCommand::Status(args) | TierCommand::Sync(args) => {
                (vec![&mut args.disk], args.server.clone())
            }
            TierCommand::Attach(args) => (vec![&mut args.disk], args.server.clone()),
            TierCommand::Takeover(_)
            | TierCommand::Pins(_)
            | TierCommand::Branches(_)
            | TierCommand::Rate(_)
            | TierCommand::Detach(_) => return None,
            TierCommand::Hold(args) => (vec![&mut args.disk.disk], args.disk.server.clone()),
        },
        Command::Replica(args) => match &mut args.command {
            ReplicaCommand::List(_) => return None,
            ReplicaCommand::Pin(disk) | ReplicaCommand::Unpin(disk) => {
                (vec![&mut disk.disk], disk.server.clone())
            }
            ReplicaCommand::Fill(args) => (vec![&mut args.disk.disk], args.disk.server.clone()),
            ReplicaCommand::Scrub(args) => (vec![&mut args.disk.disk], args.disk.server.clone()),
            ReplicaCommand::Drop(args) => (vec![&mut args.disk.disk], args.disk.server.clone()),
        },
        Command::Rebase(args) => (vec![&mut args.disk], args.access.server.clone()),
        Command::Index(args) => match &mut args.command {
            IndexCommand::Build(args) => (vec![&mut args.disk], args.server.clone()),
            IndexCommand::Verify(args) => (vec![&mut args.disk], any()),
            IndexCommand::Drop(args) => (vec![&mut args.disk], any()),
        },
        Command::Snapshot(args) => match &mut args.command {
            SnapshotCommand::Create(args) => (args.disks.iter_mut().collect(), args.access.server.clone()),
            SnapshotCommand::List(args) => (vec![&mut args.disk], any()),
            SnapshotCommand::Show(args) => (vec![&mut args.disk], any()),
            SnapshotCommand::Revert(args) => (vec![&mut args.disk], args.access.server.clone()),
            SnapshotCommand::Clone(args) => (vec![&mut args.disk], any()),
            SnapshotCommand::Hold(args) | SnapshotCommand::Release(args) => (vec![&mut args.disk], any()),
            SnapshotCommand::Delete(args) => (vec![&mut args.disk], args.access.server.clone()),
            SnapshotCommand::Prune(args) => (vec![&mut args.disk], args.access.server.clone()),
        },
        _ => return None,
    })
}

fn path_of(argument: &Path, server: &ControlArgs) -> Option<PathBuf> {
    let is_name = |text: &Path| !text.as_os_str().as_encoded_bytes().contains(&b'/') && !text.exists();
    if !is_name(argument) {
        return None;
    }
    let client = Client::new(server).ok().filter(|client| client.path().exists())?;
    let served: DiskList = client.get("/v1/disks").ok()?;
    let of_name = |name: &Path| served.disks.iter().find(|disk| Some(disk.name.as_str()) == name.to_str());
    if let Some(disk) = of_name(argument) {
        return Some(argument_for(disk));
    }
    let (disk, state) = split(argument).filter(|(disk, _)| is_name(disk))?;
    Some(state_of(&argument_for(of_name(disk)?), state))
}

/// What leads commands to a disk: its path, or its address if its repository is no directory.
pub fn argument_for(disk: &DiskStatus) -> PathBuf {
    let path = path_from_text(&disk.path);
    let Some(tier) = &disk.tier else { return path };
    let repository = Path::new(&tier.repository);
    match (address_of(repository), &tier.group, path.file_name().and_then(|name| name.to_str())) {
        (Ok(Some(_)), Some(_), Some(name)) => disk_at(repository, name),
        (Ok(Some(_)), ..) => repository.to_owned(),
        _ => path,
    }
}

/// Whether an address leads to a served disk, or to all of its group.
pub fn leads_to(address: &DiskAddress, served: &DiskStatus) -> bool {
    let is_it = |name: &String| path_from_text(&served.path).file_name() == Some(name.as_ref());
    let tier = served.tier.as_ref().filter(|tier| tier.repository == address.repository.place());
    tier.is_some() && address.disk.as_ref().is_none_or(is_it)
}

/// What the server calls the disk that `argument` names, or whose path it is; the argument itself if it knows no such disk.
///
/// # Errors
/// When no server answers; an address of several disks.
pub fn name_of(argument: &str, client: &Client) -> Result<String> {
    let served: DiskList = client.get("/v1/disks")?;
    let is_named = |disk: &&DiskStatus| disk.name == argument;
    let is_file = |disk: &&DiskStatus| is_file_of(disk, Path::new(argument));
    if let Some(found) = served.disks.iter().find(is_named) {
        return Ok(found.name.clone());
    }
    let found: Vec<&DiskStatus> = served.disks.iter().filter(is_file).collect();
    match &found[..] {
        [] => Ok(argument.to_owned()),
        [found] => Ok(found.name.clone()),
        several => {
            let names: Vec<&str> = several.iter().map(|disk| &*disk.name).collect();
            bail!("{argument}: name one of its disks: {}", names.join(", "))
        }
    }
}
