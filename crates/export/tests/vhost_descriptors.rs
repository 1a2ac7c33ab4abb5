//! What a frontend makes the server keep open. Alone in its program: descriptors are counted by the process.

use std::os::fd::AsRawFd;

use crate::vhost_common::driver::{GUEST_BASE, USER_BASE};
use crate::vhost_common::frontend::{FLUSH, Guest, MEMORY_LEN, event, fill, make_blocking};
use crate::vhost_common::{Served, options};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Whatever the I/O thread does meanwhile: here its driver's event is full, and would block whoever writes to it.
#[test]
fn a_frontend_holds_few_descriptors_whatever_it_sends() {
    let served = Served::qcow2(1 << 20, options(1, 1));
    let mut guest = Guest::new(16);
    let mut connection = guest.connect(&served.socket());
    assert_eq!(connection.write(0, &[1; 512]), 0);
    fill(&connection.call);
    make_blocking(&connection.call);
    connection.offer(0, FLUSH, 0, 0);
    connection.kick();
    connection.answer();
    let before = open_descriptors();
    let memory = memfd_create("more", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, 4096).unwrap();
    for number in 0..200 {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE + MEMORY_LEN + number * 4096,
            memory_size: 4096,
            userspace_addr: USER_BASE + MEMORY_LEN + number * 4096,
            mmap_offset: 0,
            mmap_handle: memory.as_raw_fd(),
        };
        connection.frontend.add_mem_region(&region).unwrap();
        for _ in 0..10 {
            connection.frontend.set_vring_call(0, &connection.call).unwrap();
        }
        connection.frontend.set_vring_kick(0, &event()).unwrap();
        connection.frontend.set_vring_err(0, &event()).unwrap();
        for _ in 0..10 {
            connection.frontend.set_vring_call(0, &event()).unwrap();
        }
    }
    // The kick and the error event, in place of one of the same process, and the file of these regions.
    let added = open_descriptors() - before;
    assert!(added <= 8, "{added} more are open");
}
