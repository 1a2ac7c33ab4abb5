//! The snapshots that there should be, and what each may hold.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value as Json;

use super::judge;
use super::server::Setup;
use super::view::View;

/// How sure it is that a snapshot is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Sure,
    /// Taking it was cut short, or failed.
    MaybeTaken,
    /// Deleting it was cut short, or failed.
    MaybeDeleted,
}

#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) name: String,
    /// `None` when it may hold anything: it was not answered, and the journal was lost.
    pub(super) view: Option<View>,
    pub(super) presence: Presence,
}

/// One line of `vmstrata snapshot list`.
struct Listed {
    name: String,
    layer: PathBuf,
    format: String,
    being_deleted: bool,
}

/// See the module documentation; oldest first.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    pub(super) all: Vec<Snapshot>,
    taken: usize,
}

impl Snapshots {
    /// The name of the next one.
    pub(super) fn next_name(&mut self) -> String {
        self.taken += 1;
        format!("s{}", self.taken)
    }

    /// Those that are there for sure.
    pub(super) fn sure(&self) -> Vec<String> {
        let sure = self.all.iter().filter(|snapshot| snapshot.presence == Presence::Sure);
        sure.map(|snapshot| snapshot.name.clone()).collect()
    }

    /// Marks some as gone, or perhaps gone.
    pub(super) fn deleted(&mut self, names: &[String], for_sure: bool) {
        if for_sure {
            self.all.retain(|snapshot| !names.contains(&snapshot.name));
        }
        for snapshot in self.all.iter_mut().filter(|snapshot| names.contains(&snapshot.name)) {
            snapshot.presence = Presence::MaybeDeleted;
        }
    }

    fn list(setup: &Setup) -> Result<Vec<Listed>> {
        let disk = setup.disk.to_str().context("a path that is text")?;
        let listed = setup.command(&["snapshot", "list", "--json", disk], false)?.wait()?.good()?;
        let listed: Json = serde_json::from_str(&listed)?;
        let rows = listed["snapshots"].as_array().context("snapshots")?;
        let listed = |row: &Json| -> Result<Listed> {
            Ok(Listed {
                name: row["name"].as_str().unwrap_or_default().to_owned(),
                layer: row["layer"].as_str().context("a layer")?.into(),
                format: row["format"].as_str().context("a format")?.to_owned(),
                being_deleted: row["being-deleted"] == true,
            })
        };
        rows.iter().map(listed).collect()
    }

    /// The journal is lost: what was not answered need not be whole.
    pub(super) fn journal_lost(&mut self) {
        for snapshot in self.all.iter_mut().filter(|snapshot| snapshot.presence == Presence::MaybeTaken) {
            snapshot.view = None;
        }
    }

    /// Compares the list with the files of a disk that nobody has open; whatever was in doubt is decided by it.
    ///
    /// # Errors
    /// When a snapshot is missing, or there against what was asked for.
    pub(super) fn reconcile(&mut self, setup: &Setup) -> Result<()> {
        let listed = Self::list(setup)?;
        let named: Vec<&Listed> = listed.iter().filter(|row| !row.name.is_empty()).collect();
        let row = |name: &str| named.iter().find(|row| row.name == name);
        for snapshot in &self.all {
            let row = row(&snapshot.name);
            if snapshot.presence == Presence::Sure {
                let row = row.with_context(|| format!("snapshot {} is missing", snapshot.name))?;
                ensure!(!row.being_deleted, "snapshot {} is half deleted, which nobody asked for", row.name);
            }
        }
        if let Some(strange) = named.iter().find(|row| self.all.iter().all(|known| known.name != row.name)) {
            // One that is half deleted stays until it is deleted again.
            ensure!(
                strange.being_deleted,
                "snapshot {} is there, though it was deleted or never taken",
                strange.name
            );
        }
        self.all.retain(|snapshot| match (snapshot.presence, row(&snapshot.name)) {
            (Presence::Sure, _) => true,
            (_, None) => false,
            (_, Some(row)) => !row.being_deleted,
        });
        self.all.iter_mut().for_each(|snapshot| snapshot.presence = Presence::Sure);
        Ok(())
    }

    /// Reads every snapshot with stock tools, and checks it.
    ///
    /// # Errors
    /// When one of them holds what it may not.
    pub(super) fn judge(&self, setup: &Setup) -> Result<usize> {
        let listed = Self::list(setup)?;
        let mut judged = 0;
        for snapshot in &self.all {
            let Some(view) = &snapshot.view else { continue };
            let row = listed.iter().find(|row| row.name == snapshot.name).context("reconciled before")?;
            judge::compare(&row.layer, &row.format, &setup.out, view)
                .with_context(|| format!("snapshot {}", snapshot.name))?;
            judged += 1;
        }
        Ok(judged)
    }
}
