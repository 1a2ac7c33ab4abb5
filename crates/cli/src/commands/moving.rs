//! `vmstrata move` and `vmstrata drain`: disks move to other directories or to flat copies, through the server that serves them or by
//! themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use vmstrata_api::{DiskDetail, DiskList, JobSpec, MovePhase, MoveStatus, UnreadableRange, encode_segment};
use vmstrata_disk::{Disk, Format, OpenOptions, directory_of, probe_chain};
use vmstrata_job::{Bucket, wait_while};
use vmstrata_migrate::{
    BackOptions, FlatMove, FlatOptions, Move, MoveOptions, Moving, Phase, Plan, Schedule, Unreadable,
    allocated, is_flat, is_way_back, moved_to,
};
use vmstrata_nbd::Uri;
use vmstrata_server::move_order;
use vmstrata_types::time::rfc3339;
use vmstrata_types::{path_from_text, path_to_text};

use super::backup::until_stopped;
use super::merge::drop_states;
use super::snapshot::live::Live;
use super::snapshot::resources;
use crate::args::{ControlArgs, DrainArgs, MoveArgs, MoveHowArgs};
use crate::audit;
use crate::client::Client;
use crate::output::{Progress, Table, answer, counted};
use crate::units::short_size;

/// What was done, for scripts.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Moved {
    disk: String,
    from: String,
    to: String,
    copied_bytes: u64,
    seconds: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unreadable: Vec<UnreadableRange>,
}

impl Moved {
    fn text(&self) -> String {
        let bad = |bad: &UnreadableRange| {
            format!(
                "{}: {} bytes at offset {} cannot be read: the copy has zeros there\n",
                bad.file, bad.bytes, bad.offset
            )
        };
        let rate = short_size(self.copied_bytes / self.seconds.max(1));
        let moved = format!(
            "{}: moved to {}: {} copied in {} s ({rate}/s)\n",
            self.from,
            self.to,
            short_size(self.copied_bytes),
            self.seconds
        );
        self.unreadable.iter().map(bad).collect::<String>() + &moved
    }
}

/// What would be done.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Planned {
    disk: String,
    to: String,
    bytes: u64,
    layers: Vec<PlannedFile>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct PlannedFile {
    file: String,
    bytes: u64,
}

impl Planned {
    fn of(disk: &Path, to: &Path, open: &OpenOptions) -> Result<Self> {
        let moved = moved_to(disk).filter(|moved| moved.is_raw);
        let at = moved.as_ref().map_or(disk, |moved| &moved.path);
        if is_way_back(at, to) {
            let file = PlannedFile { file: path_to_text(at), bytes: allocated(at) };
            let (disk, to) = (path_to_text(disk), path_to_text(to));
            return Ok(Self { disk, to, bytes: file.bytes, layers: vec![file] });
        }
        if is_flat(to) {
            return Self::of_flat(disk, to, open);
        }
        let to = to.canonicalize().with_context(|| format!("{}: cannot be found", to.display()))?;
        let chain = probe_chain(disk, open)?;
        let plan = Plan::of_files(chain.into_iter().map(|layer| (layer.path, layer.format)), &to)?;
        let file = |path: &Path, bytes| PlannedFile { file: path_to_text(path), bytes };
        let frozen = plan.layers.iter().map(|layer| file(&layer.from, layer.bytes));
        let active = (plan.active_bytes > 0).then(|| file(disk, plan.active_bytes));
        Ok(Self {
            disk: path_to_text(disk),
            to: path_to_text(&to),
            bytes: plan.bytes(),
            layers: frozen.chain(active).collect(),
        })
    }

    fn of_flat(disk: &Path, to: &Path, open: &OpenOptions) -> Result<Self> {
        let file = |path: &Path| PlannedFile { file: path_to_text(path), bytes: allocated(path) };
        let layers: Vec<PlannedFile> =
            probe_chain(disk, open)?.iter().map(|layer| file(&layer.path)).collect();
        let bytes = layers.iter().map(|layer| layer.bytes).sum();
        Ok(Self { disk: path_to_text(disk), to: path_to_text(to), bytes, layers })
    }

    fn text(&self) -> String {
        let mut table = Table::new([">SIZE ON DISK", "FILE"]);
        self.layers.iter().for_each(|layer| table.row([short_size(layer.bytes), layer.file.clone()]));
        let (layers, bytes) = (counted(self.layers.len() as u64, "file"), short_size(self.bytes));
        format!("{table}{}: {layers}, {bytes} at most would be copied to {}\n", self.disk, self.to)
    }
}

/// How far a disk's move is.
pub fn line(moving: &MoveStatus) -> String {
    let MoveStatus { phase, from, to, left_bytes, kept_until_ns, is_flat, slowed_to, .. } = moving;
    let left = short_size(*left_bytes);
    match phase {
        MovePhase::Copying if let Some(rate) = slowed_to => {
            format!("moves to {to}: {left} left to copy; writes are slowed to {}/s", short_size(*rate))
        }
        MovePhase::Copying => format!("moves to {to}: {left} left to copy"),
        MovePhase::Rest => format!("writes to {to}, and needs {from} still: {left} left to copy"),
        MovePhase::Moved if *is_flat => {
            format!("moved from {from}, whose files are left: `vmstrata gc {from} --yes`")
        }
        MovePhase::Moved if vmstrata_migrate::is_flat(Path::new(from)) => format!("is back from {from}"),
        MovePhase::Moved => {
            let until = kept_until_ns.map_or_else(String::new, |until| format!(" until {}", rfc3339(until)));
            format!("moved from {from}; source files are kept{until}")
        }
    }
}

/// Runs `vmstrata move`.
///
/// # Errors
/// What could not be done; the disk is where it was, or on its way.
pub fn run(args: &MoveArgs) -> Result<ExitCode> {
    let json = args.access.common.json;
    let live = Live::find(slice::from_ref(&args.disk), &args.access.server)?;
    let to = match &args.to {
        Some(to) => to.clone(),
        None => way_back(&args.disk, live.as_ref())?,
    };
    if args.how.dry_run {
        let planned = Planned::of(&args.disk, &to, &args.access.common.open())?;
        answer(json, &planned, || planned.text())?;
        return Ok(ExitCode::SUCCESS);
    }
    let left = |moved: &Moved| {
        if is_flat(Path::new(&moved.from)) {
            return format!("{}the flat copy is left as it is\n", moved.text());
        }
        format!(
            "{}its source files are left: `vmstrata gc {} --yes` removes them\n",
            moved.text(),
            moved.from
        )
    };
    match live {
        Some(live) => {
            let moved = by_server(&live, &to, (&args.how, args.yes), json)?;
            answer(json, &moved, || {
                if is_flat(&to) || is_flat(Path::new(&moved.from)) {
                    return left(&moved);
                }
                let kept = args.how.keep.as_secs();
                format!(
                    "{}its source files are kept for {kept} s: until then `vmstrata move {} --undo` moves it back\n",
                    moved.text(),
                    moved.disk
                )
            })?;
        }
        None => {
            let moved = audit::change(audit::of("move", [&args.disk]), |_| by_itself(args, &to))?;
            answer(json, &moved, || left(&moved))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The directory that a disk came from, while its source files are kept; of a flat copy, the path that the disk had.
fn way_back(disk: &Path, live: Option<&Live>) -> Result<PathBuf> {
    let from = match live {
        Some(live) => {
            let now = detail(live)?.disk;
            match now.moving {
                Some(MoveStatus { is_flat: true, from, .. }) => return Ok(path_from_text(&from)),
                // It did not get there.
                Some(MoveStatus { phase: MovePhase::Copying, to, .. }) if to == now.path => {
                    return Ok(path_from_text(&to));
                }
                moving => moving.map(|moving| path_from_text(&moving.from)),
            }
        }
        None if moved_to(disk).is_some_and(|moved| moved.is_raw) => return Ok(disk.to_owned()),
        None => vmstrata_migrate::came_from(disk)?,
    };
    let from = from.with_context(|| {
        format!(
            "{}: no source files are kept: it has not moved, or they were removed. Of a flat copy, say with --to the path that the disk had before",
            disk.display()
        )
    })?;
    Ok(directory_of(&from))
}

fn detail(live: &Live) -> Result<DiskDetail> {
    live.client().get(&format!("/v1/disks/{}", encode_segment(live.name())))
}

fn by_server(live: &Live, to: &Path, (how, overwrite): (&MoveHowArgs, bool), quiet: bool) -> Result<Moved> {
    let from = detail(live)?.disk.path;
    let asked = JobSpec::Move {
        disk: live.name().to_owned(),
        to: if Uri::is_meant(to) {
            to.display().to_string()
        } else {
            path_to_text(&std::path::absolute(to)?)
        },
        keep_seconds: Some(how.keep.as_secs()),
        overwrite,
        skip_unreadable: how.skip_unreadable,
        deadline_seconds: how.deadline.map(|time| time.as_secs().max(1)),
        latency_percent: how.latency,
        order: how.order,
        bytes_per_second: how.limit,
    };
    let job = live.wait_job(&asked, quiet)?;
    let now = detail(live)?.disk;
    let (from, unreadable) = now.moving.map_or((from, Vec::new()), |moving| (moving.from, moving.unreadable));
    Ok(Moved {
        disk: now.name,
        from,
        to: now.path,
        copied_bytes: job.bytes,
        seconds: job.seconds,
        unreadable,
    })
}

fn by_itself(args: &MoveArgs, to: &Path) -> Result<Moved> {
    let moved = moved_to(&args.disk);
    let mut open = OpenOptions { read_only: false, ..args.access.open() };
    if moved.as_ref().is_some_and(|moved| moved.is_raw) {
        open.format = Some(Format::Raw);
    }
    let path = moved.map_or_else(|| args.disk.clone(), |moved| moved.path);
    open.allow_backing.extend(vmstrata_migrate::source_directory(&path));
    let resources = resources(&args.access.journal)?;
    let disk = Disk::open(&path, &open, &resources)?;
    let order = move_order(args.how.order, &path);
    let moved = if is_way_back(&path, to) {
        let skip_unreadable = args.how.skip_unreadable;
        let options = BackOptions { to: to.to_owned(), open: open.clone(), skip_unreadable, order };
        FlatMove::begin_back(&disk, &options).map_err(Into::into).and_then(|mut moving| go(&mut moving, args))
    } else if is_flat(to) {
        let options = FlatOptions {
            to: to.to_owned(),
            open: open.clone(),
            overwrite: args.yes,
            skip_unreadable: args.how.skip_unreadable,
            order,
        };
        FlatMove::begin(&disk, &options).map_err(Into::into).and_then(|mut moving| go(&mut moving, args))
    } else {
        let options = MoveOptions { order, ..MoveOptions::new(to.to_owned(), open.clone()) };
        move_files(&disk, options, args)
    };
    // Whatever came of it, the image is left clean.
    let closed = disk.close();
    drop(disk);
    let (moved, froze) = moved?;
    closed?;
    if !is_flat(to) {
        let open = OpenOptions { read_only: true, format: None, ..open };
        drop_states(&path_from_text(&moved.to), &froze, &open)?;
    }
    Ok(moved)
}

fn move_files(disk: &Arc<Disk>, options: MoveOptions, args: &MoveArgs) -> Result<(Moved, Vec<String>)> {
    // No guest writes meanwhile, so copy everything after the switch.
    let MoveHowArgs { keep, skip_unreadable, .. } = args.how;
    let options = MoveOptions { keep, skip_unreadable, rest: u64::MAX, ..options };
    let mut moving = Moving::begin(disk, &options)?;
    let moved = go(&mut moving, args)?;
    moving.leave_source()?;
    Ok(moved)
}

/// Returns the names of the states that it made, too.
fn go(moving: &mut dyn Move, args: &MoveArgs) -> Result<(Moved, Vec<String>)> {
    let began = Instant::now();
    let schedule = args.how.deadline.map(|time| Schedule::new(time, began));
    let progress = Progress::of_bytes(args.access.common.json);
    let mut bucket = Bucket::new(args.how.limit, began);
    let mut copied = 0;
    until_stopped(|stop| {
        while moving.phase() != Phase::Whole {
            if stop.load(Ordering::Relaxed) {
                bail!("{}: stopped: the command goes on if it is run again", args.disk.display());
            }
            let bytes = moving.step(bucket.step_bytes().min(4 << 20))?;
            copied += bytes;
            let left = moving.report().left_bytes;
            progress.update("move", copied, copied + left);
            bucket.take(bytes, Instant::now());
            bucket.wait_while(|| !stop.load(Ordering::Relaxed));
            if let Some(schedule) = schedule {
                let goes_on = || !stop.load(Ordering::Relaxed);
                wait_while(goes_on, || schedule.may_wait(copied, left, Instant::now()));
            }
        }
        Ok(())
    })?;
    let report = moving.report();
    let moved = Moved {
        disk: path_to_text(&args.disk),
        from: path_to_text(&report.from),
        to: path_to_text(&report.to),
        copied_bytes: copied,
        seconds: began.elapsed().as_secs(),
        unreadable: report.unreadable.iter().map(range_of).collect(),
    };
    Ok((moved, report.froze))
}

fn range_of(bad: &Unreadable) -> UnreadableRange {
    UnreadableRange { file: path_to_text(&bad.file), offset: bad.offset, bytes: bad.len }
}

/// What became of a directory's disks.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Drained {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    planned: Vec<Planned>,
    moved: Vec<Moved>,
    failed: Vec<Failed>,
    /// Images that are neither served nor a backing file in this directory.
    left: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Failed {
    disk: String,
    error: String,
}

/// Runs `vmstrata drain`.
///
/// # Errors
/// No server; a directory that cannot be read.
pub fn drain(args: &DrainArgs) -> Result<ExitCode> {
    if is_flat(&args.to) {
        bail!(
            "{}: disks are drained to a directory: `vmstrata move` makes a flat copy of one",
            args.to.display()
        );
    }
    let dir = args.dir.canonicalize().with_context(|| format!("{}: cannot be found", args.dir.display()))?;
    let served: DiskList = Client::new(&args.server)?.get("/v1/disks")?;
    let is_there = |path: &Path| directory_of(path).canonicalize().is_ok_and(|own| own == dir);
    // One that is on its way is gone on with by its server.
    let is_leaving = |disk: &&vmstrata_api::DiskStatus| {
        is_there(&path_from_text(&disk.path))
            || disk.moving.as_ref().is_some_and(|moving| {
                moving.phase == MovePhase::Copying && is_there(&path_from_text(&moving.from))
            })
    };
    let leaving: Vec<PathBuf> =
        served.disks.iter().filter(is_leaving).map(|disk| path_from_text(&disk.path)).collect();
    let mut drained =
        Drained { planned: Vec::new(), moved: Vec::new(), failed: Vec::new(), left: left(&dir, &leaving)? };
    for (number, disk) in leaving.iter().enumerate() {
        if args.how.dry_run {
            drained.planned.push(Planned::of(
                disk,
                &args.to,
                &OpenOptions { read_only: true, ..OpenOptions::default() },
            )?);
            continue;
        }
        if !args.json {
            eprintln!("{} ({} of {})", disk.display(), number + 1, leaving.len());
        }
        match move_one(disk, args) {
            Ok(moved) => drained.moved.push(moved),
            Err(error) => {
                drained.failed.push(Failed { disk: path_to_text(disk), error: format!("{error:#}") });
            }
        }
    }
    answer(args.json, &drained, || drained.text(&dir))?;
    let is_done = drained.failed.is_empty();
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn move_one(disk: &PathBuf, args: &DrainArgs) -> Result<Moved> {
    let server: &ControlArgs = &args.server;
    let live = Live::find(slice::from_ref(disk), server)?.context("it is not served any more")?;
    by_server(&live, &args.to, (&args.how, false), args.json)
}

/// The images in a directory that are neither one of `disks` nor a backing file there.
fn left(dir: &Path, disks: &[PathBuf]) -> Result<Vec<String>> {
    let mut stood_on: Vec<PathBuf> = disks.to_vec();
    let mut images = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("{}: cannot be read", dir.display()))? {
        let path = entry?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if hidden || !path.is_file() {
            continue;
        }
        let Ok(head) = vmstrata_disk::probe_layer(&path, None) else { continue };
        if head.header.is_none() {
            continue;
        }
        stood_on.extend(head.backing_path);
        images.push(path);
    }
    let real = |path: &PathBuf| path.canonicalize().ok();
    let stood_on: Vec<PathBuf> = stood_on.iter().filter_map(real).collect();
    images.retain(|image| real(image).is_none_or(|image| !stood_on.contains(&image)));
    images.sort();
    Ok(images.iter().map(|image| path_to_text(image)).collect())
}

impl Drained {
    fn text(&self, dir: &Path) -> String {
        let mut text = String::new();
        self.planned.iter().for_each(|planned| text += &planned.text());
        self.moved.iter().for_each(|moved| text += &moved.text());
        self.failed.iter().for_each(|failed| text += &format!("{}: {}\n", failed.disk, failed.error));
        for image in &self.left {
            text += &format!("{image}: no server serves it: `vmstrata move` it by itself\n");
        }
        let (moved, failed) = (counted(self.moved.len() as u64, "disk"), self.failed.len());
        text + &format!("{}: {moved} moved, {failed} failed, {} left\n", dir.display(), self.left.len())
    }
}
