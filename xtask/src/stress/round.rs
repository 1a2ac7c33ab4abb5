//! One round: a disk of its own, a few lives of its server, and what is checked between them.
//!
//! ```text
//!   make the disk ──► start ──► read all, check ──► load and disturbances ──► kill, journal kept or lost ──► stock check ─┐
//!                       ▲                                       └──► stop ──► stock check, stock read of disk, snapshots ─┤
//!                       └─────────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::below;
use super::config::{Config, Style};
use super::disturb::Disturber;
use super::done::Done;
use super::export::Export;
use super::judge::{self, Leaks};
use super::load::Worker;
use super::model::{Journal, Model};
use super::nbd::Nbd;
use super::place::Place;
use super::server::{Knows, NAME, Server, Setup};
use super::shared::Shared;
use super::snapshots::Snapshots;
use super::vhost::{self, Guest};
use super::view::{Sectors, Wrong};

/// How a life of the server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill(Journal),
    Stop,
}

/// A round under way.
pub(super) struct Round {
    pub(super) shared: Arc<Shared>,
    setup: Setup,
    random: SmallRng,
    snapshots: Snapshots,
    /// A kill may have leaked clusters that were not repaired yet.
    may_leak: bool,
    done: Done,
}

impl Round {
    /// Makes the disk in `dir`.
    ///
    /// # Errors
    /// When a tool fails.
    pub(super) fn make(seed: u64, dir: &Path, sockets: &Path, options: &Given) -> Result<Self> {
        let mut random = SmallRng::seed_from_u64(seed);
        let config = Config::draw(seed, &mut random);
        let place = Place::make(dir, config.media, options.mounts)?;
        let (disk, values) = below::make(&config, &options.program, &place.images.path, &mut random)?;
        let setup = Setup {
            program: options.program.clone(),
            disk,
            run: place.run.path.clone(),
            out: place.out.clone(),
            sockets: sockets.to_owned(),
            direct: config.direct,
            knows: options.knows,
        };
        let shared = Arc::new(Shared::new(config, place, Model::new(values)));
        Ok(Self {
            shared,
            setup,
            random,
            snapshots: Snapshots::default(),
            may_leak: false,
            done: Done::default(),
        })
    }

    /// Runs it; `progress` is called now and then.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub(super) fn run(&mut self, progress: &dyn Fn(&Shared)) -> Result<Done> {
        let lives = self.shared.config.lives;
        let mut journal = Journal::Kept;
        let mut sizes = vec![self.shared.config.sectors];
        for life in 1..=lives {
            let end = if life == lives {
                End::Stop
            } else {
                match self.random.random_range(0..8) {
                    0..4 => End::Kill(Journal::Kept),
                    4..7 => End::Kill(Journal::Lost),
                    _ => End::Stop,
                }
            };
            self.shared.note(format!("life {life}"));
            (journal, sizes) = self
                .live(journal, &sizes, end, progress)
                .with_context(|| format!("life {life} of {lives}, to end with {end:?}"))?;
        }
        Ok(self.done)
    }

    /// One life of the server, and the checks after it. Returns what is left of the journal, and the sizes that the disk may
    /// have.
    fn live(
        &mut self,
        journal: Journal,
        sizes: &[u64],
        end: End,
        progress: &dyn Fn(&Shared),
    ) -> Result<(Journal, Vec<u64>)> {
        let server = self.setup.start(journal == Journal::Lost)?;
        judge::served(&self.shared, &self.setup, sizes)?;
        if self.shared.config.aged && self.done.starts == 0 {
            judge::age(&self.shared, &self.setup)?;
        }
        self.done.starts += 1;
        let (server, sizes) = self.load(server, end, progress)?;
        self.shared.place.images.empty()?;
        self.shared.set_full(false);
        self.shared.place.run.empty()?;
        let journal = match (server, end) {
            (Some(server), _) => {
                self.stopped(server, &sizes)?;
                Journal::Kept
            }
            (None, End::Kill(journal)) => {
                self.killed(journal)?;
                journal
            }
            (None, End::Stop) => Journal::Kept,
        };
        Ok((journal, sizes))
    }

    /// Load and disturbances, to the end of the life. Returns the server, unless it was killed.
    fn load(
        &mut self,
        server: Server,
        end: End,
        progress: &dyn Fn(&Shared),
    ) -> Result<(Option<Server>, Vec<u64>)> {
        let shared = Arc::clone(&self.shared);
        shared.begin();
        let (workers, guest) = self.connect()?;
        // Clusters that were given back can be used again some seconds later.
        let is_long = self.random.random_ratio(1, 4) || (shared.config.aged && self.done.starts == 1);
        let time =
            if is_long { self.random.random_range(3000..6000) } else { self.random.random_range(300..1800) };
        let ends = Instant::now() + Duration::from_millis(time);
        let (random, tally) = (&mut self.random, &mut self.done.tally);
        let mut disturber = Disturber::new(&shared, &self.setup, &mut self.snapshots, random, tally, ends);
        let worked = disturber.run(&|| progress(&shared));
        let ended = if worked.is_ok() && end != End::Stop {
            shared.expect_kill();
            let killed = server.kill().map(|()| None);
            shared.died();
            killed
        } else {
            Ok(Some(server))
        };
        shared.stop();
        let joined: Vec<_> = workers.into_iter().map(JoinHandle::join).collect();
        drop(guest);
        worked?;
        let server = ended.with_context(|| self.setup.last_log())?;
        ensure!(joined.iter().all(|worker| worker.is_ok()), "a worker panicked");
        shared.check()?;
        Ok((server, disturber.finish()?))
    }

    fn killed(&mut self, journal: Journal) -> Result<()> {
        self.done.kills += 1;
        self.may_leak = true;
        if journal == Journal::Lost {
            self.done.lost_journals += 1;
            self.shared.place.run.wipe()?;
            self.snapshots.journal_lost();
        }
        self.shared.model().killed(journal);
        // Now and then the next server starts at once.
        if self.random.random_ratio(1, 3) {
            return Ok(());
        }
        judge::check(&self.setup.disk, Leaks::Allowed).context("after a kill")?;
        self.snapshots.reconcile(&self.setup)
    }

    fn stopped(&mut self, server: Server, sizes: &[u64]) -> Result<()> {
        self.done.stops += 1;
        judge::served(&self.shared, &self.setup, sizes)?;
        server.stop().with_context(|| self.setup.last_log())?;
        let leaks = if self.may_leak { Leaks::Allowed } else { Leaks::Refused };
        judge::check(&self.setup.disk, leaks).context("after a clean end")?;
        if self.may_leak {
            judge::repair(&self.setup)?;
            judge::check(&self.setup.disk, Leaks::Refused).context("after a repair of leaks")?;
            self.may_leak = false;
        }
        let now = judge::now(&mut self.shared.model());
        judge::compare(&self.setup.disk, "qcow2", &self.setup.out, &now)?;
        self.snapshots.reconcile(&self.setup)?;
        self.done.judged += self.snapshots.judge(&self.setup)?;
        Ok(())
    }

    /// The connections of a life, each with a worker.
    fn connect(&mut self) -> Result<(Vec<JoinHandle<()>>, Guest)> {
        let config = self.shared.config.clone();
        let mut workers = Vec::new();
        let bytes = Sectors::new(0, config.longest().max(config.cluster())).bytes();
        let mut guest = vhost::connect(&self.setup.vhost(), config.vhost.len(), config.depth, bytes)?;
        for (number, (style, queue)) in config.vhost.iter().zip(guest.queues.drain(..)).enumerate() {
            workers.push(self.worker(queue, format!("vhost-user, queue {number}, {style:?}"), *style));
        }
        for (number, style) in config.nbd.iter().enumerate() {
            let structured = self.random.random();
            let export = Nbd::connect(&self.setup.nbd(), NAME, structured)?;
            workers.push(self.worker(export, format!("NBD, connection {number}, {style:?}"), *style));
        }
        Ok((workers, guest))
    }

    fn worker(&mut self, export: impl Export + 'static, name: String, style: Style) -> JoinHandle<()> {
        let random = SmallRng::from_rng(&mut self.random);
        let worker =
            Worker { export, name, style, random, shared: Arc::clone(&self.shared), next: VecDeque::new() };
        std::thread::spawn(move || worker.run())
    }

    /// What there is to say of an error: it, what happened to the sectors, and where the files are.
    pub(super) fn explain(&self, error: &anyhow::Error) -> String {
        let mut text = format!("{error:#}\n");
        let wrong = error.chain().find_map(|cause| cause.downcast_ref::<Wrong>());
        let range = wrong.map_or(Sectors::new(0, 0), |wrong| {
            let cluster = self.shared.config.cluster();
            Sectors::new(wrong.sector / cluster * cluster, cluster)
        });
        if let Some(wrong) = wrong {
            let number = wrong.sector / self.shared.config.cluster();
            text += &format!("cluster {number}, sectors {} to {}; ", range.start, range.end() - 1);
        }
        let path = self.setup.out.join("trail");
        let trail = self.shared.model().trail.of(range);
        match std::fs::write(&path, trail) {
            Ok(()) => text += &format!("what happened: {}\n", path.display()),
            Err(error) => text += &format!("what happened cannot be written: {error}\n"),
        }
        text += &format!("the server logged:\n{}\n", self.setup.last_log());
        match self.shared.place.keep() {
            Ok(kept) => text += &format!("files: {}", kept.display()),
            Err(error) => text += &format!("the files cannot be kept: {error:#}"),
        }
        text
    }

    /// Requests that were answered.
    pub(super) fn requests(&self) -> u64 {
        self.shared.counts.requests()
    }
}

/// What all rounds of a run have in common.
#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) program: std::path::PathBuf,
    pub(super) mounts: bool,
    pub(super) knows: Knows,
}
