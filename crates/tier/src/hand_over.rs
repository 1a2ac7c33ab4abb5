//! A tiered disk goes from one host to another while both run, and neither has to be trusted to be off.
//!
//! ```text
//!   this host                                     repository            the other host: Standby
//!   all is published, requests wait ────────────► head N
//!   offer: nothing publishes another head         │                     has opened the disk; its requests wait
//!                                                 ▼
//!   taken back ──► head N + 1 of this host   or   head N + 1 of the other host ◄── taken over from N
//! ```
//!
//! The conditional create of head N + 1 decides, and nothing else does: not the answer of a server, nor who was asked last. Until it is
//! there, requests wait on both hosts; from then on they wait on one for ever. A process that is killed with its offer claims the disk when it
//! is started again, which takes it back.
//!
//! Invariant: while an offer stands, this host creates no head, so that taking the disk over from N fails only if this host took it back.

use std::time::Instant;

use crate::error::{Error, Result};
use crate::head::HeadNumber;
use crate::look::newest;
use crate::place::Copy;
use crate::shared::Offer;
use crate::stand;
use crate::status::TierStatus;
use crate::tiered::Tiered;

impl Tiered {
    /// Publishes all, has requests wait from then on, and lets another host take the disks over from the head that is returned
    /// ([`Standby`](crate::Standby)). Again, it returns the same head.
    ///
    /// # Errors
    /// [`Error::NotPublished`], also at `deadline`; [`Error::NotOffered`] during a rebase, or while the disk is taken back. Requests then go on.
    pub fn hand_over(&self, deadline: Instant) -> Result<HeadNumber> {
        let _one_at_a_time = self.handing.lock();
        let disks = self.open_disks()?;
        let refused = |why| Err(Error::NotOffered { repository: self.status().repository, why });
        let offer = self.shared.orders.lock().offer;
        match offer {
            Offer::Made => return Ok(self.status().head),
            Offer::Withdrawn => return refused("it is being taken back, and its repository does not answer"),
            Offer::None if self.shared.rebases.lock().stage().is_some() => {
                return refused("it is being rebased: wait for that job, or cancel it");
            }
            Offer::None => {}
        }
        // What may take long, while requests are served.
        self.cut()?;
        self.publish(deadline)?;
        disks.iter().for_each(|disk| disk.drain());
        self.shared.orders.lock().offer = Offer::Made;
        let published = self.cut().and_then(|_| self.publish(deadline));
        if let Err(error) = published {
            // Nobody was told of the head.
            self.shared.orders.lock().offer = Offer::None;
            disks.iter().for_each(|disk| disk.resume());
            return Err(error);
        }
        let status = self.status();
        tracing::info!(repository = %status.repository.display(), head = %status.head, "handed over: requests wait until another host has taken the disk over, or this one takes it back");
        Ok(status.head)
    }

    /// Goes on with disks that were offered, unless another host has taken them over. Without an offer there is nothing to do.
    ///
    /// # Errors
    /// [`Error::NotPublished`]: another host has them (the state is [`Fenced`](crate::TierState::Fenced)), or it is not known yet, and is tried
    /// on. Requests wait.
    pub fn take_back(&self, deadline: Instant) -> Result<TierStatus> {
        let _one_at_a_time = self.handing.lock();
        let mut orders = self.shared.orders.lock();
        if orders.offer == Offer::Made {
            orders.offer = Offer::Withdrawn;
        }
        let is_offered = orders.offer != Offer::None;
        drop(orders);
        if is_offered {
            self.publish(deadline)?;
        }
        Ok(self.status())
    }

    /// Deletes this host's copy if the disks were offered and another host took them over: it has all. They are closed, and this has stopped.
    /// Returns whether it was so.
    ///
    /// # Errors
    /// What repository or host report: the copy stays.
    pub fn leave(&self) -> Result<bool> {
        if self.shared.orders.lock().offer == Offer::None {
            return Ok(false);
        }
        let (own, repository) = (self.status(), &*self.repository);
        let is_taken = newest(repository)?.is_some_and(|head| {
            head.owner != own.owner && head.generation > own.generation && head.epoch.number >= own.epoch
        });
        if !is_taken {
            return Ok(false);
        }
        let copy = Copy::hold(&self.members[0])?;
        for pin in stand::pins_of(repository, own.owner)? {
            pin.release(repository)?;
        }
        copy.delete()?;
        tracing::info!(copy = %own.local.display(), "deleted: another host has taken the disk over, with all that was on it");
        Ok(true)
    }
}
