//! What the maintenance threads do for a disk.

use std::path::Path;
use std::time::{Duration, Instant};

use vmstrata_store::FileId;

use super::Disk;
use super::state::Service;
use crate::layers::Top;
use crate::maintenance::Maintained;
use crate::write::Incomplete;

impl Maintained for Disk {
    fn deferred(&self) -> Vec<u64> {
        match &self.layers_now().top {
            Top::Qcow2(active) => active.changes.partials_to_copy(),
            Top::Raw(_) | Top::Frozen => Vec::new(),
        }
    }

    fn copy_up_some<'a>(&self, clusters: &'a [u64], until: Instant) -> &'a [u64] {
        let _tending = self.tending.lock();
        if self.state.service() != Service::Open {
            return &[];
        }
        let layers = arc_swap::Guard::into_inner(self.layers_now());
        let Top::Qcow2(active) = &layers.top else { return &[] };
        let mut left = clusters;
        while let [cluster, rest @ ..] = left
            && Instant::now() < until
        {
            if let Err(why) = self.complete_one(&layers, *cluster) {
                // The next commit tries it again.
                active.partials_are_stuck(Some(&why));
                if let Incomplete::Own(error) = why {
                    self.fail_if_fatal(error);
                    return &[];
                }
            }
            left = rest;
        }
        left
    }

    fn write_out(&self) -> bool {
        match &self.layers_now().top {
            Top::Qcow2(active) => active.write_out(),
            Top::Raw(_) | Top::Frozen => false,
        }
    }

    fn tend(&self, age: Duration) {
        let _tending = self.tending.lock();
        let layers = self.layers_now();
        let Top::Qcow2(active) = &layers.top else { return };
        if self.state.service() != Service::Open {
            return;
        }
        if active.changes.waited(age) {
            // The first failure was logged; the commit does what it can.
            let _ = self.commit();
        }
        if self.state.service() == Service::Open {
            self.reclaim(active);
        }
    }

    fn stands_on(&self, file: FileId) -> bool {
        let layers = self.layers_now();
        layers.frozen.as_ref().is_some_and(|map| map.layers().any(|layer| layer.identity.file == file))
    }

    fn path(&self) -> &Path {
        &self.path
    }
}
