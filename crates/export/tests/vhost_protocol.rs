//! The protocol, message by message: what a frontend may say, in which order, and what comes of it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::vhost_common::driver::{GUEST_BASE, USER_BASE};
use crate::vhost_common::frontend::{
    Connection, DISCARD, FLUSH, GET_ID, Guest, IN, MEMORY_LEN, OUT, WRITE_ZEROES, event, signalled, slot_at,
};
use crate::vhost_common::{Served, options};
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmstrata_disk::{Limit, Limits};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const DISK: u64 = 4 << 20;

fn served() -> Served {
    Served::qcow2(DISK, options(2, 2))
}

fn connected(served: &Served) -> (Guest, Connection) {
    let mut guest = Guest::new(64);
    let connection = guest.connect(&served.socket());
    (guest, connection)
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// A request that carries a list of ranges.
fn ranges(connection: &mut Connection, kind: u32, list: &[u8]) -> u8 {
    connection.driver.write(Connection::data_at(0), list);
    connection.request(kind, 0, list.len() as u32)
}

#[test]
fn every_kind_of_request_is_answered() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    assert_eq!(connection.write(8, &[7; 1024]), OK);
    assert_eq!(connection.read(7, 1536), [vec![0; 512], vec![7; 1024]].concat());
    assert_eq!(connection.request(FLUSH, 0, 0), OK);
    assert_eq!(connection.request(GET_ID, 0, 20), OK);
    assert_eq!(connection.driver.read(Connection::data_at(0), 20), b"test-serial\0\0\0\0\0\0\0\0\0");
    let two = [range(8, 1, 0), range(100, 8, 1)].concat();
    assert_eq!(ranges(&mut connection, WRITE_ZEROES, &two), OK);
    assert_eq!(connection.read(8, 1024), [vec![0; 512], vec![7; 512]].concat());
    let many: Vec<u8> = (0..32u64).flat_map(|number| range(number * 2, 1, 0)).collect();
    assert_eq!(ranges(&mut connection, DISCARD, &many), OK);
    assert_eq!(connection.request(IN, 0, 0), OK, "nothing to read is no error");
}

#[test]
fn what_makes_no_sense_gets_an_error_and_the_queue_goes_on() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    assert_eq!(connection.request(OUT, DISK / 512, 512), IO_ERROR);
    assert_eq!(connection.request(IN, 0, 100), IO_ERROR);
    assert_eq!(connection.request(99, 0, 512), UNSUPPORTED);
    assert_eq!(ranges(&mut connection, DISCARD, &range(0, 1, 1)), UNSUPPORTED);
    let second_is_bad = [range(0, 1, 0), range(u64::MAX, 1, 0)].concat();
    assert_eq!(connection.write(0, &[1; 512]), OK);
    assert_eq!(ranges(&mut connection, WRITE_ZEROES, &second_is_bad), IO_ERROR);
    assert_eq!(connection.read(0, 512), [1; 512], "no part of a refused request is done");
}

#[test]
fn the_configuration_space_is_read_and_the_cache_mode_written() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    let frontend = &mut connection.frontend;
    let read = |frontend: &mut Frontend, at, len: u32| {
        let flags = VhostUserConfigFlags::WRITABLE;
        frontend.get_config(at, len, flags, &vec![0; len as usize]).unwrap().1
    };
    assert_eq!(read(frontend, 0, 8), (DISK / 512).to_le_bytes());
    assert_eq!(read(frontend, 32, 4), [1, 0, 2, 0], "cached writes, two queues");
    frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!(read(frontend, 32, 1), [0]);
    assert_eq!(connection.write(0, &[3; 512]), OK, "written through");
}

#[test]
fn stopping_a_queue_waits_for_everything_it_took() {
    let served = served();
    let (guest, mut connection) = connected(&served);
    for round in 0..20u8 {
        for slot in 0..16 {
            connection.driver.write(Connection::data_at(slot), &[round; 4096]);
            connection.offer(slot, OUT, u64::from(slot) * 8, 4096);
        }
        connection.kick();
        let base = connection.frontend.get_vring_base(0).unwrap() as u16;
        assert_eq!(connection.driver.used_index(), base, "all that was taken is answered");
        connection.start();
        for _ in 0..16 {
            assert_eq!(connection.answer().1, OK);
        }
    }
    assert_eq!(connection.read(64, 512), [19; 512]);
    drop(guest);
}

/// A virtual machine stands still until its queues have stopped.
#[test]
fn stopping_a_queue_does_not_wait_for_the_limits_of_its_disk() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    let a_byte_a_second = Limit::new(1, None, None).unwrap();
    served.disk.limit(Limits { bps_read: Some(a_byte_a_second), ..Limits::default() });
    for slot in 0..16 {
        connection.offer(slot, IN, u64::from(slot) * 8, 4096);
    }
    connection.kick();
    assert_eq!(connection.answer().1, OK, "the first is let through");
    let base = connection.frontend.get_vring_base(0).unwrap() as u16;
    assert_eq!(connection.driver.used_index(), base, "all that was taken is answered");
}

#[test]
fn memory_may_change_under_a_running_queue() {
    let served = served();
    let (guest, mut connection) = connected(&served);
    assert_eq!(connection.write(0, &[1; 512]), OK);
    // More memory, above what there is.
    let file = Guest::new(64).memory;
    let extra = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST_BASE + MEMORY_LEN,
        userspace_addr: USER_BASE + MEMORY_LEN,
        mmap_handle: file.as_raw_fd(),
        ..guest.region()
    };
    connection.frontend.add_mem_region(&extra).unwrap();
    assert_eq!(connection.write(1, &[2; 512]), OK);
    connection.frontend.remove_mem_region(&extra).unwrap();
    assert_eq!(connection.write(2, &[3; 512]), OK);
    // The memory of the ring goes and comes back: requests wait for it.
    connection.frontend.remove_mem_region(&guest.region()).unwrap();
    connection.offer(5, FLUSH, 0, 0);
    connection.kick();
    connection.frontend.add_mem_region(&guest.region()).unwrap();
    assert_eq!(connection.answer(), (5, OK));
    connection.frontend.set_mem_table(&[guest.region(), extra]).unwrap();
    assert_eq!(connection.read(0, 1536), [[1; 512], [2; 512], [3; 512]].concat());
}

#[test]
fn calls_follow_a_descriptor_that_changes() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    assert_eq!(connection.write(0, &[1; 512]), OK);
    // Starting the queue called once by itself: what is left of the two calls is taken first.
    let _ = signalled(&connection.call, Duration::from_millis(100));
    let old = std::mem::replace(&mut connection.call, event());
    connection.frontend.set_vring_call(0, &connection.call).unwrap();
    connection.wait_call();
    assert_eq!(connection.write(0, &[1; 512]), OK, "waits for a call on the new one");
    assert!(!signalled(&old, Duration::ZERO));
}

#[test]
fn a_disabled_queue_takes_nothing_until_it_is_enabled() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    connection.frontend.set_vring_enable(0, false).unwrap();
    connection.offer(3, FLUSH, 0, 0);
    connection.kick();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(connection.driver.next_used(), None);
    connection.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(connection.answer(), (3, OK));
}

#[test]
fn a_reset_device_starts_over() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    assert_eq!(connection.write(0, &[1; 512]), OK);
    connection.frontend.reset_device().unwrap();
    let features = connection.frontend.get_features().unwrap();
    connection.frontend.set_features(features).unwrap();
    connection.start();
    assert_eq!(connection.read(0, 512), [1; 512], "memory was kept");
}

#[test]
fn shutdown_answers_what_was_taken_and_removes_the_socket() {
    let mut served = served();
    let (_guest, mut connection) = connected(&served);
    for slot in 0..16 {
        connection.offer(slot, OUT, u64::from(slot) * 8, 4096);
    }
    connection.kick();
    assert_eq!(connection.answer().1, OK);
    served.stop();
    assert!(!served.socket().exists());
    let taken = connection.driver.used_index();
    served.start();
    assert!(taken >= 1);
}

#[test]
fn without_a_kick_descriptor_the_queue_is_polled() {
    use std::io::Write;
    let served = served();
    let (guest, mut connection) = connected(&served);
    drop(guest);
    let base = connection.frontend.get_vring_base(0).unwrap();
    // SET_VRING_KICK for queue 0, "no descriptor comes along"; crate `vhost` cannot say that.
    let message = [12u32, 1, 8, 0x100, 0].map(u32::to_ne_bytes).concat();
    connection.socket.write_all(&message).unwrap();
    connection.frontend.set_vring_call(0, &connection.call).unwrap();
    assert_eq!(base, u32::from(connection.driver.used_index()));
    for slot in 0..5 {
        std::thread::sleep(Duration::from_millis(5));
        connection.offer(slot, FLUSH, 0, 0);
        assert_eq!(connection.answer(), (slot, OK));
    }
}

#[test]
fn file_contents_are_those_of_the_disk() {
    let bytes: Vec<u8> = (0..DISK / 4).flat_map(|word| (word as u32).to_le_bytes()).collect();
    let served = Served::raw(&bytes, options(1, 1));
    let (_guest, mut connection) = connected(&served);
    for sector in [0, 1, 4095, 8184] {
        let at = sector as usize * 512;
        assert_eq!(connection.read(sector, 4096), bytes[at..at + 4096]);
    }
    assert_eq!(connection.write(10, &[9; 512]), OK);
    assert_eq!(connection.request(FLUSH, 0, 0), OK);
    let mut found = [0; 512];
    let file = std::fs::File::open(served.dir.path().join("disk.raw")).unwrap();
    file.read_exact_at(&mut found, 5120).unwrap();
    assert_eq!(found, [9; 512]);
}

/// Takes the pages that are marked, as offsets in guest memory, and clears the marks.
fn take_marks(log: &File) -> Vec<u64> {
    const FIRST: u64 = GUEST_BASE / 4096 / 8;
    let mut bytes = vec![0; (MEMORY_LEN / 4096 / 8) as usize];
    log.read_exact_at(&mut bytes, FIRST).unwrap();
    log.write_all_at(&vec![0; bytes.len()], FIRST).unwrap();
    let bits = bytes
        .iter()
        .enumerate()
        .flat_map(|(at, byte)| (0..8).map(move |bit| (at * 8 + bit, byte >> bit & 1)));
    bits.filter(|(_, bit)| *bit == 1).map(|(page, _)| page as u64 * 4096).collect()
}

/// Takes the pages that are marked once `ring_page` is: an answer can be seen an instant before that.
fn take_marks_with(log: &File, ring_page: u64) -> Vec<u64> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let (at, bit) = (GUEST_BASE / 4096 / 8 + ring_page / 4096 / 8, ring_page / 4096 % 8);
    let mut byte = [0];
    while byte[0] >> bit & 1 == 0 {
        assert!(Instant::now() < deadline, "the ring's page is not marked");
        log.read_exact_at(&mut byte, at).unwrap();
    }
    take_marks(log)
}

#[test]
fn pages_written_are_logged_while_the_frontend_asks_for_it() {
    let served = served();
    let (_guest, mut connection) = connected(&served);
    let log = Guest::new(64).memory;
    let region = VhostUserDirtyLogRegion { mmap_size: 1 << 16, mmap_offset: 0, mmap_handle: log.as_raw_fd() };
    connection.frontend.set_log_base(0, Some(region)).unwrap();
    assert_eq!(connection.write(0, &[7; 8192]), OK);
    assert_eq!(take_marks(&log), [0; 0], "not yet asked for");
    let features = connection.frontend.get_features().unwrap();
    connection.frontend.set_features(features).unwrap();
    let used = connection.driver.used();
    let logged = VringConfigData { flags: 1, log_addr: Some(GUEST_BASE + used), ..connection.ring_config() };
    connection.frontend.set_vring_addr(0, &logged).unwrap();
    take_marks(&log);
    let ring_page = used / 4096 * 4096;
    assert_eq!(connection.read(0, 8192), [7; 8192]);
    let data = Connection::data_at(0);
    assert_eq!(take_marks_with(&log, ring_page), [ring_page, slot_at(0), data, data + 4096]);
    assert_eq!(connection.write(0, &[8; 8192]), OK);
    assert_eq!(
        take_marks_with(&log, ring_page),
        [ring_page, slot_at(0)],
        "a write to the disk changes only the status"
    );
    assert_eq!(connection.request(IN, DISK / 512, 8192), IO_ERROR);
    assert_eq!(take_marks_with(&log, ring_page), [ring_page, slot_at(0)], "nothing was read");
    connection.frontend.set_features(features & !(1 << 26)).unwrap();
    take_marks(&log);
    assert_eq!(connection.read(0, 512), [8; 512]);
    assert_eq!(take_marks(&log), [0; 0], "no longer asked for");
}
