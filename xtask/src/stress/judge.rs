//! What stock tools say of the disk's files, and what the disk holds by the server and by them.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value as Json;

use super::export::{Ask, Export, Request};
use super::model::{Change, Model};
use super::nbd::Nbd;
use super::server::{NAME, PATIENCE, Setup};
use super::shared::Shared;
use super::stamp::SECTOR;
use super::view::{Sectors, View};

/// Sectors that are read at once.
const STEP: u64 = 2048;
/// Clusters that are used before the load begins.
const AGED_MAX: usize = 1000;

/// Leaks are what a kill may leave, until they are repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaks {
    Allowed,
    Refused,
}

/// Has `vmstrata check` repair the leaks of every layer of a disk that nobody has open.
///
/// # Errors
/// When it fails.
pub(super) fn repair(setup: &Setup) -> Result<()> {
    for (layer, _) in chain(&setup.disk)?.into_iter().filter(|(_, is_qcow2)| *is_qcow2) {
        let layer = layer.to_str().context("a path that is text")?;
        setup.command(&["check", "--repair", "leaks", layer], false)?.wait()?.good()?;
    }
    Ok(())
}

/// All files of the chain, newest first, each with whether it is qcow2.
fn chain(disk: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let mut info = Command::new("qemu-img");
    let info = info.args(["info", "-U", "--backing-chain", "--output=json"]).arg(disk).output()?;
    ensure!(info.status.success(), "qemu-img info: {}", String::from_utf8_lossy(&info.stderr));
    let chain: Vec<Json> = serde_json::from_slice(&info.stdout)?;
    let file = |layer: &Json| -> Result<(PathBuf, bool)> {
        let name = layer["filename"].as_str().context("a file's name")?;
        Ok((PathBuf::from(name), layer["format"] == "qcow2"))
    };
    chain.iter().map(file).collect()
}

/// Has `qemu-img check` judge every layer of a disk that nobody writes. A killed server's locks may linger, so none is asked for.
///
/// # Errors
/// When one of them is not sound.
pub(super) fn check(disk: &Path, leaks: Leaks) -> Result<()> {
    for (layer, _) in chain(disk)?.into_iter().filter(|(_, is_qcow2)| *is_qcow2) {
        let checked = Command::new("qemu-img").args(["check", "-U", "-f", "qcow2"]).arg(&layer).output()?;
        let code = checked.status.code();
        if code == Some(0) || (code == Some(3) && leaks == Leaks::Allowed) {
            continue;
        }
        let said = [checked.stdout, checked.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with("Leaked")).take(8).collect();
        bail!("qemu-img check of {} ended with {code:?}:\n{}", layer.display(), lines.join("\n"));
    }
    Ok(())
}

/// Reads `image` with stock tools, and checks it against `view`.
///
/// # Errors
/// When it cannot be read, or holds what it may not.
pub(super) fn compare(image: &Path, format: &str, out: &Path, view: &View) -> Result<()> {
    let copy = out.join("read.raw");
    let mut convert = Command::new("qemu-img");
    let converted = convert.args(["convert", "-f", format, "-O", "raw"]).arg(image).arg(&copy).output()?;
    ensure!(converted.status.success(), "qemu-img convert: {}", String::from_utf8_lossy(&converted.stderr));
    let mut file = File::open(&copy)?;
    let length = file.metadata()?.len();
    ensure!(
        length == view.len() * SECTOR as u64,
        "{} has {length} bytes, not {} sectors",
        image.display(),
        view.len()
    );
    let mut at = 0;
    while at < view.len() {
        let mut bytes = vec![0; Sectors::new(at, STEP.min(view.len() - at)).bytes()];
        file.read_exact(&mut bytes)?;
        view.check(at, &bytes).with_context(|| format!("stock read of {}", image.display()))?;
        at += STEP;
    }
    drop(file);
    Ok(std::fs::remove_file(copy)?)
}

/// What the disk may hold now that nothing is in flight.
pub(super) fn now(model: &mut Model) -> View {
    let all = Sectors::new(0, model.len());
    let watch = model.watch(all);
    model.viewed(watch)
}

/// Reads the whole disk through the server and checks it; what was doubtful is settled by it. `sizes` are the sizes that
/// the disk may have.
///
/// # Errors
/// When a request fails, or the disk holds what it may not.
pub(super) fn served(shared: &Shared, setup: &Setup, sizes: &[u64]) -> Result<()> {
    let mut nbd = Nbd::connect(&setup.nbd(), NAME, true)?;
    let sectors = nbd.sectors();
    ensure!(sizes.contains(&sectors), "the disk has {sectors} sectors, not {sizes:?}");
    if shared.model().len() != sectors {
        shared.model().resize(sectors);
    }
    let mut at = 0;
    while at < sectors {
        let range = Sectors::new(at, STEP.min(sectors - at));
        let watch = shared.model().watch(range);
        let bytes = one(&mut nbd, Ask::Read, range, &[])?;
        shared.model().read(watch, &bytes).context("the whole disk read after a start")?;
        at += STEP;
    }
    Ok(())
}

/// Writes a sector of each cluster and discards them all, so that the image has clusters that are free and not new.
///
/// # Errors
/// When a request fails.
pub(super) fn age(shared: &Shared, setup: &Setup) -> Result<()> {
    let mut nbd = Nbd::connect(&setup.nbd(), NAME, false)?;
    let sectors = nbd.sectors();
    let mut change = |range: Sectors, change: Change| -> Result<()> {
        let claim = shared.model().claim(range, change).context("nothing is in flight")?;
        let ask = if change == Change::Write { Ask::Write } else { Ask::Trim };
        let answered = one(&mut nbd, ask, range, &claim.data());
        let mut model = shared.model();
        match answered {
            Ok(_) => model.done(claim, false),
            Err(_) => model.doubt(claim),
        }
        answered.map(drop)
    };
    let cluster = shared.config.cluster();
    for start in (0..sectors).step_by(cluster as usize).take(AGED_MAX) {
        change(Sectors::new(start, 1), Change::Write)?;
    }
    let all = Sectors::new(0, sectors.min(cluster * AGED_MAX as u64));
    change(all, Change::Trim)?;
    let asked = shared.model().flush();
    one(&mut nbd, Ask::Flush, Sectors::new(0, 0), &[])?;
    shared.model().flushed(asked);
    Ok(())
}

/// One request, and its answer.
fn one(nbd: &mut Nbd, ask: Ask, range: Sectors, data: &[u8]) -> Result<Vec<u8>> {
    let request = Request { ask, range, fua: false };
    nbd.submit(0, &request, data)?;
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if let Some(reply) = nbd.replies(Duration::from_millis(100))?.pop() {
            return reply.result.map_err(|errno| anyhow!("{request:?}: error {errno}"));
        }
    }
    bail!("no answer to {request:?}")
}
