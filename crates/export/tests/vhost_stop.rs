//! A server that cannot end in time does not keep others from going on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::vhost_common::frontend::{Guest, IN};
use crate::vhost_common::{Served, options};
use vmstrata_disk::{
    Disk, Format, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
};
use vmstrata_export::vhost_user::{Options, Server};
use vmstrata_store::{Effect, Fault, FaultPlan, FaultStore, Gate, OperationKind, Ring, StoreId, When};

/// Opens files whose operations may be held.
#[derive(Debug)]
struct Faulty(Arc<FaultPlan>);

impl Opener for Faulty {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = LocalFiles.open(path, role, gate)?;
        let store = Arc::new(FaultStore::new(opened.store, &self.0, StoreId::default()));
        Ok(Opened { store, ..opened })
    }

    fn ring(&self, _depth: u32) -> std::io::Result<Ring> {
        Ring::simulated(&self.0)
    }
}

#[test]
fn a_server_whose_storage_hangs_is_left_behind_and_its_socket_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hangs.raw");
    std::fs::write(&path, [1; 4096]).unwrap();
    let plan = FaultPlan::new();
    let resources = Resources::with_opener(ResourceOptions::default(), Arc::new(Faulty(Arc::clone(&plan))));
    let open = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let disk = Disk::open(&path, &open, &resources).unwrap();
    let socket = dir.path().join("disk.sock");
    let short = Options { stop_limit: Duration::from_millis(50), ..options(1, 1) };
    let server = Server::bind(&socket, disk, short).unwrap();
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&socket);
    plan.add(Fault {
        kind: Some(OperationKind::Read),
        store: None,
        when: When::From(0),
        effect: Effect::Hold,
    });
    connection.offer(0, IN, 0, 512);
    connection.kick();
    assert!(plan.wait_until_held(1, Duration::from_secs(20)), "nothing was read");
    assert!(!server.shutdown(), "the request is still under way");
    assert!(!socket.exists());
    // In its place, while the other still waits.
    let successor = Served::raw(&[2; 4096], options(1, 1));
    let server = Server::bind(&socket, Arc::clone(&successor.disk), options(1, 1)).unwrap();
    let mut guest = Guest::new(16);
    assert_eq!(guest.connect(&socket).read(0, 512), [2; 512]);
    // What was left behind ends when its storage answers, and leaves the successor's socket alone.
    plan.clear();
    assert_eq!(connection.answer(), (0, 0));
    assert!(socket.exists());
    assert!(server.shutdown());
}
