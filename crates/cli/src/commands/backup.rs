//! `vmstrata backup`: a frozen state of a disk copied, whole or as what changed, and copies verified.

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use vmstrata_backup::{
    BackupOptions, BackupReport, BackupTarget, MANIFEST_SUFFIX, Manifest, ManifestDraft, backup,
    check as check_before, manifest_path, verify,
};
use vmstrata_disk::snapshot::{State, state_of};
use vmstrata_disk::{OpenOptions, ResourceOptions, Resources};
use vmstrata_types::path_to_text;

use super::snapshot;
use super::states::{explain, resolve};
use crate::args::BackupArgs;
use crate::attach::absolute;
use crate::audit;
use crate::output::{Progress, print, print_json};
use crate::units::short_size;

/// The result as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report<'a> {
    file: &'a str,
    /// The snapshot that it is of, if it is called so.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    incremental: bool,
    /// Length of the backup's file.
    bytes: u64,
    /// Bytes of the disk that were stored.
    stored_bytes: u64,
    disk_bytes: u64,
    seconds: f64,
    sha256: String,
    manifest_sha256: String,
}

impl<'a> Report<'a> {
    /// What a job reported of `file`.
    pub fn new(file: &'a str, report: &BackupReport) -> Self {
        let manifest = &report.manifest;
        Self {
            file,
            snapshot: manifest.state.snapshot.clone(),
            incremental: manifest.builds_on.is_some(),
            bytes: manifest.file.bytes,
            stored_bytes: report.stored_bytes,
            disk_bytes: manifest.disk_bytes,
            seconds: report.took.as_secs_f64(),
            sha256: manifest.file.sha256.to_string(),
            manifest_sha256: manifest.sha256.to_string(),
        }
    }

    fn line(&self, done: &str) -> String {
        let kind = if self.incremental { "incremental" } else { "full" };
        let (bytes, disk) = (short_size(self.bytes), short_size(self.disk_bytes));
        format!("{}: {done}, {kind}, {bytes} for a disk of {disk}\n", self.file)
    }
}

/// Makes or verifies a backup.
///
/// # Errors
/// When it cannot be made, or is damaged.
pub fn run(args: &BackupArgs) -> Result<ExitCode> {
    match (&args.verify, &args.output, &args.state) {
        (Some(file), ..) => check(args, file),
        (None, Some(output), Some(state)) if output == OsStr::new("-") => to_stdout(args, state),
        (None, Some(output), Some(state)) => to_file(args, state, output),
        _ => unreachable!("clap asks for one of them"),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: &BackupArgs, file: &Path) -> Result<()> {
    let resources = Resources::start(ResourceOptions::default())?;
    let report = watched("verifying", args.quiet, |watch| {
        verify(&image_of(file), &resources, watch).map_err(|error| explain(&error))
    })?;
    say(args, &path_to_text(file), &report, "sound")
}

fn to_file(args: &BackupArgs, state: &Path, output: &Path) -> Result<()> {
    ensure!(args.manifest.is_none(), "--manifest is for -o -; a file's manifest lies beside it");
    for path in [output.to_owned(), manifest_path(output)] {
        let exists = path.symlink_metadata().is_ok();
        ensure!(args.force || !exists, "{}: exists already; --force replaces it", path.display());
    }
    let target = BackupTarget::File { path: output.to_owned(), replace: args.force };
    let report = make(args, state, target, Some(output))?;
    say(args, &path_to_text(output), &report, "backed up")
}

fn to_stdout(args: &BackupArgs, state: &Path) -> Result<()> {
    let manifest = args.manifest.as_ref().context(
        "-o - needs --manifest FILE: without its manifest a backup can be neither verified nor restored",
    )?;
    let exists = manifest.symlink_metadata().is_ok();
    ensure!(args.force || !exists, "{}: exists already; --force replaces it", manifest.display());
    let mut stdout = io::stdout().lock();
    ensure!(!stdout.is_terminal(), "standard output is a terminal: name a file, or a command after |");
    // Before the first byte: what was sent for hours is nothing without it.
    let draft = ManifestDraft::beside(manifest).map_err(|error| explain(&error))?;
    let report = make(args, state, BackupTarget::Stream(&mut stdout), None)?;
    draft.publish(&report.manifest, args.force).map_err(|error| explain(&error))?;
    say(args, "-", &report, "backed up")
}

fn make(
    args: &BackupArgs,
    state: &Path,
    target: BackupTarget<'_>,
    output: Option<&Path>,
) -> Result<BackupReport> {
    let options = options(args, output)?;
    let Some(name) = &args.snapshot else { return make_of(args, state, target, &options) };
    ensure!(
        state.symlink_metadata().is_ok() || !state.as_os_str().as_bytes().contains(&b'@'),
        "{}: is a snapshot: with --snapshot name the disk, of which one is taken",
        state.display()
    );
    let open = OpenOptions {
        read_only: true,
        format: args.format,
        allow_backing: args.backing.allow_backing.clone(),
        ..OpenOptions::default()
    };
    // A snapshot of which no backup can be made is one too many.
    check_before(state, &target, &options).map_err(|error| explain(&error))?;
    let name = snapshot::take(state, name.as_deref(), args.format, &open, &args.server)?;
    let taken = state_of(state, &name);
    if !args.quiet {
        eprintln!("vmstrata: {} taken", taken.display());
    }
    let made = make_of(args, &taken, target, &options);
    made.with_context(|| format!("{} was taken, and stays; its backup was not made", taken.display()))
}

fn make_of(
    args: &BackupArgs,
    state: &Path,
    target: BackupTarget<'_>,
    options: &BackupOptions,
) -> Result<BackupReport> {
    let output = match &target {
        BackupTarget::File { path, .. } => absolute(path),
        BackupTarget::Stream(_) => "-".to_owned(),
    };
    audit::change(audit::of("disk_backup", [state]).object(output), |what| {
        let made = copy(args, state, target, options)?;
        what.bytes = Some(made.manifest.file.bytes);
        Ok(made)
    })
}

fn copy(
    args: &BackupArgs,
    state: &Path,
    target: BackupTarget<'_>,
    options: &BackupOptions,
) -> Result<BackupReport> {
    let text = state.display();
    let state = resolve(state, args.format, &args.backing)?;
    let resources = Resources::start(ResourceOptions::default())?;
    // Before the first byte: a rule may drop it meanwhile.
    let is_held_now = !args.no_hold
        && state.hold(&args.hold_tag).unwrap_or_else(|error| {
            eprintln!(
                "vmstrata: warning: {text} is not held, so keep it yourself until the next incremental backup: {error}"
            );
            false
        });
    let made = watched("backing up", args.quiet, |watch| {
        backup(&state, target, options, &resources, watch).map_err(|error| explain(&error))
    });
    match &made {
        Ok(_) => let_go_of_since(args, &state, options),
        Err(_) if is_held_now => warn_if_held_still(&state, &args.hold_tag),
        Err(_) => {}
    }
    made
}

/// The snapshot that an incremental backup began from is needed no more: the next one begins from this backup's.
fn let_go_of_since(args: &BackupArgs, state: &State, options: &BackupOptions) {
    let since = options.since.as_ref().filter(|since| !args.no_hold && since.path != state.path);
    if let Some(since) = since {
        warn_if_held_still(since, &args.hold_tag);
    }
}

/// Releases a hold, and warns if it cannot be.
fn warn_if_held_still(state: &State, tag: &str) {
    if let Err(error) = state.release(tag) {
        eprintln!("vmstrata: warning: {} is still held ({tag}): {error}", state.path.display());
    }
}

fn options(args: &BackupArgs, output: Option<&Path>) -> Result<BackupOptions> {
    let since = args.since.as_deref().map(|since| resolve(since, None, &args.backing)).transpose()?;
    let previous = args.previous.as_deref().map(|file| Previous::find(file, output)).transpose()?;
    let (previous, name) = previous.map_or((None, None), |found| (Some(found.manifest), Some(found.name)));
    Ok(BackupOptions {
        since,
        backing_name: args.backing_name.clone().or(name),
        previous,
        compression: args.compress.compression(),
        allow_backing: args.backing.allow_backing.clone(),
        bytes_per_second: args.speed.limit,
        threads: args.speed.threads,
    })
}

/// The backup that an incremental one builds upon.
struct Previous {
    manifest: Manifest,
    /// What to call it as a backing file.
    name: OsString,
}

impl Previous {
    /// By its own name, or its manifest's.
    fn find(file: &Path, output: Option<&Path>) -> Result<Self> {
        let image = image_of(file);
        let manifest = Manifest::of(&image).map_err(|error| explain(&error))?;
        if let Some(output) = output {
            let same =
                output.canonicalize().ok().is_some_and(|output| image.canonicalize().ok() == Some(output));
            ensure!(!same, "{}: a backup cannot replace the one it builds upon", output.display());
        }
        Ok(Self { manifest, name: backing_name(&image, output)? })
    }
}

/// A backup's file, which may be named by its manifest.
pub fn image_of(file: &Path) -> PathBuf {
    let image = file.as_os_str().as_bytes().strip_suffix(MANIFEST_SUFFIX.as_bytes());
    image.map_or(file, |image| Path::new(OsStr::from_bytes(image))).to_owned()
}

/// Beside the new backup the file's name alone, so that the two can be moved together; elsewhere its path.
fn backing_name(image: &Path, output: Option<&Path>) -> Result<OsString> {
    let directory = |path: &Path| match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.canonicalize(),
        _ => Path::new(".").canonicalize(),
    };
    let name = image.file_name().with_context(|| format!("{}: not a file", image.display()))?;
    let is_beside = output.is_none_or(|output| directory(output).ok() == directory(image).ok());
    Ok(if is_beside { name.to_owned() } else { image.canonicalize()?.into() })
}

fn say(args: &BackupArgs, file: &str, report: &BackupReport, done: &str) -> Result<()> {
    let report = Report::new(file, report);
    match (args.json, file) {
        (true, "-") => eprintln!("{}", serde_json::to_string_pretty(&report)?),
        (false, "-") => eprint!("{}", report.line(done)),
        (true, _) => print_json(&report)?,
        (false, _) => print(&report.line(done))?,
    }
    Ok(())
}

/// Runs a job that counts bytes, and shows its progress on stderr. SIGINT and SIGTERM stop the job, which then cleans up.
pub fn watched<T>(
    what: &str,
    quiet: bool,
    job: impl FnOnce(&mut dyn FnMut(u64, u64) -> bool) -> Result<T>,
) -> Result<T> {
    let progress = Progress::of_bytes(quiet);
    until_stopped(|stop| {
        job(&mut |done, total| {
            progress.update(what, done, total);
            !stop.load(Ordering::Relaxed)
        })
    })
}

/// Runs a job that ends early once the flag is set. SIGINT and SIGTERM set it.
pub fn until_stopped<T>(job: impl FnOnce(&AtomicBool) -> Result<T>) -> Result<T> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    job(&stop)
}
