//! `vmstrata convert`: a disk made an image or a raw disk, from and to files, devices, exports and pipes.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use vmstrata_backup::{
    ConvertOptions, ConvertReport, ConvertSource, ConvertTarget, RestoreFormat, convert, data_bytes,
};
use vmstrata_disk::create::record_overlay;
use vmstrata_disk::snapshot::State;
use vmstrata_disk::{
    DescribedDisk, Disk, Format, LocalFiles, OpenOptions, Opener, ResourceOptions, Resources, directory_of,
    probe_layer,
};
use vmstrata_nbd::{Client, Files, Uri};
use vmstrata_qcow2::NewBacking;
use vmstrata_types::{ClusterBits, path_to_text};

use super::backup::until_stopped;
use super::states::{explain, resolve};
use crate::args::ConvertArgs;
use crate::attach::absolute;
use crate::audit::{self, What};
use crate::disk_spec::format_by_name;
use crate::output::{Progress, print, print_json};
use crate::units::short_size;

/// What stands for standard input or output.
const PIPE: &str = "-";

/// The result as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    source: String,
    target: String,
    format: String,
    disk_bytes: u64,
    /// Bytes of the disk that are stored.
    data_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    verified: bool,
    dry_run: bool,
}

/// Converts the disk.
///
/// # Errors
/// When it cannot be read, or the target cannot be made.
pub fn run(args: &ConvertArgs) -> Result<ExitCode> {
    let is_device = args.target.metadata().is_ok_and(|found| found.file_type().is_block_device());
    let is_file = !is_device && !is_pipe(&args.target) && !Uri::is_meant(&args.target);
    ensure!(
        args.force || args.dry_run || !is_file || args.target.symlink_metadata().is_err(),
        "{}: exists already; --force replaces it",
        args.target.display()
    );
    ensure!(
        args.force || args.dry_run || is_file || is_pipe(&args.target),
        "{}: all that is on it will be lost: say so with --force",
        args.target.display()
    );
    let (source, backing) = if is_pipe(&args.source) {
        ensure!(args.from != Some(Format::Qcow2), "what comes from standard input is a raw disk");
        ensure!(!args.keep_backing && !args.dry_run, "--keep-backing and --dry-run are for disks in files");
        (None, None)
    } else {
        let (disk, backing) = open(args)?;
        (Some(disk), backing)
    };
    let options = options(args, is_file, backing.as_ref().map(|(backing, _)| backing.clone()))?;
    let done = if args.dry_run {
        let disk = source.as_ref().context("a dry run is of a disk")?;
        until_stopped(|stop| dry_run(args, disk, stop))?
    } else {
        let what =
            What { object: Some(name_of(&args.source)), ..What::of("disk_convert", [name_of(&args.target)]) };
        audit::change(what, |what| {
            if let Some((_, below)) = backing.as_ref().filter(|_| options.format == RestoreFormat::Qcow2) {
                record_overlay(&args.target, below);
            }
            let done = until_stopped(|stop| make(args, source, &options, stop))?;
            what.bytes = Some(done.data_bytes);
            Ok(done)
        })?
    };
    say(args, &options, &done)?;
    Ok(ExitCode::SUCCESS)
}

fn is_pipe(name: &Path) -> bool {
    name.as_os_str() == PIPE
}

/// What leads to it from everywhere.
fn name_of(name: &Path) -> String {
    let is_path = !is_pipe(name) && !Uri::is_meant(name) && DescribedDisk::of(name).is_none();
    if is_path { absolute(name) } else { path_to_text(name) }
}

/// A backing file that is kept, as the new image names it and by its path.
type Kept = (NewBacking, PathBuf);

/// The disk, and the backing file that is to be kept.
fn open(args: &ConvertArgs) -> Result<(Arc<Disk>, Option<Kept>)> {
    let mut opener: Arc<dyn Opener> = Arc::new(LocalFiles);
    // Only a file may be an image of which it is said that it is raw.
    let mut is_exact = false;
    let state = if Uri::is_meant(&args.source) {
        ensure!(args.from != Some(Format::Qcow2), "what an export has is a raw disk");
        opener = Arc::new(Files::reading(opener, &args.source));
        is_exact = true;
        State { path: args.source.clone(), format: Some(Format::Raw), info: None }
    } else if let Some(described) = DescribedDisk::of(&args.source) {
        let described = described.map_err(|error| explain(&error))?;
        opener = described.opener(opener);
        State { path: described.path, format: described.format.or(args.from), info: None }
    } else {
        resolve(&args.source, args.from, &args.backing)?
    };
    let options = state.open_options(OpenOptions {
        read_only: true,
        format_is_exact: is_exact,
        allow_backing: args.backing.allow_backing.clone(),
        opener: Arc::clone(&opener),
        ..OpenOptions::default()
    });
    let resources = Resources::start_with(ResourceOptions::default(), opener)?;
    let disk = Disk::open(&state.path, &options, &resources).map_err(|error| explain(&error))?;
    let backing = if args.keep_backing { Some(kept(args, &state, &disk)?) } else { None };
    Ok((disk, backing))
}

/// The backing file of the disk's newest layer.
fn kept(args: &ConvertArgs, state: &State, disk: &Disk) -> Result<Kept> {
    let none = || format!("{}: has no backing file to keep", args.source.display());
    ensure!(disk.layer_count() > 1, none());
    let head = probe_layer(&state.path, Some(Format::Qcow2)).map_err(|error| explain(&error))?;
    let (stored, path) = head.backing_name.zip(head.backing_path).with_context(none)?;
    let directory = |path: &Path| directory_of(path).canonicalize();
    let is_beside = directory(&args.target).ok() == directory(&state.path).ok();
    // A description says from where its file is, whatever image has it.
    let name = if is_beside || stored.as_encoded_bytes().starts_with(b"json:") {
        stored
    } else {
        path.canonicalize().with_context(|| path.display().to_string())?.into()
    };
    let layers = disk.layers();
    let format = head.backing_format.unwrap_or_else(|| layers[layers.len() - 2].format.to_string());
    Ok((NewBacking { name: name.into_encoded_bytes(), format: Some(format) }, path))
}

fn options(args: &ConvertArgs, is_file: bool, backing: Option<NewBacking>) -> Result<ConvertOptions> {
    let by_name = match format_by_name(&args.target) {
        Format::Qcow2 if is_file => RestoreFormat::Qcow2,
        _ => RestoreFormat::Raw,
    };
    let format = args.to.map_or(by_name, RestoreFormat::from);
    let is_shaped = args.cluster_size.is_some() || args.subclusters;
    ensure!(
        format == RestoreFormat::Qcow2 || !is_shaped,
        "a disk in raw format has no clusters: leave out --cluster-size and --subclusters"
    );
    let cluster_bits = match args.cluster_size {
        None => ClusterBits::DEFAULT,
        Some(size) => ClusterBits::from_size(size).with_context(|| {
            format!("--cluster-size {size}: a cluster is a power of two from 512 bytes to 2 MiB")
        })?,
    };
    Ok(ConvertOptions {
        format,
        cluster_bits,
        subclusters: args.subclusters,
        compression: args.compress.compression(),
        backing,
        replace: args.force,
        sync: !args.no_sync,
        verify: args.verify,
        bytes_per_second: args.speed.limit,
        threads: args.speed.threads,
    })
}

fn dry_run(args: &ConvertArgs, disk: &Disk, stop: &AtomicBool) -> Result<ConvertReport> {
    let progress = Progress::of_bytes(args.quiet);
    let data_bytes = data_bytes(disk, args.keep_backing, &mut |done, total| {
        progress.update("looking", done, total);
        !stop.load(Ordering::Relaxed)
    });
    let data_bytes = data_bytes.map_err(|error| explain(&error))?;
    Ok(ConvertReport { disk_bytes: disk.size(), data_bytes, took: Default::default() })
}

fn make(
    args: &ConvertArgs,
    disk: Option<Arc<Disk>>,
    options: &ConvertOptions,
    stop: &AtomicBool,
) -> Result<ConvertReport> {
    let mut input = Input { stop };
    let source = disk.map_or(ConvertSource::Stream(&mut input), ConvertSource::Disk);
    let mut output = None;
    let target = if is_pipe(&args.target) {
        let stdout = io::stdout();
        ensure!(!stdout.is_terminal(), "standard output is a terminal: name a file, or a command after |");
        ConvertTarget::Stream(output.insert(File::from(stdout.as_fd().try_clone_to_owned()?)))
    } else if let Some(uri) = Uri::of(&args.target) {
        let client = Client::connect(&uri?).with_context(|| args.target.display().to_string())?;
        ConvertTarget::Store(args.target.clone(), Arc::new(client))
    } else {
        ConvertTarget::Path(args.target.clone())
    };
    let progress = Progress::of_bytes(args.quiet);
    convert(source, target, options, &mut |done, total| {
        progress.update("converting", done, total);
        !stop.load(Ordering::Relaxed)
    })
    .map_err(|error| explain(&error))
}

/// Standard input, which may be long in coming.
struct Input<'a> {
    stop: &'a AtomicBool,
}

/// How long to wait for input before it is asked whether to stop.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

impl Read for Input<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let stdin = io::stdin();
        while !self.stop.load(Ordering::Relaxed) {
            match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&LOOK_EVERY)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(rustix::io::retry_on_intr(|| rustix::io::read(&stdin, &mut *into))?),
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(io::Error::other("stopped"))
    }
}

fn say(args: &ConvertArgs, options: &ConvertOptions, done: &ConvertReport) -> Result<()> {
    let format = match options.format {
        RestoreFormat::Qcow2 => Format::Qcow2,
        RestoreFormat::Raw => Format::Raw,
    };
    let report = Report {
        source: path_to_text(&args.source),
        target: path_to_text(&args.target),
        format: format.to_string(),
        disk_bytes: done.disk_bytes,
        data_bytes: done.data_bytes,
        seconds: (!args.dry_run).then_some(done.took.as_secs_f64()),
        verified: args.verify && !args.dry_run,
        dry_run: args.dry_run,
    };
    let (data, disk) = (short_size(report.data_bytes), short_size(report.disk_bytes));
    let did = match (args.dry_run, report.verified) {
        (true, _) => "would be made",
        (_, true) => "made, and compared",
        _ => "made",
    };
    let line = format!("{}: {did}, {format}, {data} of data on a disk of {disk}\n", report.target);
    match (args.json, is_pipe(&args.target) && !args.dry_run) {
        (true, true) => eprintln!("{}", serde_json::to_string_pretty(&report)?),
        (false, true) if args.quiet => {}
        (false, true) => eprint!("{line}"),
        (true, false) => print_json(&report)?,
        (false, false) => print(&line)?,
    }
    Ok(())
}
