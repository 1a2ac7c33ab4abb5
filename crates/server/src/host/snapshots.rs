//! Snapshots of disks that are served. A snapshot is answered when it is on stable storage; what is left to do then is done
//! on a thread of its own, or by the next change of the disk.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Instant;

use vmstrata_api::{Event, Quiesce, SnapshotLayer, SnapshotSpec, SnapshotTaken};
use vmstrata_disk::snapshot::{SnapshotInfo, now_ns, state_of};
use vmstrata_disk::{Disk, Taken, Together};
use vmstrata_tier::{TakenState, Tiered};
use vmstrata_types::{path_from_text, path_to_text};

use super::quiesce::{WithAgent, longest_label, quiesce};
use super::retention::Due;
use super::tier::SYNC_PATIENCE;
use super::users::Lent;
use super::{Host, Table};
use crate::agent::Patience;
use crate::error::Error;
use crate::spec::{SpecError, check_path};

impl Host {
    /// Takes a snapshot of some disks at one instant. It is on stable storage then, and gets its index afterwards.
    ///
    /// # Errors
    /// No disk or one that is not served, one named twice, a guest that was to stand still and does not, or what the
    /// engine refuses, see [`Together`]: nothing has changed. A guest that does not go on, or went on before it was to, with
    /// [`Quiesce::Always`]: the snapshot is taken.
    pub fn snapshot(&self, asked: SnapshotSpec) -> Result<SnapshotTaken, Error> {
        let taken = self.take_snapshot(asked);
        self.counts.snapshot(&taken);
        taken
    }

    fn take_snapshot(&self, asked: SnapshotSpec) -> Result<SnapshotTaken, Error> {
        let (change, table) = self.begin_change()?;
        check_disks(&asked.disks)?;
        asked.agent.as_deref().map_or(Ok(()), |agent| check_path("agent", agent))?;
        let (disks, agents) = table.with_agents(&asked)?;
        let tier = table.tier_of(&asked.disks)?;
        drop(table);
        let how = how(&asked);
        let info = |label| info(&asked, label);
        if let Some(tier) = tier {
            // A repository may take its time, in which other changes go on.
            drop((change, disks));
            return self.take_tiered(asked, &tier, &agents);
        }
        let all: Vec<&Disk> = disks.iter().map(|disk| &***disk).collect();
        // Guests stand still for the cut alone: whatever else has to be waited for is waited for before, and what can be refused is.
        let together = Together::of(&all);
        together.check(&info(longest_label(&agents)), asked.convert_raw)?;
        let mut quiesced = quiesce(&agents, how, Patience::default(), &self.guards)?;
        let info = info(quiesced.label());
        let mut thawed = None;
        let taken = together.take(&info, || thawed = Some(quiesced.thaw(how)));
        let thawed = thawed.unwrap_or_else(|| quiesced.thaw(how));
        self.note_converted();
        let taken = taken?;
        finalize_later(disks, Arc::clone(&self.due));
        let pause = taken.first().map(|taken| taken.pause).unwrap_or_default();
        let told = |(disk, taken): (String, Taken)| {
            self.tell(Event::SnapshotTaken { disk: disk.clone(), snapshot: info.name.clone() });
            SnapshotLayer { disk, layer: path_to_text(&taken.layer), was_raw: taken.was_raw }
        };
        let disks = asked.disks.into_iter().zip(taken).map(told).collect();
        thawed?;
        Ok(SnapshotTaken {
            pause_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            quiesced: quiesced.is_quiesced(),
            not_quiesced_because: quiesced.why_not,
            disks,
            name: info.name,
        })
    }
}

/// Whether guests are to stand still.
fn how(asked: &SnapshotSpec) -> Quiesce {
    asked.quiesce.unwrap_or(if asked.agent.is_some() { Quiesce::Always } else { Quiesce::Auto })
}

/// What is said of the snapshot, with a label of the guests that stood still.
fn info(asked: &SnapshotSpec, label: Option<(String, String)>) -> SnapshotInfo {
    SnapshotInfo {
        name: asked.name.clone(),
        taken_ns: asked.taken_ns.unwrap_or_else(now_ns),
        labels: asked.labels.clone().into_iter().chain(label).collect(),
        group: asked.group.clone(),
        origin: None,
    }
}

impl Host {
    /// A snapshot of a tiered disk is there when it is published, for which not everyone waits. It is one of all disks of its group, whichever
    /// are asked for.
    fn take_tiered(
        &self,
        asked: SnapshotSpec,
        (tier, numbers): &TierOf,
        agents: &[WithAgent],
    ) -> Result<SnapshotTaken, Error> {
        let how = how(&asked);
        let mut quiesced = quiesce(agents, how, Patience::default(), &self.guards)?;
        let info = info(&asked, quiesced.label());
        let mut thawed = None;
        let taken = if asked.publish_later {
            let state = |disk: &String| {
                let path = self.table.lock().serving(disk)?.0.path.clone();
                Ok(state_of(&path, &info.name))
            };
            let states = asked.disks.iter().map(state).collect::<Result<Vec<_>, Error>>()?;
            tier.cut_for(&info).map(|cut| (states, cut.pause))
        } else {
            let deadline = Instant::now() + SYNC_PATIENCE;
            let taken = tier.snapshot(&info, deadline, || thawed = Some(quiesced.thaw(how)));
            let layers =
                |taken: &TakenState| numbers.iter().map(|&number| taken.layers[number].clone()).collect();
            taken.map(|taken| (layers(&taken), taken.pause))
        };
        let thawed = thawed.unwrap_or_else(|| quiesced.thaw(how));
        let (layers, pause) = taken?;
        let told = |(disk, layer): (String, PathBuf)| {
            self.tell(Event::SnapshotTaken { disk: disk.clone(), snapshot: info.name.clone() });
            SnapshotLayer { disk, layer: path_to_text(&layer), was_raw: false }
        };
        let disks = asked.disks.into_iter().zip(layers).map(told).collect();
        thawed?;
        Ok(SnapshotTaken {
            pause_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            quiesced: quiesced.is_quiesced(),
            not_quiesced_because: quiesced.why_not,
            disks,
            name: info.name,
        })
    }
}

/// What publishes some disks, and their numbers there.
type TierOf = (Arc<Tiered>, Vec<usize>);

impl Table {
    /// What publishes the disks of a snapshot, if they are tiered ones, of one group, and their numbers there.
    fn tier_of(&self, names: &[String]) -> Result<Option<TierOf>, Error> {
        names
            .iter()
            .try_for_each(|name| self.refuse_attaching(name).and_then(|()| self.refuse_standby(name)))?;
        let of = |name: &String| self.entry(name).and_then(|entry| entry.tier.clone());
        let Some((name, (tier, _))) = names.iter().find_map(|name| Some((name, of(name)?))) else {
            return Ok(None);
        };
        let is_same = |found: &(Arc<Tiered>, usize)| Arc::ptr_eq(&found.0, &tier);
        let numbers = names.iter().map(|name| of(name).filter(is_same).map(|(_, number)| number));
        match numbers.collect::<Option<Vec<_>>>() {
            Some(numbers) => Ok(Some((tier, numbers))),
            None => Err(Error::Tiered {
                name: name.clone(),
                what: "snapshots together with disks that are not of its group",
            }),
        }
    }

    /// The disks of a snapshot, and the agents of their guests.
    fn with_agents(&self, asked: &SnapshotSpec) -> Result<(Vec<Lent>, Vec<WithAgent>), Error> {
        let of_all = asked.agent.as_deref().map(path_from_text);
        let served = |name: &String| {
            let (spec, disk) = self.lend(name, "having a snapshot taken")?;
            spec.refuse_if_local("snapshot")?;
            let agent = of_all.as_ref().or(spec.agent.as_ref());
            Ok((disk, (name.clone(), agent.cloned())))
        };
        asked.disks.iter().map(served).collect()
    }
}

/// Has what the snapshot left to do done, and what it makes superfluous deleted. Failures are logged and counted where they
/// happen. A disk is held only during its turn: closing it earlier finalizes it as well.
fn finalize_later(disks: Vec<Lent>, due: Arc<Due>) {
    let disks: Vec<Weak<Disk>> = disks.into_iter().map(|disk| Arc::downgrade(&disk)).collect();
    let finalize = move || {
        disks.iter().filter_map(Weak::upgrade).for_each(|disk| _ = disk.finalize());
        due.now();
    };
    if let Err(error) = std::thread::Builder::new().name("finalize".into()).spawn(finalize) {
        tracing::warn!(%error, "a snapshot gets its index later: no thread");
    }
}

/// Refuses a snapshot of nothing, or of one disk twice.
fn check_disks(names: &[String]) -> Result<(), SpecError> {
    if names.is_empty() {
        return Err(SpecError::NoDisks);
    }
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(SpecError::DiskTwice { name: pair[0].to_owned() }),
        None => Ok(()),
    }
}
