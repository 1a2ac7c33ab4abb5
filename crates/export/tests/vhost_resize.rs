//! A disk of another size, as a frontend sees it: told at once, used at once, and never past its end.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::vhost_common::frontend::{Connection, Guest, IN, OUT, negotiate};
use crate::vhost_common::{Served, options};
use crate::wait::wait_until;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{VhostUserFrontend, VhostUserProtocolFeatures};
use vmstrata_disk::Shrink;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const MIB: u64 = 1 << 20;

/// Hands the device a channel to tell on, as QEMU does.
fn listen(connection: &mut Connection) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    connection.frontend.set_backend_request_fd(&theirs).unwrap();
    ours
}

/// Takes one message, which must be BACKEND_CONFIG_CHANGE_MSG: 2, version 1, no payload.
fn assert_told(channel: &mut UnixStream) {
    let mut message = [0; 12];
    channel.read_exact(&mut message).expect("something is said");
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

fn capacity(connection: &mut Connection) -> u64 {
    let flags = VhostUserConfigFlags::WRITABLE;
    let (_, space) = connection.frontend.get_config(0, 8, flags, &[0; 8]).unwrap();
    u64::from_le_bytes(space.try_into().unwrap())
}

#[test]
fn a_guest_is_told_of_the_new_size_and_uses_it() {
    let served = Served::qcow2(4 * MIB, options(1, 1));
    let mut guest = Guest::new(64);
    let mut connection = guest.connect(&served.socket());
    let mut channel = listen(&mut connection);
    assert_eq!(capacity(&mut connection), 8192);
    assert_eq!(connection.request(OUT, 8192, 512), IO_ERROR, "past the end");
    served.disk.resize(3 << 40, Shrink::Refuse).unwrap();
    assert!(served.server().set_size(served.disk.size()));
    assert_told(&mut channel);
    let sectors = (3 << 40) / 512;
    assert_eq!(capacity(&mut connection), sectors);
    assert_eq!(connection.write(sectors - 2, &[5; 1024]), OK);
    assert_eq!(connection.read(sectors - 2, 1024), [5; 1024]);
    assert_eq!(connection.request(IN, sectors - 1, 1024), IO_ERROR, "past the new end");
    served.disk.resize(MIB, Shrink::Allow).unwrap();
    served.server().set_size(MIB);
    assert_told(&mut channel);
    assert_eq!(capacity(&mut connection), 2048);
    assert_eq!(connection.request(IN, 2048, 512), IO_ERROR);
    assert_eq!(connection.write(2047, &[6; 512]), OK);
}

/// A frontend without that channel sees the size when it looks; one that comes later sees it at once.
#[test]
fn a_frontend_that_cannot_be_told_is_served_all_the_same() {
    let mut served = Served::qcow2(4 * MIB, options(1, 1));
    let mut guest = Guest::new(64);
    let mut connection = guest.connect(&served.socket());
    served.disk.resize(8 * MIB, Shrink::Refuse).unwrap();
    assert!(!served.server().set_size(8 * MIB), "nobody listens");
    assert_eq!(connection.write(16383, &[1; 512]), OK);
    assert_eq!(capacity(&mut connection), 16384);
    guest.disconnect(connection);
    // The channel of a frontend that has gone is not used again.
    let mut connection = guest.connect(&served.socket());
    let channel = listen(&mut connection);
    assert_eq!(capacity(&mut connection), 16384, "the message was handled");
    assert!(served.server().set_size(8 * MIB));
    guest.disconnect(connection);
    drop(channel);
    wait_until("the channel is closed", || !served.server().set_size(8 * MIB));
    served.stop();
    served.start();
    let mut connection = guest.connect(&served.socket());
    assert_eq!(capacity(&mut connection), 16384, "of a new server");
}

#[test]
fn the_channel_is_offered() {
    let served = Served::qcow2(MIB, options(1, 1));
    let (mut frontend, _socket) = negotiate(&served.socket());
    let offered = frontend.get_protocol_features().unwrap();
    assert!(offered.contains(VhostUserProtocolFeatures::BACKEND_REQ | VhostUserProtocolFeatures::CONFIG));
}
