//! A move sees its guest's requests, and reads next where they are.

use std::fs;
use std::path::Path;

use crate::common::flat::{assert_same, pattern, range, write};
use crate::common::io::Client;
use crate::common::stock::{path_str, qemu_img};
use crate::common::{open_with, random, scratch};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Op, OpenOptions};
use vmstrata_migrate::follow::{Kind, Order};
use vmstrata_migrate::{FlatMove, FlatOptions, Move, MoveOptions, Moving};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
/// Where the guest reads up to: near the end.
const AT: u64 = 29 * MIB + 12_288;
const LEN: u64 = 4096;

/// What the file holds at that place.
fn bytes_at(path: &Path, at: u64) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    bytes[at as usize..].iter().take(LEN as usize).copied().collect()
}

#[test]
fn what_is_near_the_guests_request_is_copied_next() {
    for is_flat in [false, true] {
        let dir = scratch();
        let (path, to) = (dir.path().join("web.qcow2"), dir.path().join("new"));
        fs::create_dir(&to).unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &SIZE.to_string()]);
        let disk = open_with(&path, &OpenOptions::default());
        let bytes = pattern(&mut random("follow", 0), SIZE as usize);
        write(&disk, 0, &bytes).unwrap();
        disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
        let (order, open) = (Order::Nearest, OpenOptions::default());
        let place = disk.extents_by_place(range(AT, LEN), 1).unwrap()[0].host.unwrap().get();
        let (mut moving, copy, at): (Box<dyn Move>, _, _) = if is_flat {
            let to = to.join("web.raw");
            let options =
                FlatOptions { to: to.clone(), open, overwrite: false, skip_unreadable: false, order };
            (Box::new(FlatMove::begin(&disk, &options).unwrap()), to, AT)
        } else {
            let options = MoveOptions { order, ..MoveOptions::new(to.clone(), open) };
            let part = vmstrata_disk::unfinished_copy(&to.join("web.mon.qcow2"));
            (Box::new(Moving::begin(&disk, &options).unwrap()), part, place)
        };
        while moving.step(1).unwrap() == 0 {}
        let wanted = &bytes[AT as usize..(AT + LEN) as usize];
        assert_ne!(bytes_at(&copy, at), wanted, "it has hardly begun");
        let mut guest = Client::new(&disk, 8);
        guest.push(Op::Read, AT - LEN, LEN, None);
        assert!(guest.drain()[0].result.is_ok());
        // Far beyond the disk: a guest may ask for anything.
        guest.push(Op::Read, u64::MAX - 100, LEN, None);
        assert!(guest.drain()[0].result.is_err());
        let timed = moving.requests().take_timed();
        assert_eq!(timed.iter().map(|timed| timed.kind).collect::<Vec<_>>(), [Kind::Read]);
        assert!(timed[0].began <= timed[0].ended && timed[0].ended <= moving.requests().now());
        // What was begun is copied to its end first.
        (0..3).for_each(|_| assert!(moving.step(MIB).unwrap() > 0));
        assert_same(&bytes_at(&copy, at), wanted, AT, "what follows the guest's request");
        drop(guest);
        drop(moving);
        disk.close().unwrap();
    }
}
