//! What is done to a disk under load: snapshots, deletes in both directions, flatten, resize, jobs that are paused and
//! cancelled, and file systems that are full for a moment. All through the command line, as users do it.
//!
//! A life of the server ends at a given time, whatever is under way then: the kill falls into it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::Rng as _;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;

use super::config::Below;
use super::model::{Claim, Watch};
use super::server::{Ended, PATIENCE, Running, Setup};
use super::shared::Shared;
use super::snapshots::{Presence, Snapshot, Snapshots};
use super::view::Sectors;

/// Snapshots that are kept at most.
const SNAPSHOTS_MAX: usize = 5;
/// How often a failure of the load is looked for while a command runs.
const LOOK: Duration = Duration::from_millis(50);

/// What was done, for the line of a round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) snapshots: u32,
    pub(super) deletes: u32,
    pub(super) flattens: u32,
    pub(super) resizes: u32,
    pub(super) paused: u32,
    pub(super) cancelled: u32,
    pub(super) full: u32,
    pub(super) run_full: u32,
    /// Commands that the server refused, or that met a full file system.
    pub(super) refused: u32,
}

/// A command that the end of a life has met.
pub(super) enum Cut {
    Create { running: Running, name: String, watch: Watch },
    Delete { running: Option<Running>, names: Vec<String> },
    Resize { running: Running, sectors: u64, claim: Option<Claim> },
    Other(Running),
}

/// The end of a command, or the command where the life ended before.
pub(super) enum Outcome {
    Ended(Ended),
    Running(Running),
}

/// See the module documentation.
pub(super) struct Disturber<'a> {
    pub(super) shared: &'a Shared,
    pub(super) setup: &'a Setup,
    pub(super) snapshots: &'a mut Snapshots,
    pub(super) random: &'a mut SmallRng,
    pub(super) tally: &'a mut Tally,
    /// When the life ends.
    ends: Instant,
    pub(super) cut: Vec<Cut>,
    pub(super) run_is_full: bool,
}

impl<'a> Disturber<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        setup: &'a Setup,
        snapshots: &'a mut Snapshots,
        random: &'a mut SmallRng,
        tally: &'a mut Tally,
        ends: Instant,
    ) -> Self {
        Self { shared, setup, snapshots, random, tally, ends, cut: Vec::new(), run_is_full: false }
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.ends
    }

    pub(super) fn rest(&mut self, least: u64, most: u64) -> Result<()> {
        let drawn = Duration::from_millis(self.random.random_range(least..most));
        self.shared.rest(drawn.min(self.ends.saturating_duration_since(Instant::now())))
    }

    /// Disturbs the disk until the life is over.
    ///
    /// # Errors
    /// When the load fails, or a command fails that must not.
    pub(super) fn run(&mut self, progress: &dyn Fn()) -> Result<()> {
        while !self.is_over() {
            progress();
            self.rest(20, 300)?;
            if self.is_over() || !self.cut.is_empty() {
                self.shared.rest(self.ends.saturating_duration_since(Instant::now()))?;
                break;
            }
            let kinds = if self.shared.config.focused { 17..25 } else { 0..20 };
            match self.random.random_range(kinds) {
                0..6 => self.snapshot()?,
                6..9 => self.delete()?,
                9..12 => self.delete_job()?,
                12 => self.flatten()?,
                13..15 => self.resize()?,
                15..17 => self.fill_images()?,
                17..19 => self.fill_run()?,
                _ => self.rest(100, 500)?,
            }
        }
        Ok(())
    }

    pub(super) fn command(&mut self, words: &[&str]) -> Result<Outcome> {
        self.shared.note(format!("vmstrata {}", words.join(" ")));
        let mut running = self.setup.command(words, true)?;
        let begun = Instant::now();
        loop {
            if let Some(ended) = running.ended(self.ends.min(Instant::now() + LOOK))? {
                self.shared.note(format!("{}: {}", words.join(" "), ended.status));
                return Ok(Outcome::Ended(ended));
            }
            self.shared.check()?;
            if self.is_over() {
                return Ok(Outcome::Running(running));
            }
            if begun.elapsed() > PATIENCE {
                bail!("vmstrata {} does not end in {PATIENCE:?}", words.join(" "));
            }
        }
    }

    pub(super) fn disk(&self) -> Result<&'a str> {
        self.setup.disk.to_str().context("a path that is text")
    }

    /// Whether a command was right to fail. What follows a delete that was cancelled or refused may be refused, too.
    pub(super) fn may_fail(&mut self, ended: &Ended, full_changes: u64, known: &[&str]) -> Result<()> {
        self.tally.refused += 1;
        let is_known = known.iter().any(|words| ended.stderr.contains(words));
        if is_known || self.run_is_full || self.shared.met_full(full_changes) {
            return Ok(());
        }
        bail!("vmstrata {}: {}: {}", ended.words, ended.status, ended.stderr.trim())
    }

    pub(super) fn snapshot(&mut self) -> Result<()> {
        if self.snapshots.all.len() >= SNAPSHOTS_MAX {
            return self.delete();
        }
        let (name, disk, full_changes) =
            (self.snapshots.next_name(), self.disk()?, self.shared.full_changes());
        let watch = {
            let mut model = self.shared.model();
            let all = Sectors::new(0, model.len());
            model.watch(all)
        };
        match self.command(&["snapshot", "create", "--name", &name, disk])? {
            Outcome::Running(running) => self.cut.push(Cut::Create { running, name, watch }),
            Outcome::Ended(ended) => {
                let is_taken = ended.status.success();
                self.taken(name, watch, is_taken);
                if is_taken {
                    self.tally.snapshots += 1;
                } else {
                    self.may_fail(&ended, full_changes, &[])?;
                }
            }
        }
        Ok(())
    }

    fn taken(&mut self, name: String, watch: Watch, for_sure: bool) {
        let presence = if for_sure { Presence::Sure } else { Presence::MaybeTaken };
        let view = Some(self.shared.model().viewed(watch));
        self.snapshots.all.push(Snapshot { name, view, presence });
    }

    /// Neighbours among the snapshots.
    pub(super) fn some_names(&mut self) -> Vec<String> {
        let sure = self.snapshots.sure();
        if sure.is_empty() {
            return sure;
        }
        let start = self.random.random_range(0..sure.len());
        let count = self.random.random_range(1..=3).min(sure.len() - start);
        sure[start..start + count].to_vec()
    }

    pub(super) fn way(&mut self) -> &'static str {
        ["auto", "stream", "commit", "commit"].choose(self.random).copied().unwrap_or("auto")
    }

    fn delete(&mut self) -> Result<()> {
        let (names, way, disk) = (self.some_names(), self.way(), self.disk()?);
        if names.is_empty() {
            return Ok(());
        }
        let full_changes = self.shared.full_changes();
        let mut words = vec!["snapshot", "delete", "--direction", way, disk];
        words.extend(names.iter().map(String::as_str));
        match self.command(&words)? {
            Outcome::Running(running) => self.cut.push(Cut::Delete { running: Some(running), names }),
            Outcome::Ended(ended) => {
                self.snapshots.deleted(&names, ended.status.success());
                if ended.status.success() {
                    self.tally.deletes += names.len() as u32;
                } else {
                    self.may_fail(&ended, full_changes, REFUSALS)?;
                }
            }
        }
        Ok(())
    }

    fn flatten(&mut self) -> Result<()> {
        let names: Vec<String> = self.snapshots.all.iter().map(|snapshot| snapshot.name.clone()).collect();
        if self.shared.config.below == Below::Nothing && names.is_empty() {
            return Ok(());
        }
        let remove = if self.random.random() { "snapshots" } else { "none" };
        let (disk, full_changes) = (self.disk()?, self.shared.full_changes());
        match self.command(&["flatten", "--yes", "--remove", remove, disk])? {
            Outcome::Running(running) => self.cut.push(Cut::Delete { running: Some(running), names }),
            Outcome::Ended(ended) => {
                self.snapshots.deleted(&names, ended.status.success());
                if ended.status.success() {
                    self.tally.flattens += 1;
                } else {
                    self.may_fail(&ended, full_changes, REFUSALS)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for the commands that were under way at the end, and tells what is known of them. Returns the sizes that the
    /// disk may have.
    ///
    /// # Errors
    /// When one does not end.
    pub(super) fn finish(mut self) -> Result<Vec<u64>> {
        let mut sizes = Vec::new();
        for cut in std::mem::take(&mut self.cut) {
            match cut {
                Cut::Create { running, name, watch } => {
                    let is_taken = running.wait()?.status.success();
                    self.taken(name, watch, is_taken);
                }
                // What a job ended with is not asked for any more.
                Cut::Delete { running, names } => {
                    let ended = running.map(Running::wait).transpose()?;
                    let is_command = ended.as_ref().is_some_and(|ended| !ended.words.starts_with("job"));
                    let is_done = ended.is_some_and(|ended| ended.status.success());
                    self.snapshots.deleted(&names, is_done && is_command);
                }
                Cut::Resize { running, sectors, claim } => {
                    let is_done = running.wait()?.status.success();
                    self.resized(sectors, claim, is_done);
                    sizes.push(sectors);
                }
                Cut::Other(running) => drop(running.wait()?),
            }
        }
        sizes.push(self.shared.model().len());
        Ok(sizes)
    }
}

/// What a command may be refused with though there is room.
pub(super) const REFUSALS: &[&str] = &[
    // Of another job, or of one that was cancelled.
    "being merged",
    "half deleted",
    // The file system is small, also where nobody fills it.
    "there is no room for what is copied",
    // `--direction commit` with nothing but the active layer above.
    "what stays cannot be committed into it",
];
