//! Which guests stand still for a snapshot, and what is said of it.
//!
//! A snapshot is *quiesced* when every one of its disks has an agent and all of them froze their file systems: then those
//! need no recovery in it. Else it is what a power failure at that moment would have left.

use std::path::{Path, PathBuf};

use vmstrata_api::Quiesce;

use crate::agent::{self, Frozen, Guards, Patience};
use crate::error::Error;

/// The label that says so in the snapshot.
const LABEL: &str = "quiesced";

/// Guests that stand still until [`Quiesced::thaw`], or until this is dropped.
#[derive(Debug, Default)]
pub(super) struct Quiesced {
    frozen: Vec<Frozen>,
    /// `None` where nothing is known of an agent.
    is_quiesced: Option<bool>,
    /// Why it is not, though there is an agent.
    pub(super) why_not: Option<String>,
}

/// A disk and its guest's agent.
pub(super) type WithAgent = (String, Option<PathBuf>);

/// The longest of the labels that a snapshot of these disks may get: one that fits leaves room for the others.
pub(super) fn longest_label(disks: &[WithAgent]) -> Option<(String, String)> {
    disks.iter().any(|(_, agent)| agent.is_some()).then(|| (LABEL.to_owned(), false.to_string()))
}

/// Freezes the guests of `disks`, each once.
///
/// # Errors
/// With [`Quiesce::Always`], a disk without an agent, or an agent that does not do it. Nothing stays frozen.
pub(super) fn quiesce(
    disks: &[WithAgent],
    how: Quiesce,
    patience: Patience,
    guards: &Guards,
) -> Result<Quiesced, Error> {
    let knows_agent = disks.iter().any(|(_, agent)| agent.is_some());
    if how == Quiesce::Never || how == Quiesce::Auto && !knows_agent {
        return Ok(Quiesced { is_quiesced: knows_agent.then_some(false), ..Quiesced::default() });
    }
    match freeze_all(disks, patience, guards) {
        Ok(frozen) => Ok(Quiesced { frozen, is_quiesced: Some(true), why_not: None }),
        Err(error) if how == Quiesce::Auto => {
            let why_not = vmstrata_types::told(&error);
            tracing::warn!("a snapshot is taken without quiescing: {why_not}");
            Ok(Quiesced { frozen: Vec::new(), is_quiesced: Some(false), why_not: Some(why_not) })
        }
        Err(error) => Err(error),
    }
}

fn freeze_all(disks: &[WithAgent], patience: Patience, guards: &Guards) -> Result<Vec<Frozen>, Error> {
    if let Some((disk, _)) = disks.iter().find(|(_, agent)| agent.is_none()) {
        return Err(Error::NoAgent { name: disk.clone() });
    }
    let real = |socket: &PathBuf| socket.canonicalize().unwrap_or_else(|_| socket.clone());
    let mut sockets: Vec<PathBuf> = disks.iter().filter_map(|(_, agent)| agent.as_ref().map(real)).collect();
    sockets.sort_unstable();
    sockets.dedup();
    let mut frozen = Vec::with_capacity(sockets.len());
    for socket in &sockets {
        let guest = agent::freeze(socket, patience, guards).map_err(|source| failed(socket, source))?;
        tracing::info!(agent = %socket.display(), file_systems = guest.file_systems, "the guest is frozen");
        frozen.push(guest);
    }
    Ok(frozen)
}

fn failed(socket: &Path, source: agent::AgentFault) -> Error {
    Error::Agent { socket: socket.to_owned(), source }
}

impl Quiesced {
    /// Whether the guests stand still.
    pub(super) fn is_quiesced(&self) -> bool {
        self.is_quiesced == Some(true)
    }

    /// What the snapshot's record says.
    pub(super) fn label(&self) -> Option<(String, String)> {
        self.is_quiesced.map(|is| (LABEL.to_owned(), is.to_string()))
    }

    /// Lets all guests go on, and says so if one had gone on before ([`Quiesced::is_quiesced`]).
    ///
    /// # Errors
    /// The first that may not go on, or that had before, with [`Quiesce::Always`]; the others were let go all the same.
    pub(super) fn thaw(&mut self, how: Quiesce) -> Result<(), Error> {
        let mut result = Ok(());
        for guest in std::mem::take(&mut self.frozen) {
            let (socket, frozen) = (guest.socket().to_owned(), guest.file_systems);
            match guest.thaw() {
                Ok(Some(thawed)) if thawed < frozen => {
                    let error = Error::ThawedEarly { socket, frozen, thawed };
                    tracing::warn!("{error}");
                    self.is_quiesced = Some(false);
                    self.why_not.get_or_insert_with(|| error.to_string());
                    if how == Quiesce::Always {
                        result = result.and(Err(error));
                    }
                }
                Ok(_) => {}
                Err(source) => result = result.and(Err(Error::StillFrozen { socket, source })),
            }
        }
        result
    }
}

#[cfg(test)]
mod tests;
