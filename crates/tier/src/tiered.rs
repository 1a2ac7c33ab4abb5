//! A tiered disk as its server has it: opened, told of, asked for what cannot wait, and ended. What publishes it is the engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, OpenOptions, Resources};
use vmstrata_repo::Repository;

use crate::copies::claim;
use crate::engine::{Engine, Held, Orders, Shared};
use crate::error::{Error, Result};
use crate::meter::Meter;
use crate::metered::Metered;
use crate::pin::Pin;
use crate::place::Place;
use crate::remote::Remote;
use crate::states::name_for;
use crate::status::{DurableAt, TierOptions, TierState, TierStatus};

/// A tiered disk that is published from this host until this is dropped.
#[derive(Debug)]
pub struct Tiered {
    shared: Arc<Shared>,
    repository: Arc<dyn Repository>,
    /// What reads the layers that are in the repository, if they are read through a cache.
    remote: Option<Arc<Remote>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A state of a tiered disk that was given a name.
#[derive(Clone, Debug)]
pub struct TakenState {
    /// Its newest layer, in the repository.
    pub layer: PathBuf,
    /// For how long the guest's writes were held.
    pub pause: Duration,
}
impl Tiered {
    /// Opens a tiered disk, or makes an ordinary image one, and publishes it from now on.
    ///
    /// # Errors
    /// [`Error::Fenced`] for a disk that another copy publishes; an image that cannot be tiered; a repository that does not answer;
    /// whatever the host reports.
    pub fn open(
        place: &Place,
        options: TierOptions,
        open: &OpenOptions,
        resources: &Arc<Resources>,
    ) -> Result<(Arc<Disk>, Self)> {
        let meter = Arc::new(Meter::new());
        let mut unwatched = None;
        let (copy, publisher) = claim(place, open, resources, |repository| {
            // What merges move says nothing of the epoch that is shipped.
            unwatched = Some(Metered::new(repository.clone(), options.wire.clone(), Arc::new(Meter::new())));
            Arc::new(Metered::new(repository, options.wire.clone(), meter.clone()))
        })?;
        let merges = Arc::new(unwatched.expect("claimed"));
        let held = Held { copy, publisher, meter, merges };
        let (disk, engine) = Engine::new(place, options, open, resources, held)?;
        let (shared, repository, remote) = (engine.shared(), engine.repository(), place.remote()?);
        let failed = || Error::of_file(&place.path, "start the threads that publish it");
        let watched = (shared.clone(), disk.clone());
        let watch = move || watched.0.watch(&watched.1);
        let start = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let publishes = start("tier").spawn(move || engine.run()).map_err(failed())?;
        let tiered = Self { shared, repository, remote, threads: Mutex::new(vec![publishes]) };
        // The watch ends with the engine.
        tiered.threads.lock().push(start("tier-watch").spawn(watch).map_err(failed())?);
        Ok((disk, tiered))
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

    /// Cuts the disk and waits until that is published, and the disk's path leads to it.
    ///
    /// # Errors
    /// [`Error::NotPublished`], also at `deadline`: the engine tries on, unless it was fenced.
    pub fn sync(&self, deadline: Instant) -> Result<TierStatus> {
        let own = self.ask();
        self.wait(deadline, |orders| match orders {
            Orders { done, .. } if *done >= own => Some(Ok(())),
            Orders { failed: (failed, why), .. } if *failed >= own => {
                Some(Err(Error::NotPublished(why.clone())))
            }
            _ => None,
        })?;
        Ok(self.status())
    }

    /// Gives the disk's state of now a name, under which its repository keeps it. Calls `is_cut` as soon as the state is cut off, and
    /// returns when it is published.
    ///
    /// # Errors
    /// [`Error::NameTaken`], a name that is none; [`Error::NotPublished`], also at `deadline`: the state has no name then.
    pub fn snapshot(
        &self,
        info: &SnapshotInfo,
        deadline: Instant,
        is_cut: impl FnOnce(),
    ) -> Result<TakenState> {
        let repository = &*self.repository;
        let named = name_for(repository, info)?;
        let own = self.ask();
        let cut = self.wait(deadline, |orders| match orders {
            Orders { cut, .. } if cut.asked >= own => Some(Ok(*cut)),
            Orders { failed: (failed, why), .. } if *failed >= own => {
                Some(Err(Error::NotPublished(why.clone())))
            }
            _ => None,
        });
        is_cut();
        let cut = cut?;
        self.wait(deadline, |orders| (orders.status.epoch >= cut.epoch).then_some(Ok(())))?;
        let pin = Pin::make(repository, Some(cut.epoch), &named)?;
        let layer = self.status().repository.join(pin.epoch.newest().layer_name().as_str());
        Ok(TakenState { layer, pause: cut.pause })
    }

    /// Asks for a cut. Returns who asks.
    fn ask(&self) -> u64 {
        let mut orders = self.shared.orders.lock();
        orders.asked += 1;
        self.shared.changed.notify_all();
        orders.asked
    }

    /// Waits until there is an answer.
    fn wait<T>(&self, deadline: Instant, answer: impl Fn(&Orders) -> Option<Result<T>>) -> Result<T> {
        let mut orders = self.shared.orders.lock();
        loop {
            if let Some(answer) = answer(&orders) {
                return answer;
            }
            if orders.has_ended {
                let why = match &orders.status.state {
                    TierState::Fenced { why } => why.clone(),
                    _ => format!("{}: it is being closed", orders.status.local.display()),
                };
                return Err(Error::NotPublished(why));
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
