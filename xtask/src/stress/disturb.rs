//! What is done to a disk under load: snapshots, deletes in both directions, flatten, resize, jobs that are paused and
//! cancelled, and file systems that are full for a moment. All through the command line, as users do it.
//!
//! A life of the server ends at a given time, whatever is under way then: the kill falls into it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::Rng as _;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use serde_json::Value as Json;

use super::config::Below;
use super::load::Shared;
use super::model::{Change, Claim, Sectors, Watch};
use super::server::{Ended, NAME, PATIENCE, Running, Setup};
use super::snapshots::{Presence, Snapshot, Snapshots};
use super::stamp::SECTOR;

/// Snapshots that are kept at most.
const SNAPSHOTS_MAX: usize = 7;
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
enum Cut {
    Create { running: Running, name: String, watch: Watch },
    Delete { running: Option<Running>, names: Vec<String> },
    Resize { running: Running, sectors: u64, claim: Option<Claim> },
    Other(Running),
}

/// The end of a command, or the command where the life ended before.
enum Outcome {
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
    cut: Vec<Cut>,
    run_is_full: bool,
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

    fn is_over(&self) -> bool {
        Instant::now() >= self.ends
    }

    fn rest(&mut self, least: u64, most: u64) -> Result<()> {
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
            match self.random.random_range(0..20) {
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

    fn command(&mut self, words: &[&str]) -> Result<Outcome> {
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

    fn disk(&self) -> Result<&'a str> {
        self.setup.disk.to_str().context("a path that is text")
    }

    /// Whether a command was right to fail. What follows a delete that was cancelled or refused may be refused, too.
    fn may_fail(&mut self, ended: &Ended, full_changes: u64, known: &[&str]) -> Result<()> {
        self.tally.refused += 1;
        eprintln!(
            "XX run_full={} full={} {}: {}",
            self.run_is_full,
            self.shared.met_full(full_changes),
            ended.words,
            ended.stderr.trim()
        );
        let is_known = known.iter().any(|words| ended.stderr.contains(words));
        if is_known || self.run_is_full || self.shared.met_full(full_changes) {
            return Ok(());
        }
        bail!("vmstrata {}: {}: {}", ended.words, ended.status, ended.stderr.trim())
    }

    fn snapshot(&mut self) -> Result<()> {
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
    fn some_names(&mut self) -> Vec<String> {
        let sure = self.snapshots.sure();
        if sure.is_empty() {
            return sure;
        }
        let start = self.random.random_range(0..sure.len());
        let count = self.random.random_range(1..=3).min(sure.len() - start);
        sure[start..start + count].to_vec()
    }

    fn way(&mut self) -> &'static str {
        ["auto", "up", "down", "down"].choose(self.random).copied().unwrap_or("auto")
    }

    fn delete(&mut self) -> Result<()> {
        let (names, way, disk) = (self.some_names(), self.way(), self.disk()?);
        if names.is_empty() {
            return Ok(());
        }
        let full_changes = self.shared.full_changes();
        let mut words = vec!["snapshot", "delete", "--into", way, disk];
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

    /// The same as a job that is paused, and then resumed or cancelled.
    fn delete_job(&mut self) -> Result<()> {
        let (names, way) = (self.some_names(), self.way());
        if names.is_empty() {
            return Ok(());
        }
        let full_changes = self.shared.full_changes();
        let mut words = vec!["job", "--json", "snapshot-delete", "--limit", "8M", "--into", way, NAME];
        words.extend(names.iter().map(String::as_str));
        self.snapshots.deleted(&names, false);
        let ended = match self.command(&words)? {
            Outcome::Running(running) => {
                self.cut.push(Cut::Delete { running: Some(running), names });
                return Ok(());
            }
            Outcome::Ended(ended) if !ended.status.success() => {
                return self.may_fail(&ended, full_changes, REFUSALS);
            }
            Outcome::Ended(ended) => ended,
        };
        let job: Json = serde_json::from_str(&ended.stdout)?;
        let id = job["id"].as_u64().context("the number of a job")?.to_string();
        self.rest(0, 60)?;
        if !self.tell_job("pause", &id)? {
            return Ok(());
        }
        self.rest(10, 200)?;
        let is_cancelled = self.random.random_ratio(1, 3);
        let word = if is_cancelled { "cancel" } else { "resume" };
        if !self.tell_job(word, &id)? {
            return Ok(());
        }
        if is_cancelled {
            self.tally.cancelled += 1;
        } else {
            self.tally.paused += 1;
        }
        let Some(state) = self.end_of_job(&id)? else {
            self.cut.push(Cut::Delete { running: None, names });
            return Ok(());
        };
        if state == "done" {
            self.tally.deletes += names.len() as u32;
            self.snapshots.deleted(&names, true);
        }
        Ok(())
    }

    /// `false` when the life is over. A job that has ended takes no orders.
    fn tell_job(&mut self, word: &str, id: &str) -> Result<bool> {
        match self.command(&["job", word, id])? {
            Outcome::Running(running) => {
                self.cut.push(Cut::Other(running));
                Ok(false)
            }
            Outcome::Ended(_) => Ok(true),
        }
    }

    /// How a job ended; `None` when the life is over before.
    fn end_of_job(&mut self, id: &str) -> Result<Option<String>> {
        while !self.is_over() {
            let ended = match self.command(&["job", "--json", "list"])? {
                Outcome::Running(running) => {
                    self.cut.push(Cut::Other(running));
                    return Ok(None);
                }
                Outcome::Ended(ended) => ended,
            };
            let listed: Json = serde_json::from_str(&ended.good()?)?;
            let jobs = listed["jobs"].as_array().context("jobs")?;
            let job = jobs.iter().find(|job| job["id"].to_string() == id).context("the job")?;
            let state = job["state"].as_str().context("a state")?;
            if !["running", "paused", "cancelling"].contains(&state) {
                return Ok(Some(state.to_owned()));
            }
            self.rest(20, 60)?;
        }
        Ok(None)
    }

    fn flatten(&mut self) -> Result<()> {
        let names: Vec<String> = self.snapshots.all.iter().map(|snapshot| snapshot.name.clone()).collect();
        if self.shared.config.below == Below::Nothing && names.is_empty() {
            return Ok(());
        }
        let remove = if self.random.random() { "snapshots" } else { "none" };
        let (disk, full_changes) = (self.disk()?, self.shared.full_changes());
        match self.command(&["flatten", "--remove", remove, disk])? {
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

    fn resize(&mut self) -> Result<()> {
        let (len, drawn) = (self.shared.model().len(), self.shared.config.sectors);
        let is_shorter = len > drawn && self.random.random();
        let sectors = if is_shorter {
            self.random.random_range(drawn..len)
        } else {
            len + self.random.random_range(1..4096)
        };
        let claim = if is_shorter { Some(self.claim_tail(sectors, len)?) } else { None };
        let (bytes, disk) = ((sectors * SECTOR as u64).to_string(), self.disk()?);
        let full_changes = self.shared.full_changes();
        let mut words = vec!["resize", disk, &bytes];
        if is_shorter {
            words.push("--shrink");
        }
        match self.command(&words)? {
            Outcome::Running(running) => self.cut.push(Cut::Resize { running, sectors, claim }),
            Outcome::Ended(ended) => {
                self.resized(sectors, claim, ended.status.success());
                if ended.status.success() {
                    self.tally.resizes += 1;
                } else {
                    self.may_fail(&ended, full_changes, &[])?;
                }
            }
        }
        Ok(())
    }

    /// Takes what is to be cut off: no request is in flight there, and none begins.
    fn claim_tail(&mut self, from: u64, to: u64) -> Result<Claim> {
        self.shared.model().set_limit(from);
        let tail = Sectors::new(from, to - from);
        loop {
            {
                let mut model = self.shared.model();
                if model.is_free(tail)
                    && let Some(claim) = model.claim(tail, Change::Trim)
                {
                    return Ok(claim);
                }
            }
            self.shared.rest(Duration::from_millis(2))?;
        }
    }

    fn resized(&self, sectors: u64, claim: Option<Claim>, is_done: bool) {
        let mut model = self.shared.model();
        if let Some(claim) = claim {
            model.doubt(claim);
        }
        let len = model.len();
        model.resize(if is_done { sectors } else { len });
    }

    fn fill_images(&mut self) -> Result<()> {
        if !self.shared.place.images.can_be_full() {
            return Ok(());
        }
        self.tally.full += 1;
        self.shared.note("the images' file system is filled".to_owned());
        self.shared.set_full(true);
        self.shared.place.images.fill()?;
        self.rest(20, 400)?;
        if self.random.random_ratio(1, 3) && !self.is_over() {
            self.snapshot()?;
        }
        self.shared.place.images.empty()?;
        self.shared.set_full(false);
        self.shared.note("it has room again".to_owned());
        Ok(())
    }

    fn fill_run(&mut self) -> Result<()> {
        if !self.shared.place.run.can_be_full() {
            return Ok(());
        }
        self.tally.run_full += 1;
        self.shared.note("the runtime directory is filled".to_owned());
        self.run_is_full = true;
        self.shared.place.run.fill()?;
        self.rest(20, 800)?;
        if self.random.random_ratio(1, 3) && !self.is_over() {
            self.snapshot()?;
        }
        // Now and then it is still full at the kill.
        if !self.is_over() {
            self.shared.place.run.empty()?;
            self.run_is_full = false;
            self.shared.note("it has room again".to_owned());
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
const REFUSALS: &[&str] = &[
    // Of another job, or of one that was cancelled.
    "being merged",
    "half deleted",
    // `--into down` with nothing but the active layer above.
    "what stays cannot be written down into it",
];
