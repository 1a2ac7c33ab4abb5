//! The loss window of tiered disks: guests that are faster than the wire, repositories that do not answer, flushes that wait.

use std::fs;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::flat::write;
use crate::common::io::Client;
use crate::common::{scratch, wait_until};
use crate::tier_support::{
    SIZE, block, host_as, image, newest_of, place, published, soon, sync, take_over, writes_of,
};
use tempfile::TempDir;
use vmstrata_disk::{Disk, Op};
use vmstrata_tier::{DurableAt, OnOutage, TierOptions, TierState, TierStatus, Tiered, Wire, repository_of};

const WRITE: Op = Op::Write { fua: false };
const PIECE: u64 = 256 << 10;

/// A tiered disk, whose repository can be taken away.
struct World {
    nas: TempDir,
    _tier: TempDir,
    path: PathBuf,
    disk: Arc<Disk>,
    tiered: Tiered,
}

impl World {
    fn new(options: TierOptions) -> Self {
        let (nas, tier) = (scratch(), scratch());
        let path = image(nas.path());
        let (disk, tiered) = host_as(&path, tier.path(), options).unwrap();
        Self { nas, _tier: tier, path, disk, tiered }
    }

    fn away(&self) -> PathBuf {
        self.nas.path().join("away")
    }

    fn take_away(&self) {
        fs::rename(repository_of(&self.path), self.away()).unwrap();
    }

    fn bring_back(&self) {
        fs::rename(self.away(), repository_of(&self.path)).unwrap();
    }

    fn status(&self) -> TierStatus {
        self.tiered.status()
    }

    fn is_stalled(&self) -> bool {
        matches!(self.status().state, TierState::Stalled { .. })
    }

    fn published_writes(&self) -> u64 {
        writes_of(&published(&newest_of(&self.path), &self.path))
    }
}

fn window(seconds: u64) -> TierOptions {
    TierOptions { window: Duration::from_secs(seconds), ..TierOptions::default() }
}

/// A guest that writes as fast as it may, with 8 requests at a time; never twice the same in a row.
struct Guest {
    client: Client,
    bytes: Vec<u8>,
    next: u64,
}

impl Guest {
    fn new(disk: &Arc<Disk>) -> Self {
        let mut guest = Self { client: Client::new(disk, 16), bytes: vec![7; PIECE as usize], next: 0 };
        (0..8).for_each(|_| guest.push());
        guest
    }

    fn push(&mut self) {
        let at = self.next * PIECE % SIZE;
        self.next += 1;
        self.client.push(WRITE, at, PIECE, Some(&self.bytes));
    }

    /// Writes for as long as something is not so; returns how many bytes.
    fn write_until(&mut self, mut is_so: impl FnMut() -> bool) -> u64 {
        let before = self.next;
        let patience = soon();
        while !is_so() {
            assert!(Instant::now() < patience, "it is not so for too long");
            let turn = Instant::now() + Duration::from_millis(20);
            for done in self.client.run_until(|| Instant::now() >= turn) {
                done.result.unwrap();
                self.push();
            }
        }
        (self.next - before) * PIECE
    }
}

#[test]
fn a_guest_that_is_faster_than_the_wire_is_slowed_and_published_within_the_window() {
    let rate = 24 << 20;
    let wire = Arc::new(Wire::new(NonZeroU64::new(rate)));
    let world = World::new(TierOptions { wire, ..window(2) });
    let mut guest = Guest::new(&world.disk);
    // The first epochs tell how fast the wire is.
    let calm = |status: &TierStatus| status.window.ships_bytes_a_second.is_some() && status.epoch.get() > 8;
    guest.write_until(|| calm(&world.status()));
    let (first, mut oldest, mut slowed) = (world.status().epoch.get(), 0, false);
    guest.write_until(|| {
        let status = world.status();
        let now = vmstrata_disk::snapshot::now_ns();
        oldest = oldest.max(status.window.unpublished_since_ns.map_or(0, |since| now - since));
        slowed |= status.window.slowed_to_bytes_a_second.is_some();
        status.epoch.get() >= first + 6
    });
    assert!(slowed, "{:?}", world.status());
    // The pacer's own tests hold it to the window; a busy host is given more. A guest that is not slowed gets far beyond that.
    assert!(oldest <= 6_000_000_000, "published after {} ms", oldest / 1_000_000);
}

#[test]
fn in_an_outage_writes_go_on_up_to_the_budget_and_wait_there() {
    let outage_bytes = NonZeroU64::new(16 << 20);
    let world = World::new(TierOptions { outage_bytes, ..window(1) });
    world.take_away();
    write(&world.disk, place(1), &block(1)).unwrap();
    wait_until("the outage", || world.is_stalled());
    let mut guest = Guest::new(&world.disk);
    let written = guest.write_until(|| world.status().window.writes_wait);
    assert!(written > 8 << 20, "{written}");
    let status = world.status();
    assert!(status.window.unpublished_bytes < 24 << 20, "{status:?}");
    // Reads go on, and flushes that nothing waits before.
    let mut other = Client::new(&world.disk, 4);
    other.push(Op::Read, 0, 4096, None);
    other.push(Op::Flush, 0, 0, None);
    assert!(other.drain().iter().all(|done| done.result.is_ok()));
    world.bring_back();
    guest.client.drain().into_iter().for_each(|done| done.result.unwrap());
    sync(&world.tiered).unwrap();
    assert_eq!(world.status().state, TierState::Publishing);
    assert!(!world.status().window.writes_wait);
}

#[test]
fn stalled_flushes_wait_once_a_write_is_older_than_the_window() {
    let world = World::new(TierOptions { on_outage: OnOutage::Stall, ..window(2) });
    world.take_away();
    let mut client = Client::new(&world.disk, 8);
    client.push(WRITE, place(1), 4096, Some(&block(1)));
    client.drain();
    client.push(Op::Flush, 0, 0, None);
    assert_eq!(client.drain().len(), 1, "it is younger than the window");
    wait_until("the outage", || world.is_stalled());
    let since = world.status().window.unpublished_since_ns.unwrap();
    wait_until("the window is past", || vmstrata_disk::snapshot::now_ns() > since + 2_100_000_000);
    client.push(WRITE, place(2), 4096, Some(&block(2)));
    assert_eq!(client.drain().len(), 1, "writes go on");
    client.push(Op::Flush, 0, 0, None);
    client.push(Op::Write { fua: true }, place(3), 4096, Some(&block(3)));
    let early = client.run_until(|| world.status().window.flushes_wait == 2);
    assert!(early.is_empty());
    world.bring_back();
    client.drain().into_iter().for_each(|done| done.result.unwrap());
    assert_eq!(world.published_writes(), 3);
}

#[test]
fn a_flush_that_is_to_be_durable_in_the_repository_is_published_when_it_completes() {
    let world = World::new(TierOptions { durability: DurableAt::Repository, ..window(600) });
    let mut client = Client::new(&world.disk, 64);
    for number in 1..=20 {
        client.push(WRITE, place(number), 4096, Some(&block(number)));
        client.drain();
        if number % 5 == 0 {
            client.push(Op::Flush, 0, 0, None);
            client.drain().into_iter().for_each(|done| done.result.unwrap());
            assert_eq!(world.published_writes(), number);
        }
    }
    let epoch = world.status().epoch.get();
    client.push(Op::Flush, 0, 0, None);
    client.drain();
    assert_eq!(world.status().epoch.get(), epoch, "nothing was written");
    // Those that come while one is published share the next.
    let writes: Vec<u64> = (21..=52).collect();
    for number in writes {
        client.push(Op::Write { fua: true }, place(number), 4096, Some(&block(number)));
    }
    client.drain().into_iter().for_each(|done| done.result.unwrap());
    assert_eq!(world.published_writes(), 52);
    let epochs = world.status().epoch.get() - epoch;
    assert!((1..16).contains(&epochs), "{epochs} epochs for 32 flushes");
}

#[test]
fn flushes_that_cannot_be_published_any_more_fail() {
    let other = scratch();
    let world = World::new(TierOptions { durability: DurableAt::Repository, ..window(600) });
    take_over(&world.path, other.path()).unwrap();
    let mut client = Client::new(&world.disk, 8);
    client.push(Op::Write { fua: true }, place(1), 4096, Some(&block(1)));
    let told = client.drain()[0].result.as_ref().unwrap_err().to_string();
    assert!(told.contains("publishes here since generation 2"), "{told}");
}

#[test]
fn held_epochs_stay_on_the_host_until_they_are_released_or_asked_for() {
    let world = World::new(window(1));
    let hour = TierOptions::HOLD_MAX;
    world.tiered.hold(Some(hour)).unwrap();
    let epoch = world.status().epoch;
    write(&world.disk, place(1), &block(1)).unwrap();
    wait_until("it is seen", || world.status().window.unpublished_since_ns.is_some());
    let since = world.status().window.unpublished_since_ns.unwrap();
    wait_until("the window is past", || vmstrata_disk::snapshot::now_ns() > since + 3_000_000_000);
    assert_eq!((world.status().epoch, world.status().state), (epoch, TierState::Publishing));
    assert!(world.status().window.held_until_ns.is_some());
    assert!(sync(&world.tiered).unwrap().epoch > epoch);
    write(&world.disk, place(2), &block(2)).unwrap();
    world.tiered.hold(None).unwrap();
    wait_until("it is published", || world.published_writes() == 2);
    assert_eq!(world.status().window.held_until_ns, None);
    for period in [Duration::ZERO, hour + Duration::from_secs(1)] {
        let told = world.tiered.hold(Some(period)).unwrap_err().to_string();
        assert!(told.contains("it takes 1 s to 1 h"), "{told}");
    }
}

#[test]
fn a_disk_whose_flushes_wait_for_the_repository_is_not_held() {
    let world = World::new(TierOptions { durability: DurableAt::Repository, ..window(600) });
    let told = world.tiered.hold(Some(Duration::from_secs(60))).unwrap_err().to_string();
    assert!(told.contains("durability=repository"), "{told}");
}

#[test]
fn disks_that_share_a_wire_ship_at_its_rate() {
    let rate = 4 << 20;
    let wire = Arc::new(Wire::new(NonZeroU64::new(rate)));
    let worlds = [(); 2].map(|()| World::new(TierOptions { wire: Arc::clone(&wire), ..window(600) }));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for world in &worlds {
            scope.spawn(move || {
                write(&world.disk, 0, &vec![7; 4 << 20]).unwrap();
                sync(&world.tiered).unwrap();
            });
        }
    });
    // 8 MiB, and less than a second's worth at once.
    assert!(began.elapsed() > Duration::from_millis(1500), "{:?}", began.elapsed());
    wire.set_rate(None);
    assert_eq!(wire.rate(), None);
}
