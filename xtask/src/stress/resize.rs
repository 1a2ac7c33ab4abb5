//! Sizes: a disk grows and shrinks under load.

use std::time::Duration;

use anyhow::Result;
use rand::Rng as _;

use super::disturb::{Cut, Disturber, Outcome};
use super::model::{Change, Claim};
use super::stamp::SECTOR;
use super::view::Sectors;

impl Disturber<'_> {
    /// Makes the disk larger, or smaller down to its first size.
    pub(super) fn resize(&mut self) -> Result<()> {
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
        let outcome = match self.command(&words)? {
            // Version 2 cannot say zeros: until the header has the new size, what lies below shows in what is cut off.
            Outcome::Running(running) if is_shorter && self.shared.config.version2 => {
                Outcome::Ended(running.wait()?)
            }
            outcome => outcome,
        };
        match outcome {
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

    /// What is known after a resize.
    pub(super) fn resized(&self, sectors: u64, claim: Option<Claim>, is_done: bool) {
        let mut model = self.shared.model();
        if let Some(claim) = claim {
            model.doubt(claim);
        }
        let len = model.len();
        model.resize(if is_done { sectors } else { len });
    }
}
