//! Deletes as jobs of the server, which are paused, resumed and cancelled.

use anyhow::{Context as _, Result};
use rand::Rng as _;
use serde_json::Value as Json;

use super::disturb::{Cut, Disturber, Outcome, REFUSALS};
use super::server::NAME;

impl Disturber<'_> {
    /// The same as a job that is paused, and then resumed or cancelled.
    pub(super) fn delete_job(&mut self) -> Result<()> {
        let (names, way) = (self.some_names(), self.way());
        if names.is_empty() {
            return Ok(());
        }
        let full_changes = self.shared.full_changes();
        let mut words = vec!["job", "--json", "snapshot-delete", "--limit", "8M", "--direction", way, NAME];
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
        if !self.interrupt(&id)? {
            self.cut.push(Cut::Delete { running: None, names });
            return Ok(());
        }
        match self.end_of_job(&id)?.as_deref() {
            Some("done") => {
                self.tally.deletes += names.len() as u32;
                self.snapshots.deleted(&names, true);
            }
            Some(_) => {}
            None => self.cut.push(Cut::Delete { running: None, names }),
        }
        Ok(())
    }

    /// Pauses a job, and resumes or cancels it; `false` when the life is over before.
    fn interrupt(&mut self, id: &str) -> Result<bool> {
        self.rest(0, 60)?;
        if !self.tell_job("pause", id)? {
            return Ok(false);
        }
        self.rest(10, 200)?;
        let is_cancelled = self.random.random_ratio(1, 3);
        if !self.tell_job(if is_cancelled { "cancel" } else { "resume" }, id)? {
            return Ok(false);
        }
        if is_cancelled {
            self.tally.cancelled += 1;
        } else {
            self.tally.paused += 1;
        }
        Ok(true)
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
            let job = jobs.iter().find(|job| job["id"].as_u64() == id.parse().ok()).context("the job")?;
            let state = job["state"].as_str().context("a state")?;
            if !["running", "paused", "cancelling"].contains(&state) {
                return Ok(Some(state.to_owned()));
            }
            self.rest(20, 60)?;
        }
        Ok(None)
    }
}
