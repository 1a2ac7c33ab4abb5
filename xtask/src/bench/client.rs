//! The one client all servers are measured with: libblkio's drivers, without a guest.
//!
//! ```text
//!   Load ──► Client ──► blkio virtio-blk-vhost-user ──► a socket: QEMU or vmstrata
//!                  └──► blkio io_uring              ──► a raw file: the floor
//! ```
//!
//! Same loop, same memory, same random positions for every target. Data is checked by [`Client::check`] and
//! [`Client::verify`], never inside a timed run.
//!
//! This is the only module of the repository outside `store` and `export` with `unsafe`: blkio hands out raw
//! memory and completions that it has filled in.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use vmstrata_migrate::follow::Kind;

use super::load::{Load, Outcome, Request, Run, Turn, Watch};
use super::results::quantile;
use crate::chain::pattern::{self, Writer, mix};

/// Longest silence of a server before a run is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Completions taken at once.
const BATCH: usize = 64;
/// Request memory: enough for 1 MiB at queue depth 8.
const MEMORY: usize = 8 << 20;

/// What a client talks to.
#[derive(Clone, Debug)]
pub enum Target {
    /// A vhost-user-blk socket; the client sleeps until the server interrupts it, as a guest does.
    VhostUser(PathBuf),
    /// The same with a client that never sleeps but watches the ring: what the server alone can do.
    VhostUserPolled(PathBuf),
    /// A raw file, through io_uring and the page cache.
    RawFile(PathBuf),
}

/// A connection with one queue and its request memory.
pub struct Client {
    queue: Blkioq,
    memory: MemoryRegion,
    capacity: u64,
    data_seed: u64,
    // Dropped last: the queue and the memory belong to it.
    _device: Blkio,
}

/// The time of each request.
#[derive(Default)]
struct Times {
    started: Vec<Option<Instant>>,
    ms: Vec<f64>,
}

impl Watch for Times {
    fn started(&mut self, slot: usize) {
        self.started.resize(self.started.len().max(slot + 1), None);
        self.started[slot] = Some(Instant::now());
    }

    fn completed(&mut self, slot: usize) {
        self.ms.extend(self.started[slot].map(|started| started.elapsed().as_secs_f64() * 1000.0));
    }

    fn goes_on(&self) -> bool {
        true
    }
}

impl Client {
    /// Connects to `target`; `data_seed` is the chain's seed, for written data and for checks. A device that
    /// is read-only takes only a client that is `read_only` too.
    ///
    /// # Errors
    /// When the target cannot be reached or offers no queue.
    pub fn connect(target: &Target, data_seed: u64, read_only: bool) -> Result<Self> {
        let (driver, path, poll) = match target {
            Target::VhostUser(path) => ("virtio-blk-vhost-user", path, false),
            Target::VhostUserPolled(path) => ("virtio-blk-vhost-user", path, true),
            Target::RawFile(path) => ("io_uring", path, false),
        };
        let device = || -> Result<Blkio> {
            let mut device = Blkio::new(driver)?;
            device.set_str("path", path.to_str().context("the path is not UTF-8")?)?;
            device.set_bool("read-only", read_only)?;
            device.connect()?;
            Ok(device)
        };
        device()
            .and_then(|device| Self::start_device(device, poll, data_seed))
            .with_context(|| format!("{driver} at {}", path.display()))
    }

    fn start_device(mut device: Blkio, poll: bool, data_seed: u64) -> Result<Self> {
        let capacity = device.get_u64("capacity")?;
        device.set_i32("num-queues", i32::from(!poll))?;
        device.set_i32("num-poll-queues", i32::from(poll))?;
        let mut started = device.start()?;
        let queue = started.queues.pop().or_else(|| started.poll_queues.pop()).context("no queue")?;
        let memory = device.alloc_mem_region(MEMORY)?;
        device.map_mem_region(&memory)?;
        Ok(Self { queue, memory, capacity, data_seed, _device: device })
    }

    /// Bytes of the disk.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The request memory of `slot`.
    fn buffer(&self, slot: usize, block: usize) -> *mut u8 {
        assert!(
            (slot + 1) * block <= self.memory.len,
            "{slot} slots of {block} bytes pass the request memory"
        );
        (self.memory.addr + slot * block) as *mut u8
    }

    fn bytes(&mut self, slot: usize, block: usize) -> &mut [u8] {
        let start = self.buffer(slot, block);
        // SAFETY: the region is mapped for as long as `self`, `buffer` has checked the bounds, and callers
        // look only at slots without a request in flight, so no one else writes there.
        unsafe { std::slice::from_raw_parts_mut(start, block) }
    }

    /// Runs `load` and counts what completed.
    ///
    /// # Errors
    /// When a request fails or the server goes silent.
    pub fn run(&mut self, load: &Load) -> Result<Outcome> {
        self.run_watched(load, self.capacity, &mut ())
    }

    /// Runs `load`; returns requests a second, and the time in ms that 99 of 100 of them do not exceed.
    ///
    /// # Errors
    /// As [`Client::run`].
    pub fn run_timed(&mut self, load: &Load) -> Result<(f64, f64)> {
        let mut times = Times::default();
        let outcome = self.run_watched(load, self.capacity, &mut times)?;
        Ok((outcome.iops(), quantile(&times.ms, 0.99)))
    }

    /// Runs `load` on the first `span` bytes of the disk, watched.
    ///
    /// # Errors
    /// As [`Client::run`].
    pub fn run_watched(&mut self, load: &Load, span: u64, watch: &mut impl Watch) -> Result<Outcome> {
        let mut run = Run::new(load, span.min(self.capacity))?;
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; BATCH];
        let start = Instant::now();
        let mut in_flight = 0;
        for slot in 0..load.depth {
            watch.started(slot);
            in_flight += usize::from(self.start(&mut run, slot));
        }
        while in_flight > 0 {
            let mut patience = PATIENCE;
            let done = self.queue.do_io(&mut completions, 1, Some(&mut patience), None)?;
            let again = start.elapsed() < load.time && watch.goes_on();
            for completion in &completions[..done] {
                // SAFETY: `do_io` has filled in the first `done` completions.
                let completion = unsafe { completion.assume_init_ref() };
                ensure!(completion.ret == 0, "a request failed: errno {}", -completion.ret);
                run.requests += 1;
                watch.completed(completion.user_data);
                if again {
                    watch.started(completion.user_data);
                }
                if !(again && self.start(&mut run, completion.user_data)) {
                    in_flight -= 1;
                }
            }
        }
        Ok(Outcome { requests: run.requests, elapsed: start.elapsed(), written: run.written })
    }

    /// Starts the next request of `run`; `false` when there is none.
    fn start(&mut self, run: &mut Run<'_>, slot: usize) -> bool {
        let block = run.load.block;
        let Some((turn, at)) = run.next() else { return false };
        match turn {
            Turn::Read => self.queue.read(at, self.buffer(slot, block), block, slot, ReqFlags::empty()),
            Turn::Write(round) => {
                let seed = self.data_seed;
                pattern::fill(self.bytes(slot, block), at, Writer::client(round), seed);
                run.written[(at / block as u64) as usize] = true;
                let flags = if run.load.fua { ReqFlags::FUA } else { ReqFlags::empty() };
                self.queue.write(at, self.buffer(slot, block), block, slot, flags);
            }
        }
        true
    }

    /// Sends requests at their times from now on, whether earlier ones are answered or not, until there is none left or `goes_on` says no.
    /// Returns the time in ms that each took, in their order.
    ///
    /// # Errors
    /// As [`Client::run`].
    pub fn replay(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        goes_on: impl Fn() -> bool,
    ) -> Result<Vec<f64>> {
        // All reads share one half of the memory, which is not looked at, and all writes the other.
        let seed = self.data_seed;
        pattern::fill(self.bytes(1, MEMORY / 2), 0, Writer::client(0), seed);
        let (into, from) = (self.buffer(0, MEMORY / 2), self.buffer(1, MEMORY / 2));
        let mut requests = requests.into_iter().take_while(|_| goes_on()).peekable();
        let (mut sent, mut ms, mut in_flight) = (Vec::new(), Vec::new(), 0);
        let start = Instant::now();
        loop {
            while let Some(Request { range, kind, .. }) =
                requests.next_if(|request| request.at <= start.elapsed())
            {
                let (at, len, number) = (range.start.get(), range.len as usize, sent.len());
                ensure!(len <= MEMORY / 2, "a request of {len} bytes passes the request memory");
                sent.push(Instant::now());
                match kind {
                    Kind::Read => self.queue.read(at, into, len, number, ReqFlags::empty()),
                    Kind::Write => self.queue.write(at, from, len, number, ReqFlags::empty()),
                }
                in_flight += 1;
            }
            ms.resize(sent.len(), 0.0);
            let wait = match requests.peek() {
                Some(next) => next.at.saturating_sub(start.elapsed()),
                None if in_flight == 0 => return Ok(ms),
                None => PATIENCE,
            };
            if in_flight == 0 {
                // The guest's own work: there is nothing to wait for.
                thread::sleep(wait);
                continue;
            }
            let done = completed(&mut self.queue, wait)?;
            ensure!(wait < PATIENCE || !done.is_empty(), "the server is silent");
            for (number, ret) in done {
                ensure!(ret == 0, "a request failed: errno {}", -ret);
                ms[number] = sent[number].elapsed().as_secs_f64() * 1000.0;
                in_flight -= 1;
            }
        }
    }

    /// One request in flight at a time, finished before returning.
    fn one(&mut self, submit: impl FnOnce(&mut Blkioq, *mut u8)) -> Result<()> {
        let buffer = self.buffer(0, MEMORY);
        submit(&mut self.queue, buffer);
        let mut completion = [const { MaybeUninit::<Completion>::uninit() }; 1];
        let mut patience = PATIENCE;
        let done = self.queue.do_io(&mut completion, 1, Some(&mut patience), None)?;
        ensure!(done == 1, "no completion");
        // SAFETY: `do_io` has filled in one completion.
        let ret = unsafe { completion[0].assume_init_ref() }.ret;
        if ret != 0 { bail!("a request failed: errno {}", -ret) } else { Ok(()) }
    }

    /// Writes `len` bytes at `at` as `writer` does.
    ///
    /// # Errors
    /// When the write fails.
    pub fn write(&mut self, at: u64, len: usize, writer: Writer) -> Result<()> {
        let seed = self.data_seed;
        pattern::fill(self.bytes(0, len), at, writer, seed);
        self.one(|queue, buffer| queue.write(at, buffer, len, 0, ReqFlags::empty()))
    }

    /// Makes everything written so far stable.
    ///
    /// # Errors
    /// When the flush fails.
    pub fn flush(&mut self) -> Result<()> {
        self.one(|queue, _| queue.flush(0, ReqFlags::empty()))
    }

    /// Reads `len` bytes at `at`.
    ///
    /// # Errors
    /// When the read fails.
    pub fn read(&mut self, at: u64, len: usize) -> Result<&[u8]> {
        self.one(|queue, buffer| queue.read(at, buffer, len, 0, ReqFlags::empty()))?;
        Ok(self.bytes(0, len))
    }

    /// Reads `len` bytes at `at` and checks each sector against `expected`, which names its writer (`None`:
    /// zeros) by guest offset.
    ///
    /// # Errors
    /// When the read fails or a sector is wrong.
    pub fn check(&mut self, at: u64, len: usize, expected: &dyn Fn(u64) -> Option<Writer>) -> Result<()> {
        let seed = self.data_seed;
        for (sector, bytes) in (0..).zip(self.read(at, len)?.chunks(pattern::SECTOR)) {
            let at = at + sector * pattern::SECTOR as u64;
            pattern::check(bytes, at, expected(at), seed)?;
        }
        Ok(())
    }

    /// Checks the disk from its start on, `step` bytes at a time, until its end or the time is up. Returns
    /// the number of bytes checked; when time is short, positions are drawn from the whole disk instead.
    ///
    /// # Errors
    /// As [`Client::check`].
    pub fn verify(
        &mut self,
        time: Duration,
        whole: bool,
        expected: &dyn Fn(u64) -> Option<Writer>,
    ) -> Result<u64> {
        let step = if whole { 1 << 20 } else { 4096 };
        let blocks = self.capacity.div_ceil(step);
        let start = Instant::now();
        for index in 0..blocks {
            if !whole && start.elapsed() > time {
                return Ok(index * step);
            }
            let block = if whole { index } else { mix(index ^ self.data_seed) % blocks };
            let at = block * step;
            self.check(at, step.min(self.capacity - at) as usize, expected)?;
        }
        Ok(self.capacity)
    }
}

/// Hands what was queued to the device.
///
/// # Errors
/// When the device cannot be told.
pub fn submit(queue: &mut Blkioq) -> Result<()> {
    Ok(queue.do_io(&mut [], 0, None, None).map(drop)?)
}

/// Waits for completions, for `wait` at most: the number that each request was given, and 0 or a negative error number.
///
/// # Errors
/// When the device cannot be asked.
pub fn completed(queue: &mut Blkioq, mut wait: Duration) -> Result<Vec<(usize, i32)>> {
    let mut completions = [const { MaybeUninit::<Completion>::uninit() }; BATCH];
    let done = match queue.do_io(&mut completions, 1, Some(&mut wait), None) {
        Ok(done) => done,
        Err(error) if error.errno() == blkio::Errno::TIME => 0,
        Err(error) => return Err(error.into()),
    };
    // SAFETY: `do_io` has filled in the first `done` completions.
    let filled = completions[..done].iter().map(|completion| unsafe { completion.assume_init_ref() });
    Ok(filled.map(|completion| (completion.user_data, completion.ret)).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vmstrata_types::{GuestOffset, GuestRange};

    use super::super::load::Access;
    use super::*;

    fn raw_disk(dir: &Path) -> Target {
        let path = dir.join("disk.raw");
        let mut bytes = vec![0; 4 << 20];
        pattern::fill(&mut bytes[..1 << 20], 0, Writer::layer(0), 5);
        std::fs::write(&path, bytes).unwrap();
        Target::RawFile(path)
    }

    fn base(at: u64) -> Option<Writer> {
        (at < 1 << 20).then(|| Writer::layer(0))
    }

    #[test]
    fn a_disk_is_verified_and_a_wrong_expectation_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut client = Client::connect(&raw_disk(dir.path()), 5, false).unwrap();
        assert_eq!(client.verify(Duration::ZERO, true, &base).unwrap(), 4 << 20);
        assert!(client.verify(Duration::ZERO, true, &|_| None).is_err());
        assert!(client.check(0, 4096, &|_| Some(Writer::layer(1))).is_err());
    }

    #[test]
    fn requests_of_a_trace_are_sent_at_their_times_until_they_are_no_longer_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let mut client = Client::connect(&raw_disk(dir.path()), 5, false).unwrap();
        let request = |number: u64| {
            let kind = if number == 1 { Kind::Write } else { Kind::Read };
            let range = GuestRange::new(GuestOffset::new((3 << 20) + number * 512), 512);
            Request { at: Duration::from_millis(10 * number), range, kind }
        };
        let start = Instant::now();
        let ms = client.replay((0..3).map(request), || true).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert!(ms.len() == 3 && ms.iter().all(|ms| *ms > 0.0), "{ms:?}");
        assert!(client.read((3 << 20) + 512, 512).unwrap().iter().any(|byte| *byte > 0));
        assert!(client.read((3 << 20) + 1024, 512).unwrap().iter().all(|byte| *byte == 0));
        let left = std::cell::Cell::new(5);
        let goes_on = || left.replace(left.get() - 1) > 0;
        assert_eq!(client.replay((0..).map(request), goes_on).unwrap().len(), 5);
    }

    #[test]
    fn written_blocks_read_back_as_written_and_the_others_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let mut client = Client::connect(&raw_disk(dir.path()), 5, false).unwrap();
        let access = Access::RandomWrite { round: 2 };
        let load =
            Load { access, fua: false, block: 4096, depth: 8, time: Duration::from_millis(2), seed: 3 };
        let outcome = client.run(&load).unwrap();
        assert!(outcome.requests >= 8 && outcome.iops() > 0.0);
        assert!(outcome.written.iter().any(|written| *written));
        client.flush().unwrap();
        let written = &outcome.written;
        let expected =
            |at: u64| if written[(at / 4096) as usize] { Some(Writer::client(2)) } else { base(at) };
        client.verify(Duration::ZERO, true, &expected).unwrap();
    }
}
