//! `vmstrata vm snapshot`: memory, devices and disks of a running guest, at one instant.

use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vmstrata_api::{Quiesce, SnapshotSpec};
use vmstrata_disk::snapshot::{MEMORY_LABEL, now_ns};
use vmstrata_memory::Introspection;
use vmstrata_memory::capture::{self, Before, Channel, Control, Mode, Report, Request};
use vmstrata_memory::vault::{OneDevice, Policy, Vault};
use vmstrata_qcow2::snapshot_info::MAX_LABELS;
use vmstrata_types::time;

use super::disks::ServedDisks;
use super::guard::{Guard, Resume, Undo};
use super::kept::{Keeping, Look};
use super::periodic;
use super::states::States;
use crate::args::{BackingArgs, VmMode, VmSnapshotArgs};
use crate::audit::{self, What};
use crate::client::Client;
use crate::output::{counted, print, print_json, print_json_line};
use crate::units::short_size;

/// The result as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Shown {
    snapshot: String,
    id: String,
    pause_ms: f64,
    seconds: f64,
    disks: Vec<String>,
    /// Whether its disks' states are kept.
    state: &'static str,
    /// The guest's kernel, as far as it could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<String>,
    /// Why every page counts as critical.
    #[serde(skip_serializing_if = "Option::is_none")]
    unreadable: Option<String>,
    /// Whether it needs no object of an older snapshot.
    full: bool,
    pages: u64,
    free_pages: u64,
    clean_pages: u64,
    /// Of those, pages that are read from the disks.
    refilled_pages: u64,
    /// Those that no older snapshot has.
    stored_pages: u64,
    /// Bytes of pages that were written, one copy.
    stored_bytes: u64,
}

/// Takes the snapshot, or one after the other.
///
/// # Errors
/// What failed; the guest runs on, and nothing is listed.
pub(super) fn run(args: &VmSnapshotArgs) -> Result<ExitCode> {
    let cancel = cancel_on_signals()?;
    match args.every {
        Some(period) => periodic::run(args, period, &cancel)?,
        None => take(args, &args.label, &cancel)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes one, with `labels`, and says so.
///
/// # Errors
/// As [`run`].
pub(super) fn take(args: &VmSnapshotArgs, labels: &[(String, String)], cancel: &AtomicBool) -> Result<()> {
    check_labels(labels)?;
    let taken_ns = now_ns();
    let name = args.name.clone().unwrap_or_else(|| time::compact(taken_ns));
    let vault = super::store::open(&args.vault)?;
    let monitor = super::monitor(&args.guest, args.qmp.as_deref());
    let mut qmp = super::connect(&args.guest, &monitor)?;
    let spec = SnapshotSpec {
        disks: Vec::new(),
        name: name.clone(),
        taken_ns: Some(taken_ns),
        labels: labels.iter().cloned().chain([with_memory(&args.guest, &name)]).collect(),
        group: Some(group(&args.guest, &name)),
        agent: None,
        // The guest is held: it cannot be asked to finalize anything, and its memory holds what is not finalized.
        quiesce: Some(Quiesce::Never),
        convert_raw: args.convert_raw,
        // The guest does not wait for a repository.
        publish_later: true,
    };
    let mut served = ServedDisks::find(Client::new(&args.server)?, &mut qmp, &args.disks, spec)?;
    if served.names().is_empty() {
        eprintln!(
            "vmstrata: warning: no disk of {} is served by vmstrata: the snapshot has none",
            args.guest
        );
    }
    for other in served.others(&mut qmp)? {
        eprintln!("vmstrata: warning: {other} is not served by vmstrata, and not in the snapshot");
    }
    let copies = copies(args, &vault)?;
    let mut request = request(args, labels, &name, taken_ns, copies);
    if !args.no_refill {
        // A server has found its chains fit to open, wherever their layers are.
        let allowed = args.backing.allow_backing.iter().cloned().chain(served.backing()?).collect();
        let states = States::new(&BackingArgs { allow_backing: allowed }, &args.server)?;
        let is_held = request.mode == Mode::Stop;
        request.refill = Some(Arc::new(if is_held { states.while_held() } else { states }));
    }
    let channel = Channel::new()?;
    let before = Before::of(&mut qmp, request.mode)?;
    let mut guard = Guard::start(channel.second_reader()?.into(), Stdio::null())?;
    guard.set(&[Undo::Resume(Resume {
        monitor,
        ran: before.ran,
        capability: before.capability,
        guest: args.guest.clone(),
        name: name.clone(),
        taken_ns,
        disks: served.names().to_vec(),
        control: args.server.control.clone(),
        vault: args.vault.repositories(),
    })])?;
    let control = Control { cancel, channel };
    let what = What::of("vm_snapshot", served.names().to_vec()).object(format!("{}@{name}", args.guest));
    let report = audit::change(what, |what| {
        let report = capture::snapshot(&mut qmp, &vault, &request, &mut served, control)?;
        let stats = &report.saved.stats;
        what.bytes = Some(stats.bytes_critical + stats.bytes_clean);
        Ok(report)
    });
    // QEMU serves one client at a time: a guard that had to act would need the monitor.
    drop(qmp);
    guard.set(&[])?;
    drop(guard);
    let report = report?;
    let keeping = Look::at(&report.disks, &args.server)?.of(&report.disks);
    show(args, &name, &report, &keeping)
}

/// Refuses labels before the guest is held that its disks could not have beside one of this command's own.
fn check_labels(labels: &[(String, String)]) -> Result<()> {
    let is_own = |(key, _): &(String, String)| key == MEMORY_LABEL;
    ensure!(
        !labels.iter().any(is_own),
        "the label '{MEMORY_LABEL}' is what this command gives snapshots of disks itself"
    );
    ensure!(labels.len() < MAX_LABELS, "{} labels: {} are the most", labels.len(), MAX_LABELS - 1);
    Ok(())
}

/// The label that tells whoever prunes a disk that a guest's memory needs its snapshot.
fn with_memory(guest: &str, name: &str) -> (String, String) {
    (MEMORY_LABEL.to_owned(), format!("{guest}@{name}"))
}

/// What the snapshots of a guest's disks have in common: a group's id holds no `@`, and 64 characters.
fn group(guest: &str, name: &str) -> String {
    format!("{guest}.{name}").chars().take(64).collect()
}

/// How many copies are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Copies {
    critical: u8,
    clean: u8,
}

impl Copies {
    const DEFAULT: Self = Self { critical: 3, clean: 1 };
}

/// The copies that were asked for; else as many as the guest's newest snapshot has, or the default, as far as the vault's
/// repositories have room for them. Says where that is fewer.
fn copies(args: &VmSnapshotArgs, vault: &Vault) -> Result<Copies> {
    let listed = vault.list()?;
    let infos = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
    let newest = infos.into_iter().find(|info| info.guest == args.guest);
    let before = newest
        .map_or(Copies::DEFAULT, |info| Copies { critical: info.critical_copies, clean: info.clean_copies });
    let room = vault.copies_max(if args.one_device { OneDevice::Allow } else { OneDevice::Refuse });
    let critical = args.copies.unwrap_or(before.critical.min(room.max(1)));
    let wanted = before.critical.max(Copies::DEFAULT.critical);
    if args.copies.is_none() && critical < wanted {
        let copies = |count: u8| if count == 1 { "1 copy".to_owned() } else { format!("{count} copies") };
        let why = if critical < room {
            format!(
                "its newest snapshot has no more; --copies {} uses the room that there is",
                wanted.min(room)
            )
        } else if args.one_device {
            "the vault has no more repositories; name others with --vault".to_owned()
        } else if critical == 1 {
            "the vault is on one device, and its snapshots are lost with it; name repositories on others with --vault".to_owned()
        } else {
            "the vault is on no more devices; name repositories on others with --vault".to_owned()
        };
        eprintln!(
            "vmstrata: warning: {}: {} instead of {wanted}: {why} (--copies {critical} says that it is meant)",
            args.guest,
            copies(critical)
        );
    }
    Ok(Copies { critical, clean: args.clean_copies.unwrap_or(before.clean).min(critical) })
}

fn request(
    args: &VmSnapshotArgs,
    labels: &[(String, String)],
    name: &str,
    taken_ns: u64,
    copies: Copies,
) -> Request {
    Request {
        guest: args.guest.clone(),
        name: name.to_owned(),
        taken_ns,
        labels: labels.to_vec(),
        policy: Policy {
            critical_copies: copies.critical,
            clean_copies: copies.clean,
            one_device: if args.one_device { OneDevice::Allow } else { OneDevice::Refuse },
            full_every: args.full_every,
            level: args.level,
            ..Policy::default()
        },
        mode: match args.mode {
            VmMode::Copy => Mode::Copy,
            VmMode::Stop => Mode::Stop,
            VmMode::Live => Mode::Live,
        },
        introspect: Some(Introspection::of),
        refill: None,
    }
}

/// Set once someone interrupts or ends this process.
pub(super) fn cancel_on_signals() -> Result<Arc<AtomicBool>> {
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&cancel)).context("watching for signals")?;
    }
    Ok(cancel)
}

fn show(args: &VmSnapshotArgs, name: &str, report: &Report, keeping: &Keeping) -> Result<()> {
    let stats = &report.saved.stats;
    let shown = Shown {
        snapshot: format!("{}@{name}", args.guest),
        id: report.saved.id.to_string(),
        pause_ms: report.pause.as_secs_f64() * 1000.0,
        seconds: report.took.as_secs_f64(),
        disks: report.disks.iter().map(|disk| disk.disk.clone()).collect(),
        state: keeping.name(),
        kernel: report.kernel.clone().ok(),
        unreadable: report.kernel.clone().err(),
        full: report.saved.is_full,
        pages: stats.pages,
        free_pages: stats.free,
        clean_pages: stats.clean,
        refilled_pages: stats.refilled,
        stored_pages: stats.stored_critical + stats.stored_clean,
        stored_bytes: stats.bytes_critical + stats.bytes_clean,
    };
    if args.json && args.every.is_some() {
        return Ok(print_json_line(&shown)?);
    }
    if args.json {
        return Ok(print_json(&shown)?);
    }
    let memory = short_size(stats.pages << vmstrata_memory::PAGE_BITS);
    let disks = counted(shown.disks.len() as u64, "disk");
    let stored = short_size(shown.stored_bytes);
    let full = if shown.full { "full, " } else { "" };
    let held = format!("held for {:.1} ms, {:.1} s in all, {stored} stored", shown.pause_ms, shown.seconds);
    print(&format!("{}: {memory} of memory and {disks} taken ({full}{held})\n", shown.snapshot))?;
    if let Some(why) = keeping.why() {
        eprintln!("vmstrata: {}: {}: {why}; see `vmstrata vm list`", shown.snapshot, shown.state);
    }
    if let Some(why) = &shown.unreadable {
        eprintln!("vmstrata: every page is stored as critical: {why}");
    }
    Ok(())
}
