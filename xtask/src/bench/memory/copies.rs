//! The same guest in full: three copies of its memory, and QEMU's own migration to a file.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::super::qmp::Qmp;
use super::sample::{Sample, Samples};
use super::stage::Stage;
use super::{COPIES, taken};
use crate::guest::must;

/// Longest that a migration takes.
const MIGRATION_MAX: Duration = Duration::from_secs(600);
/// How often QEMU is asked whether it is done.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Bytes a second that no disk here reaches.
const UNLIMITED: u64 = 1 << 40;

/// Measures all of them on the guest as it is, held for each.
pub(super) fn measure(stage: &Stage, samples: &mut Samples) -> Result<()> {
    let mut qmp = stage.monitor()?;
    qmp.execute("migrate-set-parameters", &json!({ "max-bandwidth": UNLIMITED }))?;
    let used = taken::used(stage)? as f64;
    full(stage, &mut qmp, used, samples)?;
    let file = stage.dir().join("migrated");
    let (seconds, bytes) = migrate(&mut qmp, &file)?;
    samples.add(Sample::QemuSeconds, seconds);
    samples.add(Sample::QemuBytes, used / bytes as f64);
    // Later versions of QEMU compress only what goes over several sockets.
    if capability(&mut qmp, "compress", true).is_ok() {
        qmp.execute("migrate-set-parameters", &json!({ "compress-level": 1, "compress-threads": 2 }))?;
        let (seconds, bytes) = migrate(&mut qmp, &file)?;
        capability(&mut qmp, "compress", false)?;
        samples.add(Sample::QemuCompressedSeconds, seconds);
        samples.add(Sample::QemuCompressedBytes, used / bytes as f64);
    }
    Ok(())
}

/// Three copies as files: the paper's peer. Compressed ones are measured for their size only.
fn full(stage: &Stage, qmp: &mut Qmp, used: f64, samples: &mut Samples) -> Result<()> {
    let copy = |index: usize| stage.dir().join(format!("copy-{index}"));
    let start = Instant::now();
    let state = stage.dir().join("state");
    migrate_held(qmp, &state, &["x-ignore-shared"])?;
    for index in 0..COPIES {
        let mut out = File::create(copy(index))?;
        std::io::copy(&mut File::open(stage.memory())?, &mut out)?;
        std::io::copy(&mut File::open(&state)?, &mut out)?;
        out.sync_all()?;
    }
    let seconds = start.elapsed().as_secs_f64();
    qmp.execute("cont", &json!({}))?;
    samples.add(Sample::CopiesSeconds, seconds);
    for mode in taken::MODES {
        samples.divided(Sample::Seconds(mode), Sample::CopiesSeconds, Sample::SecondsOfCopies(mode));
    }
    let packed = stage.dir().join("packed");
    must(Command::new("zstd").args(["-1", "-q", "-f"]).arg(copy(0)).arg("-o").arg(&packed))
        .context("zstd (package zstd)")?;
    let compressed = packed.metadata()?.len() as f64 * COPIES as f64;
    samples.add(Sample::SavedOfCompressed, 100.0 - used * 100.0 / compressed);
    (0..COPIES).map(copy).chain([state, packed]).try_for_each(fs::remove_file)?;
    Ok(())
}

/// Migrates the guest into a file, and lets it go on; returns seconds and bytes.
fn migrate(qmp: &mut Qmp, file: &Path) -> Result<(f64, u64)> {
    let migrated = migrate_held(qmp, file, &[])?;
    qmp.execute("cont", &json!({}))?;
    Ok(migrated)
}

/// As [`migrate`], but leaves the guest held.
fn migrate_held(qmp: &mut Qmp, file: &Path, capabilities: &[&str]) -> Result<(f64, u64)> {
    qmp.execute("stop", &json!({}))?;
    capabilities.iter().try_for_each(|name| capability(qmp, name, true))?;
    let start = Instant::now();
    // QEMU does not wait for what reads its pipe, let alone for the disk.
    let done = file.with_extension("done");
    let write = format!("dd of='{}' bs=1M iflag=fullblock conv=fsync status=none", file.display());
    let command = format!("exec:{write} && : > '{}'", done.display());
    qmp.execute("migrate", &json!({ "uri": command }))?;
    loop {
        let status = qmp.execute("query-migrate", &json!({}))?;
        match status["status"].as_str() {
            Some("completed") if done.exists() => break,
            Some("failed" | "cancelled") => bail!("QEMU does not migrate: {status}"),
            _ if start.elapsed() > MIGRATION_MAX => bail!("QEMU's migration does not end: {status}"),
            _ => std::thread::sleep(LOOK_EVERY),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    fs::remove_file(done)?;
    capabilities.iter().try_for_each(|name| capability(qmp, name, false))?;
    Ok((seconds, file.metadata()?.len()))
}

fn capability(qmp: &mut Qmp, name: &str, on: bool) -> Result<()> {
    let capability = json!({ "capability": name, "state": on });
    qmp.execute("migrate-set-capabilities", &json!({ "capabilities": [capability] })).map(|_| ())
}
