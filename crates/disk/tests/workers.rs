//! Disks share threads, and one that hangs does not have them all.

use std::time::Duration;

use crate::common::faulty::FaultyFiles;
use crate::common::io::Client;
use crate::common::scratch;
use vmstrata_disk::{Disk, Format, Op, OpenOptions};
use vmstrata_store::{Effect, Fault, FaultPlan, When};

const PATIENCE: Duration = Duration::from_secs(20);
/// As many as a disk may have of the usual threads.
const AT_ONCE: u64 = 4;

#[test]
fn a_disk_whose_storage_hangs_does_not_stop_another_disks_requests() {
    let dir = scratch();
    let plan = FaultPlan::new();
    let files = FaultyFiles::new(&plan);
    let resources = files.usual_resources();
    let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let open = |name: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        (Disk::open(&path, &options, &resources).unwrap(), files.id(&path))
    };
    let ((hangs, hanging), (sound, _)) = (open("hangs"), open("sound"));
    plan.add(Fault { kind: None, store: Some(hanging), when: When::From(0), effect: Effect::Hold });
    let cleared = Op::WriteZeroes { unmap: false, fua: true };
    let mut stuck = Client::new(&hangs, 64);
    for number in 0..64 {
        stuck.push(cleared, number * 4096, 4096, None);
    }
    stuck.submit();
    assert!(plan.wait_until_held(AT_ONCE as usize, PATIENCE), "as many as a disk may have");
    let mut client = Client::new(&sound, 8);
    for number in 0..8 {
        client.push(cleared, number * 4096, 4096, None);
    }
    let done = client.drain();
    assert_eq!(done.len(), 8);
    assert!(done.iter().all(|done| done.result.is_ok()));
    assert!(plan.wait_until_held(AT_ONCE as usize, Duration::ZERO), "the other disk still hangs");
    plan.clear();
    assert!(stuck.drain().iter().all(|done| done.result.is_ok()));
}
