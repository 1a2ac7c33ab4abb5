//! Snapshots as people name them: beside their disk, or as `DISK@NAME`.

use clap::CommandFactory as _;
use clap::error::ErrorKind;
use vmstrata_disk::snapshot::split_state;

use super::{Cli, Command, JobCommand, SnapshotCommand};

/// Splits `DISK@NAME` where a command was given no snapshot beside the disk.
///
/// # Errors
/// Wrong usage: no snapshot is named.
pub(super) fn split_snapshots(command: &mut Command) -> Result<(), clap::Error> {
    let missing = || {
        let said = "which snapshot? Name it as DISK NAME or DISK@NAME";
        Cli::command().error(ErrorKind::MissingRequiredArgument, said)
    };
    let (disk, name) = match command {
        Command::Snapshot(args) => match &mut args.command {
            SnapshotCommand::Show(args) => (&mut args.disk, &mut args.name),
            SnapshotCommand::Hold(args) | SnapshotCommand::Release(args) => (&mut args.disk, &mut args.name),
            SnapshotCommand::Revert(args) => (&mut args.disk, &mut args.name),
            SnapshotCommand::Clone(args) => (&mut args.disk, &mut args.name),
            SnapshotCommand::Delete(args) if args.names.is_empty() => {
                (&mut args.disk, args.names.push_mut(String::new()))
            }
            _ => return Ok(()),
        },
        Command::Job(args) => match &mut args.command {
            JobCommand::SnapshotDelete { disk, snapshots, .. } if snapshots.is_empty() => {
                let (of, name) = disk.rsplit_once('@').ok_or_else(missing)?;
                snapshots.push(name.to_owned());
                *disk = of.to_owned();
                return Ok(());
            }
            _ => return Ok(()),
        },
        _ => return Ok(()),
    };
    if name.is_empty() {
        let (of, snapshot) = split_state(disk).ok_or_else(missing)?;
        (*disk, *name) = (of.to_owned(), snapshot.to_owned());
    }
    Ok(())
}
