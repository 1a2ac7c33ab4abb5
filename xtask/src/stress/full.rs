//! File systems that are full for a moment.

use anyhow::Result;
use rand::Rng as _;

use super::disturb::Disturber;

impl Disturber<'_> {
    /// Takes all room that the images have, for a moment.
    pub(super) fn fill_images(&mut self) -> Result<()> {
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

    /// Takes all room that journals have, for a moment.
    pub(super) fn fill_run(&mut self) -> Result<()> {
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
}
