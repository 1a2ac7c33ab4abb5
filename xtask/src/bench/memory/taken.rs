//! Snapshots by `vmstrata vm snapshot`, each into an empty vault.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::sample::{Sample, Samples};
use super::stage::Stage;
use crate::guest::must;

/// What saved bytes, as `vm show --json` calls it, and as the report does.
const CAUSES: [(&str, &str); 6] = [
    ("free", "free pages"),
    ("refill", "read again from the disk"),
    ("clean", "one copy of clean cache"),
    ("zero", "zeros"),
    ("same", "same pages"),
    ("zstd", "zstd"),
];

/// How the first snapshots are taken, each into an empty vault; the last way is the default.
pub(super) const MODES: [&str; 3] = ["stop", "live", "copy"];

/// The vault of the first snapshots in the default mode, and of what follows them.
const VAULT: &str = "copy";
/// The vault of a snapshot with every page of clean cache, and its name.
pub(super) const WHOLE: &str = "whole";
/// The same of one at the same instant whose clean cache lies on the disk.
pub(super) const REFILLED: &str = "refilled";

/// The name of a round's snapshot.
pub(super) fn name(round: usize) -> String {
    format!("s{round}")
}

/// Takes one in every mode.
pub(super) fn modes(stage: &Stage, round: usize, samples: &mut Samples) -> Result<()> {
    for mode in MODES {
        // There is none before the first round.
        stage.vault(mode).iter().filter(|repository| repository.exists()).try_for_each(fs::remove_dir_all)?;
        // The disk has one snapshot of a name.
        let taken = take(stage, &format!("{}-{mode}", name(round)), &["--mode", mode], mode)?;
        samples.add(Sample::Seconds(mode), number(&taken, "seconds")?);
        samples.add(Sample::Pause(mode), number(&taken, "pause-ms")?);
    }
    Ok(())
}

/// The same, and what the last one saved.
pub(super) fn measure(stage: &Stage, round: usize, samples: &mut Samples) -> Result<()> {
    modes(stage, round, samples)?;
    let name = format!("{}-{VAULT}", name(round));
    let shown = stage.vm_command(&["show", &format!("guest@{name}"), "--json"], VAULT)?.output()?;
    let shown = parsed(&shown.stdout)?;
    let saved = &shown["savings"];
    let full = number(saved, "full-copies")?;
    for (cause, said) in CAUSES {
        samples.add(Sample::SavedBy(said), number(saved, cause)? * 100.0 / full);
    }
    let first = used(stage)?;
    samples.add(Sample::Saved, 100.0 - first as f64 * 100.0 / full);
    Ok(())
}

/// Takes another one of the same guest beside it, some time later.
pub(super) fn measure_next(stage: &Stage, round: usize, samples: &mut Samples) -> Result<()> {
    let first = used(stage)?;
    let taken = take(stage, &format!("{}-next", name(round)), &[], VAULT)?;
    samples.add(Sample::NextSeconds, number(&taken, "seconds")?);
    samples.add(Sample::NextBytes, (used(stage)? - first) as f64 / first as f64);
    Ok(())
}

/// Takes two of one instant, the second without counting on the guest's disk; the guest is held afterwards.
pub(super) fn take_both(stage: &mut Stage) -> Result<()> {
    take(stage, REFILLED, &[], REFILLED)?;
    // QEMU migrates a guest that it holds only once.
    stage.restore(REFILLED, REFILLED, REFILLED, &["--paused"])?;
    take(stage, WHOLE, &["--no-refill"], WHOLE).map(drop)
}

fn take(stage: &Stage, name: &str, flags: &[&str], vault: &str) -> Result<Value> {
    let words = ["snapshot", "guest", "--one-device", "--json", "--name", name];
    parsed(&must(stage.vm_monitored(&words, vault)?.args(flags))?.stdout)
}

/// Bytes of all files of the vault.
pub(super) fn used(stage: &Stage) -> Result<u64> {
    let mut bytes = 0;
    for repository in stage.vault(VAULT) {
        for file in fs::read_dir(repository)? {
            bytes += file?.metadata()?.len();
        }
    }
    Ok(bytes)
}

fn parsed(bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).with_context(|| String::from_utf8_lossy(bytes).into_owned())
}

fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("no {name} in {value}"))
}
