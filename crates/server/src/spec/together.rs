//! Whether disks and exports that are asked for together fit together.

use std::path::Path;

use vmstrata_export::nbd::Address;

use super::{DiskSpec, FuseSpec, NbdSpec, SpecError, VhostUserSpec};

/// Checks that the parts fit together: every name is one disk's, every socket is used once, every disk has an export.
///
/// # Errors
/// Names the disk or socket that does not fit.
pub fn check_together(
    disks: &[DiskSpec],
    sockets: &[VhostUserSpec],
    nbd: &[NbdSpec],
    fuse: &[FuseSpec],
) -> Result<(), SpecError> {
    for (at, socket) in sockets.iter().enumerate() {
        let Some(disk) = disks.iter().find(|disk| disk.name == socket.disk) else {
            let there = disks.iter().map(|disk| disk.name.clone()).collect();
            return Err(SpecError::NoSuchDisk { disk: socket.disk.clone(), there });
        };
        check_guests(socket, disk.read_only, &sockets[..at])?;
    }
    for (at, disk) in disks.iter().enumerate() {
        match disks[..at].iter().find(|earlier| earlier.name == disk.name) {
            Some(earlier) if earlier.path == disk.path => {
                return Err(SpecError::PathTwice { path: disk.path.clone() });
            }
            Some(_) => return Err(SpecError::NameTwice { name: disk.name.clone() }),
            None => {}
        }
        if nbd.is_empty() && fuse.is_empty() && sockets.iter().all(|socket| socket.disk != disk.name) {
            return Err(SpecError::NoExport { disk: disk.name.clone() });
        }
    }
    for (at, mount) in fuse.iter().enumerate() {
        if fuse[..at].iter().any(|other| other.directory == mount.directory) {
            return Err(SpecError::DirectoryTwice { path: mount.directory.clone() });
        }
    }
    check_sockets_differ(sockets, nbd)
}

/// Refuses a second socket for a disk that two guests could then write.
pub(crate) fn check_guests<'a>(
    socket: &VhostUserSpec,
    disk_is_read_only: bool,
    others: impl IntoIterator<Item = &'a VhostUserSpec>,
) -> Result<(), SpecError> {
    let alone = |other: &VhostUserSpec| other.disk != socket.disk || other.share && socket.share;
    if disk_is_read_only || others.into_iter().all(alone) {
        Ok(())
    } else {
        Err(SpecError::TwoGuests { disk: socket.disk.clone() })
    }
}

fn check_sockets_differ(sockets: &[VhostUserSpec], nbd: &[NbdSpec]) -> Result<(), SpecError> {
    let mut paths: Vec<&Path> = sockets.iter().map(|socket| socket.socket.as_path()).collect();
    paths.extend(nbd.iter().filter_map(|export| match &export.address {
        Address::Unix(path) => Some(path.as_path()),
        Address::Tcp { .. } => None,
    }));
    paths.sort_unstable();
    match paths.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(SpecError::SocketTwice { path: pair[0].to_owned() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use vmstrata_api as api;

    use super::*;

    fn disk_at(path: &str, read_only: bool) -> DiskSpec {
        api::DiskSpec { path: path.to_owned(), read_only, ..Default::default() }.try_into().unwrap()
    }

    fn disk(read_only: bool) -> DiskSpec {
        disk_at("web.qcow2", read_only)
    }

    fn socket(disk: &str, socket: &str, share: bool) -> VhostUserSpec {
        let (disk, socket) = (disk.to_owned(), socket.to_owned());
        api::VhostUserSpec { disk, socket, share, ..Default::default() }.try_into().unwrap()
    }

    fn nbd(address: &str) -> NbdSpec {
        api::NbdSpec { address: address.to_owned(), ..Default::default() }.try_into().unwrap()
    }

    #[test]
    fn what_fits_together_passes() {
        check_together(&[disk(false)], &[socket("web", "a", false)], &[nbd("unix:b")], &[]).unwrap();
        check_together(&[disk(true)], &[socket("web", "a", false), socket("web", "b", false)], &[], &[])
            .unwrap();
        check_together(&[disk(false)], &[socket("web", "a", true), socket("web", "b", true)], &[], &[])
            .unwrap();
    }

    #[test]
    fn a_mount_serves_all_disks_and_has_its_directory_alone() {
        let mount = |directory: &str| -> FuseSpec {
            api::FuseSpec { directory: directory.to_owned(), ..Default::default() }.try_into().unwrap()
        };
        check_together(&[disk(false)], &[], &[], &[mount("/a"), mount("/b")]).unwrap();
        let twice = check_together(&[disk(false)], &[], &[], &[mount("/a"), mount("/a")]);
        assert!(matches!(twice, Err(SpecError::DirectoryTwice { .. })));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let web = || vec![disk(false)];
        let nbd = |text: &str| vec![nbd(text)];
        let two = |share| vec![socket("web", "a", share), socket("web", "b", false)];
        for (disks, sockets, exports, part) in [
            (
                vec![disk(false), disk_at("old/web.qcow2", false)],
                vec![],
                nbd("unix:b"),
                "two disks are named 'web'",
            ),
            (vec![disk(false), disk(false)], vec![], nbd("unix:b"), "disk web.qcow2 is given twice"),
            (web(), vec![], vec![], "nothing serves disk 'web'"),
            (web(), vec![socket("db", "a", false)], nbd("unix:b"), "no disk has this name (there are: web)"),
            (web(), two(false), vec![], "two guests"),
            (web(), two(true), vec![], "two guests"),
            (web(), vec![socket("web", "a", false)], nbd("unix:a"), "socket a is given twice"),
        ] {
            let error = check_together(&disks, &sockets, &exports, &[]).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
