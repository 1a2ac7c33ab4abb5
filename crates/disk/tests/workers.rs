//! Disks share threads, and one that hangs does not have them all.

mod common;

use std::time::Duration;

use common::faulty::FaultyFiles;
use common::io::Client;
use common::scratch;
use vmstrata_disk::{Disk, Format, Op, OpenOptions};
use vmstrata_store::{Effect, Fault, FaultPlan, OperationKind, When};

const PATIENCE: Duration = Duration::from_secs(20);
/// As many as a disk may have of the usual threads.
const AT_ONCE: u64 = 4;

#[test]
fn a_disk_whose_storage_hangs_does_not_stop_another_disks_reads() {
    let dir = scratch();
    let plan = FaultPlan::new();
    let resources = FaultyFiles::new(&plan).usual_resources();
    let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let open = |name: &str, byte: u8| {
        let path = dir.path().join(name);
        std::fs::write(&path, vec![byte; 1 << 20]).unwrap();
        Disk::open(&path, &options, &resources).unwrap()
    };
    let (hangs, sound) = (open("hangs", 1), open("sound", 2));
    // These stores have no descriptor, so every read is a worker's.
    for nth in 0..AT_ONCE {
        let (kind, when) = (Some(OperationKind::Read), When::Nth(nth));
        plan.add(Fault { kind, store: None, when, effect: Effect::Hold });
    }
    let mut stuck = Client::new(&hangs, 64);
    for number in 0..64 {
        stuck.push(Op::Read, number * 4096, 4096, None);
    }
    stuck.submit();
    assert!(plan.wait_until_held(AT_ONCE as usize, PATIENCE), "as many as a disk may have");
    let mut client = Client::new(&sound, 8);
    for number in 0..8 {
        client.push(Op::Read, number * 4096, 4096, None);
    }
    let done = client.drain();
    assert_eq!(done.len(), 8);
    assert!(done.iter().all(|done| done.result.is_ok() && done.bytes.iter().all(|&byte| byte == 2)));
    plan.clear();
    assert!(stuck.drain().iter().all(|done| done.result.is_ok()));
}
