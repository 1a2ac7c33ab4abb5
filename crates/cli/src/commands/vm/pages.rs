//! `vmstrata vm pages`: what a guest uses its memory for, as a table, JSON, a map or a picture.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;
use vmstrata_memory::capture::{Machine, MachineRam, processor};
use vmstrata_memory::introspect::Cause;
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::{Introspection, Layout, PAGE_BYTES, PageClass, Pages, Ram};

use super::picture;
use crate::args::{MachineKind, VmPagesArgs};
use crate::output::{Table, print, print_json};
use crate::units::short_size;

/// The guest is not understood.
const EXIT_UNREADABLE: u8 = 2;
/// Longest that QEMU may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    /// The kernel's release; none if the guest is not understood.
    release: Option<String>,
    /// Why it is not.
    unreadable: Option<String>,
    page_bytes: usize,
    /// All pages that there is memory for.
    pages: u64,
    /// Pages of each class.
    classes: BTreeMap<&'static str, u64>,
    /// Pages of each cause, with its class.
    causes: Vec<CauseRow>,
    /// Folios of clean cache, and the blocks of them whose place on a disk is known.
    clean_folios: usize,
    located_blocks: usize,
    /// The guest's disks that hold them.
    disks: Vec<String>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct CauseRow {
    cause: &'static str,
    class: &'static str,
    pages: u64,
}

/// Reads and shows.
///
/// # Errors
/// When the memory cannot be reached, or the picture not be written.
pub fn run(args: &VmPagesArgs) -> Result<ExitCode> {
    let (ram, introspection, seconds) = match (&args.qmp, &args.memory) {
        (Some(socket), _) => of_machine(socket, args.pause)?,
        (None, Some(file)) => {
            let ram = of_file(file, args.machine)?;
            let start = Instant::now();
            let introspection = Introspection::of(&*ram, None);
            (ram, introspection, start.elapsed().as_secs_f64())
        }
        (None, None) => unreachable!("one of them is required"),
    };
    let nothing = Pages::default();
    let (release, unreadable, pages) = match &introspection {
        Introspection::Read { release, pages } => (Some(release.clone()), None, &**pages),
        Introspection::Unreadable(reason) => (None, Some(reason.to_string()), &nothing),
    };
    let report = Report { release, unreadable, seconds, ..report(ram.layout(), pages) };
    if let Some(file) = &args.picture {
        let bytes = picture::ppm(ram.layout(), &pages.causes);
        fs::write(file, bytes).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.json {
        print_json(&report)?;
    } else {
        print(&text(&report)?)?;
    }
    if args.map {
        print(&picture::map(ram.layout(), &pages.classes))?;
    }
    Ok(if report.unreadable.is_some() { ExitCode::from(EXIT_UNREADABLE) } else { ExitCode::SUCCESS })
}

type Read = (Box<dyn Ram>, Introspection, f64);

fn of_machine(socket: &Path, pause: bool) -> Result<Read> {
    let mut qmp = Qmp::connect(socket, PATIENCE)?;
    let machine = Machine::inspect(&mut qmp)?;
    let ram = machine.open()?;
    let running = pause && qmp.ask::<serde_json::Value>("query-status", json!({}))?["running"] == true;
    if running {
        qmp.tell("stop", json!({}))?;
    }
    let start = Instant::now();
    let introspection = Introspection::of(&ram, processor(&mut qmp));
    let seconds = start.elapsed().as_secs_f64();
    if running {
        qmp.tell("cont", json!({})).context("the guest is still paused")?;
    }
    Ok((Box::new(ram), introspection, seconds))
}

fn of_file(path: &Path, machine: MachineKind) -> Result<Box<dyn Ram>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let bytes = file.metadata()?.len();
    let layout = match machine {
        MachineKind::Q35 => Layout::q35(bytes),
        MachineKind::Pc => Layout::pc(bytes),
    };
    let layout = layout.with_context(|| format!("{} is no guest's memory", path.display()))?;
    Ok(Box::new(MachineRam::new(vec![(file, bytes)], layout)))
}

fn report(layout: &Layout, pages: &Pages) -> Report {
    let mut counts = vec![0_u64; Cause::ALL.len()];
    for block in layout.blocks() {
        let first = block.start.get() / PAGE_BYTES as u64;
        for frame in first..first + block.len / PAGE_BYTES as u64 {
            counts[pages.causes.get(vmstrata_memory::Frame::new(frame)) as usize] += 1;
        }
    }
    let mut classes = BTreeMap::from([("critical", 0), ("clean", 0), ("free", 0)]);
    let mut causes = Vec::new();
    for (&cause, &pages) in Cause::ALL.iter().zip(&counts) {
        let class = class_words(cause.class());
        *classes.entry(class).or_default() += pages;
        causes.push(CauseRow { cause: cause.words(), class, pages });
    }
    Report {
        release: None,
        unreadable: None,
        page_bytes: PAGE_BYTES,
        pages: layout.bytes() / PAGE_BYTES as u64,
        classes,
        causes,
        clean_folios: pages.hiding.len(),
        located_blocks: pages.origins.len(),
        disks: pages.disks.iter().map(|disk| disk.name.clone()).collect(),
        seconds: 0.0,
    }
}

const fn class_words(class: PageClass) -> &'static str {
    match class {
        PageClass::Critical => "critical",
        PageClass::Clean => "clean",
        PageClass::Free => "free",
    }
}

fn text(report: &Report) -> Result<String> {
    let mut text = String::new();
    let bytes = |pages: u64| short_size(pages * report.page_bytes as u64);
    match (&report.release, &report.unreadable) {
        (Some(release), _) => writeln!(text, "kernel: Linux {release}")?,
        (None, reason) => writeln!(
            text,
            "not understood: {}; every page counts as critical",
            reason.as_deref().unwrap_or("unknown")
        )?,
    }
    writeln!(
        text,
        "memory: {} ({} pages), read in {:.2} s\n",
        bytes(report.pages),
        report.pages,
        report.seconds
    )?;
    let mut table = Table::new(["class", "used for", ">pages", ">size", ">share"]);
    let share = |pages: u64| format!("{:.1} %", pages as f64 * 100.0 / report.pages.max(1) as f64);
    for (class, &pages) in &report.classes {
        table.row([(*class).to_owned(), String::new(), pages.to_string(), bytes(pages), share(pages)]);
        let of_class = report.causes.iter().filter(|row| row.class == *class && row.pages > 0);
        for row in of_class.filter(|row| row.cause != *class) {
            let cells = [row.cause.to_owned(), row.pages.to_string(), bytes(row.pages), share(row.pages)];
            let [cause, pages, size, share] = cells;
            table.row([String::new(), cause, pages, size, share]);
        }
    }
    write!(text, "{table}")?;
    if !report.disks.is_empty() {
        let disks = report.disks.join(", ");
        writeln!(
            text,
            "\nclean cache: {} folios, {} blocks of them located on {disks}",
            report.clean_folios, report.located_blocks
        )?;
    }
    Ok(text)
}
