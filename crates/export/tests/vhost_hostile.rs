//! Frontends and drivers that break the rules: they lose their own queue or connection, and nothing else
//! happens. After each of them, an honest one is served.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::vhost_common::driver::{Descriptor, GUEST_BASE, INDIRECT, NEXT, USER_BASE, WRITE};
use crate::vhost_common::frontend::{
    Connection, FLUSH, Guest, MEMORY_LEN, event, fill, make_blocking, negotiate, signalled,
};
use crate::vhost_common::{Served, options};
use crate::wait::wait_until;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

fn served() -> Served {
    Served::qcow2(1 << 20, options(2, 1))
}

fn honest_frontend_is_served(served: &Served) {
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&served.socket());
    assert_eq!(connection.write(1, &[7; 512]), 0);
    assert_eq!(connection.read(1, 512), [7; 512]);
}

/// Says one wrong thing on a fresh connection; the server must say no.
fn refuses(served: &Served, say: impl FnOnce(&mut Frontend, &Guest) -> bool) {
    let guest = Guest::new(16);
    let (mut frontend, socket) = negotiate(&served.socket());
    assert!(!say(&mut frontend, &guest), "accepted");
    // Both ends of the connection: a server that still has one turns the next frontend away.
    drop((frontend, socket));
    honest_frontend_is_served(served);
}

#[test]
fn messages_out_of_range_are_refused() {
    let served = served();
    refuses(&served, |frontend, _| frontend.set_vring_num(0, 3).is_ok());
    refuses(&served, |frontend, _| frontend.set_vring_num(0, 0).is_ok());
    refuses(&served, |frontend, _| frontend.set_vring_num(0, 2048).is_ok());
    refuses(&served, |frontend, _| frontend.set_features(u64::MAX).is_ok());
    refuses(&served, |frontend, _| {
        let flags = vhost::vhost_user::message::VhostUserConfigFlags::WRITABLE;
        frontend.set_config(0, flags, &[1; 8]).is_ok()
    });
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let served = served();
    let table = |change: fn(&mut VhostUserMemoryRegionInfo)| {
        move |frontend: &mut Frontend, guest: &Guest| {
            let mut region = guest.region();
            change(&mut region);
            frontend.set_mem_table(&[region]).is_ok()
        }
    };
    refuses(&served, table(|region| region.memory_size = MEMORY_LEN + 1));
    refuses(&served, table(|region| region.mmap_offset = 4096));
    refuses(&served, table(|region| region.guest_phys_addr = u64::MAX - 4096));
    refuses(&served, table(|region| region.userspace_addr = u64::MAX - 4096));
    refuses(&served, |frontend, guest| frontend.set_mem_table(&[guest.region(), guest.region()]).is_ok());
    refuses(&served, |frontend, guest| frontend.remove_mem_region(&guest.region()).is_ok());
    refuses(&served, |frontend, guest| {
        let file = File::open("/dev/null").unwrap();
        let region = VhostUserMemoryRegionInfo { mmap_handle: file.as_raw_fd(), ..guest.region() };
        frontend.add_mem_region(&region).is_ok()
    });
}

#[test]
fn inflight_memory_of_the_wrong_shape_is_refused() {
    let served = served();
    let file = memfd_create("inflight", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 16).unwrap();
    let set = |mmap_size, mmap_offset, num_queues, queue_size| {
        let fd = file.as_raw_fd();
        refuses(&served, move |frontend, _| {
            let info = VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size };
            frontend.set_inflight_fd(&info, fd).is_ok()
        });
    };
    set(1 << 16, 0, 3, 16);
    set(1 << 16, 0, 1, 4096);
    set(16, 0, 1, 16);
    set(1 << 16, 1 << 16, 1, 16);
    set(1 << 16, 7, 1, 16);
    set(1 << 16, u64::MAX - 4095, 1, 16);
    refuses(&served, |frontend, _| frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 99, 16)).is_ok());
}

#[test]
fn a_ring_outside_memory_never_starts() {
    let served = served();
    let ring = |descriptors: u64, available: u64, used: u64| VringConfigData {
        queue_max_size: 16,
        queue_size: 16,
        flags: 0,
        desc_table_addr: descriptors,
        used_ring_addr: used,
        avail_ring_addr: available,
        log_addr: None,
    };
    let end = USER_BASE + MEMORY_LEN;
    for config in [
        ring(0, USER_BASE, USER_BASE),
        ring(USER_BASE, end - 8, USER_BASE),
        ring(USER_BASE, USER_BASE, end - 16),
        ring(u64::MAX - 15, USER_BASE, USER_BASE),
        ring(USER_BASE, USER_BASE, u64::MAX - 3),
    ] {
        let guest = Guest::new(16);
        let (mut frontend, _socket) = negotiate(&served.socket());
        frontend.set_mem_table(&[guest.region()]).unwrap();
        let err = event();
        frontend.set_vring_err(0, &err).unwrap();
        frontend.set_vring_num(0, 16).unwrap();
        frontend.set_vring_addr(0, &config).unwrap();
        frontend.set_vring_kick(0, &event()).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
        assert!(signalled(&err, Duration::from_secs(5)));
    }
    honest_frontend_is_served(&served);
}

/// A driver that breaks its ring loses it, hears so, and gets it back after setting it up anew.
fn loses_its_queue(served: &Served, break_it: impl FnOnce(&mut Connection)) {
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&served.socket());
    let err = event();
    connection.frontend.set_vring_err(0, &err).unwrap();
    assert_eq!(connection.write(0, &[1; 512]), 0);
    break_it(&mut connection);
    connection.kick();
    assert!(signalled(&err, Duration::from_secs(5)), "told that the queue broke");
    connection.frontend.get_vring_base(0).unwrap();
    drop(connection);
    honest_frontend_is_served(served);
}

#[test]
fn rings_that_break_the_rules_stop() {
    let served = served();
    let chain = |flags, next| {
        move |connection: &mut Connection| {
            let guest = GUEST_BASE + Connection::data_at(9);
            let descriptor = Descriptor { guest, len: 16, flags, next };
            connection.driver.set_descriptor(0, descriptor);
            connection.driver.offer(0);
        }
    };
    loses_its_queue(&served, |connection| {
        connection.driver.set_available_index(connection.driver.next_available.wrapping_add(17));
    });
    loses_its_queue(&served, |connection| connection.driver.offer(16));
    loses_its_queue(&served, chain(NEXT, 0));
    loses_its_queue(&served, chain(NEXT, 999));
    loses_its_queue(&served, chain(INDIRECT, 0));
    loses_its_queue(&served, chain(WRITE, 0));
    loses_its_queue(&served, chain(0, 0));
    loses_its_queue(&served, |connection| {
        let descriptor = Descriptor { guest: 0xdead_0000, len: 4096, flags: 0, next: 0 };
        connection.driver.set_descriptor(0, descriptor);
        connection.driver.offer(0);
    });
}

#[test]
fn only_eventfds_are_taken_for_kicks_calls_and_errors() {
    let served = served();
    let (reader, _writer) = std::io::pipe().unwrap();
    // SAFETY: the descriptor is open and owned by nobody else.
    let pipe = unsafe { EventFd::from_raw_fd(reader.into_raw_fd()) };
    refuses(&served, |frontend, _| frontend.set_vring_kick(0, &pipe).is_ok());
    refuses(&served, |frontend, _| frontend.set_vring_call(0, &pipe).is_ok());
    refuses(&served, |frontend, _| frontend.set_vring_err(0, &pipe).is_ok());
}

/// The frontend shares the open file description, and with it `O_NONBLOCK`.
#[test]
fn a_full_event_that_blocks_holds_up_nobody() {
    let mut served = served();
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&served.socket());
    assert_eq!(connection.write(0, &[1; 512]), 0);
    fill(&connection.call);
    make_blocking(&connection.call);
    make_blocking(&connection.kick);
    for _ in 0..20 {
        let event = connection.driver.used_index();
        connection.driver.set_used_event(event);
        connection.offer(0, FLUSH, 0, 0);
        connection.kick();
        assert_eq!(connection.answer(), (0, 0));
        connection.frontend.set_vring_call(0, &connection.call).unwrap();
    }
    connection.frontend.set_vring_err(0, &connection.call).unwrap();
    connection.driver.offer(16);
    connection.kick();
    connection.frontend.get_vring_base(0).unwrap();
    served.stop();
}

#[test]
fn memory_taken_away_under_a_running_queue_ends_that_queue_only() {
    let served = served();
    let mut guest = Guest::in_memory(16, MemfdFlags::CLOEXEC);
    let mut connection = guest.connect(&served.socket());
    assert_eq!(connection.write(0, &[1; 512]), 0);
    ftruncate(&guest.memory, 0).unwrap();
    connection.kick();
    connection.frontend.get_vring_base(0).unwrap();
    drop(connection);
    honest_frontend_is_served(&served);
}

#[test]
fn half_messages_and_noise_end_the_connection() {
    let served = served();
    let mut half = UnixStream::connect(served.socket()).unwrap();
    half.write_all(&[1, 0, 0]).unwrap();
    drop(half);
    honest_frontend_is_served(&served);
    let mut promise = UnixStream::connect(served.socket()).unwrap();
    promise.write_all(&[2u32, 1, u32::MAX].map(u32::to_ne_bytes).concat()).unwrap();
    assert_eq!(promise.read(&mut [0; 64]).unwrap(), 0, "closed");
    let mut rng = SmallRng::seed_from_u64(7);
    for _ in 0..200 {
        let mut noise = UnixStream::connect(served.socket()).unwrap();
        // Mostly plausible headers, with bodies that are not.
        for _ in 0..rng.random_range(1..6) {
            let len = rng.random_range(0..64u32);
            let mut message = [rng.random_range(0..46), 1 | rng.random_range(0..2) << 3, len]
                .map(u32::to_ne_bytes)
                .concat();
            message.extend((0..len).map(|_| if rng.random() { 0 } else { rng.random::<u8>() }));
            if noise.write_all(&message).is_err() {
                break;
            }
        }
    }
    honest_frontend_is_served(&served);
}

#[test]
fn a_second_frontend_is_turned_away_and_the_first_goes_on() {
    let served = served();
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&served.socket());
    let mut second = UnixStream::connect(served.socket()).unwrap();
    assert_eq!(second.read(&mut [0; 64]).unwrap(), 0, "closed");
    assert_eq!(connection.write(1, &[7; 512]), 0);
}

#[test]
fn shutdown_does_not_wait_for_the_rest_of_a_message() {
    let mut served = served();
    let mut half = UnixStream::connect(served.socket()).unwrap();
    half.write_all(&[1, 0, 0]).unwrap();
    wait_until("the connection", || served.server().is_connected());
    served.stop();
}

#[test]
fn requests_race_with_every_message() {
    let served = served();
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&served.socket());
    let mut rng = SmallRng::seed_from_u64(3);
    for _ in 0..300 {
        for slot in 0..5 {
            connection.offer(slot, FLUSH, 0, 0);
        }
        connection.kick();
        match rng.random_range(0..5) {
            0 => drop(connection.frontend.set_mem_table(&[guest.region()]).unwrap()),
            1 => connection.frontend.set_vring_call(0, &connection.call).unwrap(),
            2 => {
                connection.frontend.get_vring_base(0).unwrap();
                connection.start();
            }
            3 => {
                connection.frontend.set_vring_enable(0, false).unwrap();
                connection.frontend.set_vring_enable(0, true).unwrap();
            }
            _ => connection.frontend.set_vring_kick(0, &connection.kick).unwrap(),
        }
        let mut answered: Vec<u16> = (0..5).map(|_| connection.answer().0).collect();
        answered.sort_unstable();
        assert_eq!(answered, [0, 1, 2, 3, 4]);
    }
}
