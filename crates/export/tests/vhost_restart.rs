//! Servers that die: what they had taken is taken up by the next one, once.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::vhost_common::driver::Driver;
use crate::vhost_common::frontend::{Connection, Guest, OUT, offer, signalled};
use crate::vhost_common::{Served, options};
use crate::wait::wait_until;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vhost::VhostBackend;
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_export::vhost_user::Server;

/// Offsets in the inflight file of a queue (vhost-user specification, "Inflight I/O tracking").
const LAST_BATCH_HEAD: u64 = 12;
const ENTRIES: u64 = 16;
const ENTRY_LEN: u64 = 16;

/// What a predecessor wrote: it took the request at `head` as its `counter`th.
fn mark_taken(guest: &Guest, head: u16, counter: u64) {
    let file = &guest.inflight.as_ref().unwrap().1;
    let entry = ENTRIES + ENTRY_LEN * u64::from(head);
    file.write_all_at(&counter.to_le_bytes(), entry + 8).unwrap();
    file.write_all_at(&[1], entry).unwrap();
}

fn is_marked(guest: &Guest, head: u16) -> bool {
    let mut mark = [0];
    guest
        .inflight
        .as_ref()
        .unwrap()
        .1
        .read_exact_at(&mut mark, ENTRIES + ENTRY_LEN * u64::from(head))
        .unwrap();
    mark[0] != 0
}

/// A ring that has been served, and no server any more.
fn abandoned_ring(served: &Served) -> Guest {
    let mut guest = Guest::new(64);
    let mut connection = guest.connect(&served.socket());
    assert_eq!(connection.write(0, &[1; 512]), 0);
    // The server notices a moment later that nobody is there; until then it would serve what is offered next.
    connection.frontend.get_vring_base(0).unwrap();
    guest.disconnect(connection);
    guest
}

/// Offers a write of `fill` to sector `slot`.
fn offer_write(driver: &mut Driver, slot: u16, fill: u8) {
    driver.write(Connection::data_at(slot), &[fill; 512]);
    offer(driver, slot, OUT, slot.into(), 512);
}

#[test]
fn what_a_predecessor_took_is_answered_before_what_is_new_and_without_a_kick() {
    let served = Served::qcow2(1 << 20, options(1, 1));
    let mut guest = abandoned_ring(&served);
    for (slot, fill) in [(3, 33), (5, 55), (7, 77)] {
        offer_write(guest.driver(), slot, fill);
    }
    // Slot 7 was not taken; 5 is said to have been taken before 3.
    mark_taken(&guest, Connection::head(3), 41);
    mark_taken(&guest, Connection::head(5), 40);
    let mut connection = guest.connect(&served.socket());
    let mut answers = [connection.answer(), connection.answer(), connection.answer()];
    answers.sort_unstable();
    assert_eq!(answers, [(3, 0), (5, 0), (7, 0)]);
    assert_eq!(connection.driver.next_used(), None, "nothing twice");
    for (sector, fill) in [(3, 33), (5, 55), (7, 77)] {
        assert_eq!(connection.read(sector, 512), [fill; 512]);
    }
    assert!(![3, 5, 7].iter().any(|&slot| is_marked(&guest, Connection::head(slot))));
}

#[test]
fn a_batch_whose_index_was_published_is_not_done_again() {
    let served = Served::qcow2(1 << 20, options(1, 1));
    let mut guest = abandoned_ring(&served);
    for (slot, fill) in [(3, 33), (5, 55)] {
        offer_write(guest.driver(), slot, fill);
        mark_taken(&guest, Connection::head(slot), slot.into());
    }
    // Slot 5 was answered: its element and the index are in the ring, and there the server was killed.
    let driver = guest.driver();
    let index = driver.used_index();
    let element = [u32::from(Connection::head(5)).to_le_bytes(), 1u32.to_le_bytes()].concat();
    driver.write(driver.used() + 4 + 8 * u64::from(index % driver.size), &element);
    driver.write(driver.used() + 2, &(index + 1).to_le_bytes());
    assert_eq!(driver.next_used(), Some((Connection::head(5), 1)));
    let head = Connection::head(5).to_le_bytes();
    guest.inflight.as_ref().unwrap().1.write_all_at(&head, LAST_BATCH_HEAD).unwrap();
    let mut connection = guest.connect(&served.socket());
    assert_eq!(connection.answer(), (3, 0));
    assert_eq!(
        connection.read(5, 512),
        [0; 512],
        "the second write was the predecessor's, and is not redone"
    );
    assert_eq!(connection.read(3, 512), [33; 512]);
}

#[test]
fn the_base_does_not_matter_to_a_ring_that_was_served_before() {
    let served = Served::qcow2(1 << 20, options(1, 1));
    let mut guest = abandoned_ring(&served);
    offer_write(guest.driver(), 3, 33);
    mark_taken(&guest, Connection::head(3), 0);
    offer_write(guest.driver(), 4, 44);
    let mut connection = guest.connect(&served.socket());
    // As cloud-hypervisor does: the base is the available index, past everything unanswered.
    let available = connection.driver.next_available;
    let mut answers = [connection.answer().0, connection.answer().0];
    answers.sort_unstable();
    assert_eq!(answers, [3, 4]);
    offer_write(&mut connection.driver, 6, 66);
    connection.frontend.set_vring_base(0, available.wrapping_add(1)).unwrap();
    assert_eq!(connection.answer(), (6, 0));
}

#[test]
fn a_predecessor_that_did_not_call_is_made_up_for() {
    let served = Served::qcow2(1 << 20, options(1, 1));
    let mut guest = abandoned_ring(&served);
    let connection = guest.connect(&served.socket());
    assert!(signalled(&connection.call, Duration::from_secs(5)), "called though nothing was answered");
}

/// Not a test of its own: the server process of the test below, when that asks for one.
#[test]
fn server_process() {
    let (Ok(disk), Ok(socket)) = (std::env::var("VMSTRATA_TEST_DISK"), std::env::var("VMSTRATA_TEST_SOCKET"))
    else {
        return;
    };
    let journal_dir = Path::new(&disk).parent().map(Path::to_owned);
    let resources = Resources::new(ResourceOptions { journal_dir, ..ResourceOptions::default() });
    let disk = Disk::open(Path::new(&disk), &OpenOptions::default(), &resources).unwrap();
    let _server = Server::bind(Path::new(&socket), Arc::clone(&disk), options(1, 1)).unwrap();
    loop {
        std::thread::park();
    }
}

/// A server in a process of its own, killed when dropped.
struct Process(Child);

impl Process {
    fn start(disk: &Path, socket: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "vhost_restart::server_process", "--nocapture"]).stdout(Stdio::null());
        command.env("VMSTRATA_TEST_DISK", disk).env("VMSTRATA_TEST_SOCKET", socket);
        let process = Self(command.spawn().unwrap());
        wait_until("the server", || std::os::unix::net::UnixStream::connect(socket).is_ok());
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A guest that writes without pause, and remembers what it was promised.
struct Writer {
    rng: SmallRng,
    /// By slot: the sector and byte of the write under way.
    under_way: BTreeMap<u16, (u64, u8)>,
    /// By sector: the byte it must hold.
    promised: BTreeMap<u64, u8>,
    answers: usize,
}

impl Writer {
    const SLOTS: u16 = 16;
    /// Sectors of one slot, so that writes under way never meet.
    const SECTORS: u64 = 512;

    fn fill_up(&mut self, driver: &mut Driver) {
        for slot in 0..Self::SLOTS {
            if self.under_way.contains_key(&slot) {
                continue;
            }
            let sector = u64::from(slot) * Self::SECTORS + self.rng.random_range(0..Self::SECTORS);
            let fill = self.rng.random();
            driver.write(Connection::data_at(slot), &[fill; 512]);
            offer(driver, slot, OUT, sector, 512);
            self.under_way.insert(slot, (sector, fill));
        }
    }

    fn collect(&mut self, driver: &mut Driver) {
        while let Some((head, _)) = driver.next_used() {
            let slot = head / Connection::head(1);
            let (sector, fill) = self.under_way.remove(&slot).expect("every write is answered once");
            self.promised.insert(sector, fill);
            self.answers += 1;
        }
    }
}

#[test]
fn nothing_is_lost_or_doubled_however_often_the_server_is_killed() {
    const KILLS: usize = 25;
    let dir = tempfile::tempdir().unwrap();
    let paths: [PathBuf; 2] = [dir.path().join("disk.qcow2"), dir.path().join("disk.sock")];
    let [disk, socket] = &paths;
    let create = ["create", "-q", "-f", "qcow2", disk.to_str().unwrap(), "8M"];
    assert!(Command::new("qemu-img").args(create).status().unwrap().success());
    let rng = SmallRng::seed_from_u64(11);
    let mut writer = Writer { rng, under_way: BTreeMap::new(), promised: BTreeMap::new(), answers: 0 };
    let mut guest = Guest::new(64);
    for _ in 0..KILLS {
        let server = Process::start(disk, socket);
        let mut connection = guest.connect(socket);
        let life = Duration::from_micros(writer.rng.random_range(0..40_000));
        let end = Instant::now() + life;
        while Instant::now() < end {
            writer.fill_up(&mut connection.driver);
            connection.kick();
            writer.collect(&mut connection.driver);
        }
        drop(server);
        guest.disconnect(connection);
    }
    let _server = Process::start(disk, socket);
    let mut connection = guest.connect(socket);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !writer.under_way.is_empty() {
        assert!(Instant::now() < deadline, "{:?} are not answered", writer.under_way);
        writer.collect(&mut connection.driver);
    }
    assert!(writer.answers > KILLS * 16, "only {} answers", writer.answers);
    for (&sector, &fill) in &writer.promised {
        assert_eq!(connection.read(sector, 512), [fill; 512], "sector {sector}");
    }
}
