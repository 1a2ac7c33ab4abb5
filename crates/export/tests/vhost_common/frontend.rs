//! A frontend without a guest: the protocol through crate `vhost`, the rings through [`Driver`].

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::driver::{Driver, GUEST_BASE, USER_BASE, WRITE, header};

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// Bytes of guest memory.
pub const MEMORY_LEN: u64 = 16 << 20;
/// Offset of the buffers of requests, one [`SLOT_LEN`] each.
const SLOTS: u64 = 1 << 20;
const SLOT_LEN: u64 = 64 << 10;
/// Descriptors of a request.
const CHAIN: u16 = 3;
const WAIT: Duration = Duration::from_secs(20);

/// What survives a server: guest memory, the ring in it, and the inflight file.
pub struct Guest {
    pub memory: File,
    pub size: u16,
    pub inflight: Option<(VhostUserInflight, File)>,
    driver: Option<Driver>,
}

/// A connection with one queue running.
pub struct Connection {
    pub frontend: Frontend,
    pub socket: UnixStream,
    pub driver: Driver,
    pub kick: EventFd,
    pub call: EventFd,
}

impl Guest {
    pub fn new(size: u16) -> Self {
        Self::in_memory(size, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
    }

    pub fn in_memory(size: u16, flags: MemfdFlags) -> Self {
        let memory = memfd_create("guest", flags).unwrap();
        ftruncate(&memory, MEMORY_LEN).unwrap();
        let memory = File::from(memory);
        let driver = Some(Driver::new(memory.try_clone().unwrap(), size, 0, 0));
        Self { memory, size, inflight: None, driver }
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: MEMORY_LEN,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.memory.as_raw_fd(),
        }
    }

    /// Connects and starts queue 0 where it is.
    pub fn connect(&mut self, socket: &Path) -> Connection {
        let (mut frontend, socket) = negotiate(socket);
        let driver = self.driver.take().expect("one connection at a time");
        let wanted = VhostUserInflight::new(0, 0, 1, self.size);
        let (info, file) = self.inflight.get_or_insert_with(|| frontend.get_inflight_fd(&wanted).unwrap());
        frontend.set_inflight_fd(info, file.as_raw_fd()).unwrap();
        frontend.set_mem_table(&[self.region()]).unwrap();
        let mut connection = Connection { frontend, socket, driver, kick: event(), call: event() };
        connection.start();
        connection
    }

    /// The server is gone, or leaves.
    pub fn disconnect(&mut self, connection: Connection) {
        self.driver = Some(connection.driver);
    }

    /// The driver, while there is no connection.
    pub fn driver(&mut self) -> &mut Driver {
        self.driver.as_mut().expect("no connection")
    }
}

pub fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

/// Fills the event's counter, whatever is in it.
pub fn fill(event: &EventFd) {
    while event.write(u64::MAX - 1).is_err() {
        let _ = event.read();
    }
}

/// Makes writes to the event wait if it is full, and reads if it is empty; the server's, too: it has the same open file
/// description.
pub fn make_blocking(event: &EventFd) {
    // SAFETY: open as long as `event`.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    fcntl_setfl(fd, fcntl_getfl(fd).unwrap() - OFlags::NONBLOCK).unwrap();
}

/// Connects and agrees on everything that is offered; also gives a handle on the socket, to say what crate
/// `vhost` would not.
pub fn negotiate(socket: &Path) -> (Frontend, UnixStream) {
    let stream = UnixStream::connect(socket).unwrap();
    let twin = stream.try_clone().unwrap();
    let mut frontend = Frontend::from_stream(stream, 1);
    frontend.set_owner().unwrap();
    let offered = frontend.get_features().unwrap();
    assert!(offered & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0);
    let protocol = frontend.get_protocol_features().unwrap();
    assert!(protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
    frontend.set_protocol_features(protocol).unwrap();
    frontend.set_features(offered & !VhostUserVirtioFeatures::LOG_ALL.bits()).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    (frontend, twin)
}

impl Connection {
    pub fn ring_config(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: self.driver.size,
            queue_size: self.driver.size,
            flags: 0,
            desc_table_addr: USER_BASE + self.driver.descriptors(),
            used_ring_addr: USER_BASE + self.driver.used(),
            avail_ring_addr: USER_BASE + self.driver.available(),
            log_addr: None,
        }
    }

    /// Starts queue 0 as QEMU does: from the used index, whatever the device had taken.
    pub fn start(&mut self) {
        let frontend = &mut self.frontend;
        frontend.set_vring_num(0, self.driver.size).unwrap();
        frontend.set_vring_base(0, self.driver.used_index()).unwrap();
        let config = self.ring_config();
        let frontend = &mut self.frontend;
        frontend.set_vring_addr(0, &config).unwrap();
        frontend.set_vring_kick(0, &self.kick).unwrap();
        frontend.set_vring_call(0, &self.call).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
    }

    /// Where the data of the request in `slot` is, as an offset in guest memory.
    pub fn data_at(slot: u16) -> u64 {
        slot_at(slot) + 4096
    }

    /// The head descriptor of the request in `slot`.
    pub fn head(slot: u16) -> u16 {
        slot * CHAIN
    }

    /// Makes a request available, without a kick.
    pub fn offer(&mut self, slot: u16, kind: u32, sector: u64, len: u32) {
        offer(&mut self.driver, slot, kind, sector, len);
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// The next answer's slot and status; waits for it.
    pub fn answer(&mut self) -> (u16, u8) {
        let deadline = Instant::now() + WAIT;
        loop {
            if let Some((head, _)) = self.driver.next_used() {
                let slot = head / CHAIN;
                return (slot, self.driver.read(slot_at(slot) + 16, 1)[0]);
            }
            assert!(Instant::now() < deadline, "no answer");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// One request from kick to call.
    pub fn request(&mut self, kind: u32, sector: u64, len: u32) -> u8 {
        let event = self.driver.used_index();
        self.driver.set_used_event(event);
        self.offer(0, kind, sector, len);
        self.kick();
        self.wait_call();
        let (slot, status) = self.answer();
        assert_eq!(slot, 0);
        status
    }

    pub fn write(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        self.driver.write(Self::data_at(0), bytes);
        self.request(OUT, sector, bytes.len() as u32)
    }

    pub fn read(&mut self, sector: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.request(IN, sector, len), 0);
        self.driver.read(Self::data_at(0), len as usize)
    }

    /// Waits until the device calls.
    pub fn wait_call(&self) {
        assert!(signalled(&self.call, WAIT), "no call");
    }
}

/// Where the request in `slot` has its header and status.
pub fn slot_at(slot: u16) -> u64 {
    SLOTS + u64::from(slot) * SLOT_LEN
}

/// Makes a request available in `slot`.
pub fn offer(driver: &mut Driver, slot: u16, kind: u32, sector: u64, len: u32) {
    let at = slot_at(slot);
    driver.write(at, &header(kind, sector));
    driver.write(at + 16, &[0xff]);
    let (guest, data) = (GUEST_BASE + at, GUEST_BASE + Connection::data_at(slot));
    let direction = if matches!(kind, IN | GET_ID) { WRITE } else { 0 };
    let mut chain = vec![(guest, 16, 0), (data, len, direction), (guest + 16, 1, WRITE)];
    if len == 0 {
        chain.remove(1);
    }
    driver.set_chain(Connection::head(slot), &chain);
    driver.offer(Connection::head(slot));
}

/// Whether the event is signalled within `time`; takes the signal.
pub fn signalled(event: &EventFd, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while event.read().is_err() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}
