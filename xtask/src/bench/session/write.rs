//! Writes through vhost-user, by several in turns, and what they leave.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::super::load::{Access, Load};
use super::super::turns::medians;
use super::{Session, TURNS, Timing};
use crate::chain::pattern::Writer;

/// Someone who writes to a disk of its own.
struct Writing<'a> {
    session: Session<'a>,
    /// Blocks of 4 KiB that were written.
    written: Vec<bool>,
}

/// Writes in turns, then checks every byte through the same servers, and the files with `qemu-img check` after the servers
/// have ended. Each disk belongs to its session alone.
///
/// # Errors
/// When a server fails, a byte is wrong, or a file is left unclean.
pub fn write(sessions: Vec<Session<'_>>, access: Access, timing: Timing) -> Result<Vec<f64>> {
    let (round, turns) = match access {
        Access::RandomWrite { round } => (round, TURNS),
        // Each turn would begin where the first did.
        Access::FirstWrite { round } => (round, 1),
        Access::RandomRead | Access::SequentialRead | Access::ReadWrite { .. } => {
            panic!("reads are measured by read()")
        }
    };
    let mut writing: Vec<_> =
        sessions.into_iter().map(|session| Writing { session, written: Vec::new() }).collect();
    let load = Load { access, block: 4 << 10, depth: 32, time: timing.run / turns, seed: 0 };
    let rates =
        medians(&mut writing, turns, |one, turn| one.write(&Load { seed: u64::from(3 + turn), ..load }))?;
    writing.into_iter().try_for_each(|one| one.finish(round, timing))?;
    Ok(rates)
}

impl Writing<'_> {
    fn write(&mut self, load: &Load) -> Result<f64> {
        let outcome = self.session.client.run(load)?;
        self.written.resize(outcome.written.len(), false);
        self.written.iter_mut().zip(&outcome.written).for_each(|(all, new)| *all |= new);
        Ok(outcome.iops())
    }

    fn finish(self, round: u16, timing: Timing) -> Result<()> {
        let whole = self.session.checks_whole(timing);
        let (written, Session { kind, chain, file, server, mut client, .. }) = (self.written, self.session);
        let expected = |at: u64| {
            let is_new = written.get((at / 4096) as usize).copied().unwrap_or(false);
            if is_new { Some(Writer::client(round)) } else { chain.writer(at) }
        };
        client.flush()?;
        client.verify(timing.check, whole, &expected).context("data read back after the writes")?;
        drop(client);
        let Some(server) = server else { return Ok(()) };
        server.stop()?;
        let check = Command::new("qemu-img").args(["check", "-q"]).arg(&file).output()?;
        let said = String::from_utf8_lossy(&check.stdout);
        ensure!(check.status.success(), "qemu-img check after {}: {said}", kind.label());
        Ok(())
    }
}
