//! A tiered disk as its server has it: opened, told of, asked for what cannot wait, and ended. What publishes it is the engine.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, OpenOptions, Resources};
use vmstrata_repo::Repository;

use crate::ahead;
use crate::boot::BOOT;
use crate::copies::{Claimed, claim};
use crate::engine::{Engine, Held};
use crate::error::{Error, Result};
use crate::merger::Ground;
use crate::metered::Watched;
use crate::pending::{CutState, PendingSnapshot};
use crate::place::Place;
use crate::rebasing::Rebasing;
use crate::remote::Remote;
use crate::replica::Replica;
use crate::shared::{Orders, Shared, ended};
use crate::states::{check_free, find_snapshot};
use crate::status::{DurableAt, TierOptions, TierStatus};

/// A tiered disk, or the disks of a group, published from this host until this is dropped.
#[derive(Debug)]
pub struct Tiered {
    pub(crate) members: Vec<Place>,
    pub(crate) shared: Arc<Shared>,
    /// Of the first disk.
    ground: Arc<Ground>,
    /// Whoever closes them waits for no more than a cut.
    disks: Vec<Weak<Disk>>,
    pub(crate) repository: Arc<dyn Repository>,
    /// What reads the layers that are in the repository, if they are read through a cache.
    remote: Option<Arc<Remote>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Held while the disks are handed over or taken back: what is half offered must not be named.
    pub(crate) handing: Mutex<()>,
}

/// A state of a tiered disk that was given a name.
#[derive(Clone, Debug)]
pub struct TakenState {
    /// The newest layer of each disk, in the repository, in the order of [`Place::members`].
    pub layers: Vec<PathBuf>,
    /// For how long the guest's writes were held.
    pub pause: Duration,
}

impl Tiered {
    /// Opens a tiered disk, or all disks of a group, and publishes them from now on; of ordinary images it makes such. `opens` says how each
    /// is opened, in the order of [`Place::members`], in which the disks are returned.
    ///
    /// # Errors
    /// [`Error::NoGroup`], [`Error::Incomplete`]; [`Error::Fenced`] for a disk that another copy publishes; an image that cannot be tiered; a repository that does not answer;
    /// whatever the host reports.
    ///
    /// # Panics
    /// Without as many options as there are disks.
    pub fn open(
        place: &Place,
        options: TierOptions,
        opens: &[OpenOptions],
        resources: &Arc<Resources>,
    ) -> Result<(Vec<Arc<Disk>>, Self)> {
        assert_eq!(opens.len(), place.members().len(), "{place}: one for each disk");
        let mut watched = Watched::new(&options.wire);
        let Claimed { copy, publisher, pins } =
            claim(place, opens, resources, |repository| watched.of(repository))?;
        let (merges, meter) = (watched.merges(), watched.meter);
        let running = Vec::new();
        let held = Held { copy, publisher, pins, meter, merges, running, reads_past_cache: false };
        Self::run(place, options, opens, resources, held)
    }

    /// Publishes disks that are claimed.
    pub(crate) fn run(
        place: &Place,
        options: TierOptions,
        opens: &[OpenOptions],
        resources: &Arc<Resources>,
        held: Held,
    ) -> Result<(Vec<Arc<Disk>>, Self)> {
        let members = place.members();
        let engine = Engine::new(place, options, opens, resources, held)?;
        let (disks, ground) = (engine.disks().to_vec(), engine.ground());
        let (shared, repository, remote) = (engine.shared(), engine.repository(), place.remote()?);
        if let (Some(remote), Some(files)) = (&remote, place.files()) {
            let layers = disks.iter().flat_map(|disk| disk.layers());
            let chain: Vec<PathBuf> = layers.map(|layer| layer.path).collect();
            let replica = Replica::of(files, chain.iter().map(PathBuf::as_path))?;
            ahead::begin(remote, &replica.objects(), BOOT);
        }
        let failed = || Error::of_file(&place.path, "start the threads that publish it");
        let watched = (shared.clone(), disks.clone());
        let watch = move || watched.0.watch(&watched.1);
        let start = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let publishes = start("tier").spawn(move || engine.run()).map_err(failed())?;
        let (weak, threads) = (disks.iter().map(Arc::downgrade).collect(), Mutex::new(vec![publishes]));
        let tiered = Self {
            members,
            shared,
            ground,
            disks: weak,
            repository,
            remote,
            threads,
            handing: Mutex::default(),
        };
        // The watch ends with the engine.
        tiered.threads.lock().push(start("tier-watch").spawn(watch).map_err(failed())?);
        Ok((disks, tiered))
    }

    /// What is published now, and what is not.
    pub fn status(&self) -> TierStatus {
        self.with_reads(self.shared.status())
    }

    /// Holds epochs on this host for so long, or no longer. Whoever asks for a cut has it published all the same.
    ///
    /// # Errors
    /// [`Error::NotHeld`]: a period of nothing or above [`TierOptions::HOLD_MAX`], a disk whose flushes wait to be published.
    pub fn hold(&self, period: Option<Duration>) -> Result<TierStatus> {
        let options = self.shared.window.options();
        let why = match period {
            Some(period) if period.is_zero() || period > TierOptions::HOLD_MAX => "it takes 1 s to 1 h",
            Some(_) if options.durability == DurableAt::Repository => {
                "its flushes wait to be published (durability=repository)"
            }
            _ => {
                self.shared.window.hold(period);
                self.shared.changed.notify_all();
                self.shared.watched.notify_all();
                return Ok(self.status());
            }
        };
        Err(Error::NotHeld { repository: self.status().repository, why })
    }

    /// With what is known of reads from the repository.
    fn with_reads(&self, status: TierStatus) -> TierStatus {
        let Some(remote) = &self.remote else { return status };
        let cache = remote.cache();
        let cache = Some((cache.path(), cache.usage()));
        TierStatus { cache, silent_since: remote.silent_since(), ..status }
    }

    /// Cuts the disks and waits until that is published, and their paths lead to it.
    ///
    /// # Errors
    /// [`Error::NotPublished`], also at `deadline`: the engine tries on, unless it was fenced.
    pub fn sync(&self, deadline: Instant) -> Result<TierStatus> {
        self.cut()?;
        self.publish(deadline)?;
        Ok(self.status())
    }

    /// Gives the state that the disks have now a name, under which its repository keeps it. Calls `is_cut` as soon as the state is cut off, and
    /// returns when it is published.
    ///
    /// # Errors
    /// [`Error::NameTaken`], a name that is none; [`Error::NotPublished`], also at `deadline`: the state gets no name then.
    pub fn snapshot(
        &self,
        info: &SnapshotInfo,
        deadline: Instant,
        is_cut: impl FnOnce(),
    ) -> Result<TakenState> {
        check_free(&*self.repository, &info.name)?;
        let cut = self.cut_for(info);
        is_cut();
        let CutState { pause, .. } = cut?;
        let published = self.publish(deadline);
        if self.withdraw(&info.name, info.taken_ns)? {
            published?;
        }
        let pin = find_snapshot(&*self.repository, &info.name, info.taken_ns)?;
        let layer = |member: &Place| member.layer(member.state(&pin.epoch).newest());
        Ok(TakenState { layers: self.members.iter().map(layer).collect(), pause })
    }

    /// Cuts off the state that the disks have now, and does not ask the repository for anything. The state gets the name once it is published, also by
    /// the process that goes on with this host's copy after this one; if another snapshot has that name by then, it gets none, and the log
    /// says so.
    ///
    /// # Errors
    /// [`Error::NameTaken`] by one that waits, a name that is none, too many that wait; whatever the host reports.
    pub fn cut_for(&self, info: &SnapshotInfo) -> Result<CutState> {
        info.encode()?;
        let cut = self.cut()?;
        self.shared.pending.add(PendingSnapshot::new(info, cut.epoch))?;
        self.shared.changed.notify_all();
        Ok(cut)
    }

    /// Gives a state that waits to be published no name. False if it does not wait: it has its name, or there is none.
    ///
    /// # Errors
    /// Whatever the host reports: it still waits.
    pub fn withdraw(&self, name: &str, taken_ns: u64) -> Result<bool> {
        self.shared.pending.remove(name, taken_ns)
    }

    /// Begins to have the disk stand on the published layer `onto` of its base, while its guest goes on. One rebase at a time: the caller sees to
    /// that.
    ///
    /// # Errors
    /// [`Error::OtherBase`] for disks of a group, and for those whose repository is no directory; a base on another file system; whatever host
    /// and repository report.
    pub fn begin_rebase(&self, onto: &Path) -> Result<Rebasing> {
        Rebasing::begin(&self.shared, &self.ground, &self.open_disks()?, onto)
    }

    pub(crate) fn cut(&self) -> Result<CutState> {
        self.shared.cut(&self.open_disks()?)
    }

    /// The disks, while they are published.
    pub(crate) fn open_disks(&self) -> Result<Vec<Arc<Disk>>> {
        let disks = self.disks.iter().map(Weak::upgrade).collect::<Option<Vec<_>>>();
        let orders = self.shared.orders.lock();
        disks.filter(|_| !orders.has_ended).ok_or_else(|| ended(&orders))
    }

    /// Has what is cut off published, and waits for it.
    pub(crate) fn publish(&self, deadline: Instant) -> Result<()> {
        let own = {
            let mut orders = self.shared.orders.lock();
            orders.asked += 1;
            self.shared.changed.notify_all();
            orders.asked
        };
        self.wait(deadline, |orders| match orders {
            Orders { done, .. } if *done >= own => Some(Ok(())),
            Orders { failed: (failed, why), .. } if *failed >= own => {
                Some(Err(Error::NotPublished(why.clone())))
            }
            _ => None,
        })
    }

    /// Waits until there is an answer.
    fn wait<T>(&self, deadline: Instant, answer: impl Fn(&Orders) -> Option<Result<T>>) -> Result<T> {
        let mut orders = self.shared.orders.lock();
        loop {
            if let Some(answer) = answer(&orders) {
                return answer;
            }
            if orders.has_ended {
                return Err(ended(&orders));
            }
            if self.shared.changed.wait_until(&mut orders, deadline).timed_out() {
                let repository = orders.status.repository.display();
                return Err(Error::NotPublished(format!("{repository}: it takes longer, and goes on")));
            }
        }
    }

    /// Has the engine end soon. What is not published stays on this host.
    pub fn begin_stop(&self) {
        self.shared.orders.lock().is_stopped = true;
        self.shared.changed.notify_all();
        self.shared.window.options().wire.wake();
    }

    /// Ends the engine, and fails the flushes that wait. Returns whether it has ended by `deadline`: a repository may hang.
    pub fn stop(&self, deadline: Instant) -> bool {
        self.begin_stop();
        let mut orders = self.shared.orders.lock();
        orders.flushes.fail("it is being closed");
        while !orders.has_ended {
            if self.shared.changed.wait_until(&mut orders, deadline).timed_out() {
                return false;
            }
        }
        drop(orders);
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that publishes a disk panicked");
            }
        }
        true
    }
}

impl Drop for Tiered {
    fn drop(&mut self) {
        self.begin_stop();
    }
}
