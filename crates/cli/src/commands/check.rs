//! `vmstrata check`: the engine's check of one image, with the counters and exit codes of qemu-img's.

use std::fmt::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use vmstrata_check::{Phase, Report as Found};
use vmstrata_disk::{CheckOptions, ErrorKind, OpenOptions, snapshot};
use vmstrata_types::path_to_text;

use crate::args::{CheckArgs, Repair};
use crate::audit;
use crate::output::{Progress, answer, counted, percent, visible};

/// Findings listed; the counters count all.
const FINDINGS_MAX: usize = 1000;

/// Exit codes, as qemu-img check has them.
const EXIT_CANNOT_CHECK: u8 = 1;
const EXIT_CORRUPT: u8 = 2;
const EXIT_LEAKS: u8 = 3;
const EXIT_NO_CHECKS: u8 = 63;

/// The result as data, with qemu-img's fields.
#[derive(Debug, Serialize)]
struct Report<'a> {
    filename: String,
    format: &'static str,
    #[serde(flatten)]
    found: &'a Found,
}

impl<'a> Report<'a> {
    fn new(args: &CheckArgs, found: &'a Found) -> Self {
        Self { filename: path_to_text(&args.file), format: "qcow2", found }
    }

    fn exit_code(&self) -> u8 {
        match self.found {
            Found { check_errors: 1.., .. } => EXIT_CANNOT_CHECK,
            Found { corruptions: 1.., .. } => EXIT_CORRUPT,
            Found { leaks: 1.., .. } => EXIT_LEAKS,
            _ => 0,
        }
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        self.write_text(&mut text).expect("writing to a string");
        text
    }

    fn write_text(&self, out: &mut String) -> fmt::Result {
        for finding in &self.found.findings {
            writeln!(out, "{}: byte {}: {}", finding.kind.severity(), finding.at, finding.kind)?;
        }
        let unlisted = self.found.findings_total - self.found.findings.len() as u64;
        if unlisted > 0 {
            writeln!(out, "... and {unlisted} more")?;
        }
        if self.found.corruptions_fixed + self.found.leaks_fixed > 0 {
            let (corruptions, leaks) = (self.found.corruptions_fixed, self.found.leaks_fixed);
            writeln!(out, "repaired: {}, {}", counted(corruptions, "corruption"), counted(leaks, "leak"))?;
        }
        writeln!(out, "{}: {}", self.filename, self.verdict())?;
        if self.found.journaled > 0 {
            let clusters = counted(self.found.journaled, "cluster");
            writeln!(
                out,
                "its server was killed: {clusters} belong to writes in the server's journal, which the next one takes up"
            )?;
        }
        writeln!(
            out,
            "{} of {} clusters allocated ({:.1} %), {} compressed, {} fragmented; the image ends at {}",
            self.found.allocated_clusters,
            self.found.total_clusters,
            percent(self.found.allocated_clusters, self.found.total_clusters),
            self.found.compressed_clusters,
            self.found.fragmented_clusters,
            self.found.image_end_offset
        )
    }

    fn verdict(&self) -> String {
        match self.exit_code() {
            EXIT_CANNOT_CHECK => {
                let parts = counted(self.found.check_errors, "part");
                format!("{parts} could not be checked, so the numbers below say little")
            }
            EXIT_CORRUPT => format!(
                "{}, {}; do not write to it: copy it, then --repair all on the copy",
                counted(self.found.corruptions, "corruption"),
                counted(self.found.leaks, "leak")
            ),
            EXIT_LEAKS if self.found.journal_missing => format!(
                "{} at most: its server was killed, and the server's journal, which is not in the runtime directory \
                 (--runtime-dir), says which of them are unflushed writes",
                counted(self.found.leaks, "leak")
            ),
            EXIT_LEAKS => {
                format!(
                    "{}; data is safe, --repair leaks gives the space back",
                    counted(self.found.leaks, "leak")
                )
            }
            _ => "clean".to_owned(),
        }
    }
}

/// Checks, repairs if asked, and prints the result.
///
/// # Errors
/// When the image cannot be opened, locked or read.
pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    let state = snapshot::resolve(&args.file, &OpenOptions::default())?;
    let check = || Ok(vmstrata_disk::check(&state.path, &options(args))?);
    let found = match args.repair {
        Some(_) => audit::change(audit::of("disk_repair", [&state.path]), |_| check()),
        None => check(),
    };
    let found = match found {
        Err(error) if has_no_metadata(&error) => {
            eprintln!("vmstrata: error: {}", visible(&error.to_string()));
            return Ok(ExitCode::from(EXIT_NO_CHECKS));
        }
        found => found?,
    };
    let report = Report::new(args, &found);
    answer(args.json, &report, || report.to_text())?;
    Ok(ExitCode::from(report.exit_code()))
}

fn has_no_metadata(error: &anyhow::Error) -> bool {
    let engine: Option<&vmstrata_disk::Error> = error.downcast_ref();
    engine.is_some_and(|error| matches!(error.kind(), ErrorKind::NoMetadata))
}

fn options(args: &CheckArgs) -> CheckOptions {
    let line = Progress::of(args.quiet, "tables");
    let image = vmstrata_check::Options {
        repair: match args.repair {
            None => vmstrata_check::Repair::None,
            Some(Repair::Leaks) => vmstrata_check::Repair::Leaks,
            Some(Repair::All) => vmstrata_check::Repair::All,
        },
        findings_max: FINDINGS_MAX,
        progress: Some(Arc::new(move |now| line.update(phase_name(now.phase), now.done, now.total))),
        ..vmstrata_check::Options::default()
    };
    CheckOptions {
        image,
        force_share: args.force_share,
        journal_dir: args.journal.dir(),
        unflushed: args.journal.unflushed(),
        allow_backing: args.backing.allow_backing.clone(),
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Refcounts => "reading refcounts",
        Phase::Tables => "reading tables",
        Phase::Repair => "repairing",
    }
}

#[cfg(test)]
mod tests {
    use vmstrata_check::{Finding, FindingKind};
    use vmstrata_types::HostOffset;

    use super::*;
    use crate::args::{BackingArgs, JournalArgs};

    fn report(found: &Found) -> Report<'_> {
        let args = CheckArgs {
            file: "a.qcow2".into(),
            repair: None,
            force_share: false,
            journal: JournalArgs::default(),
            backing: BackingArgs { allow_backing: Vec::new() },
            json: false,
            quiet: true,
        };
        Report::new(&args, found)
    }

    #[test]
    fn the_worst_finding_decides_the_exit_code() {
        let code = |check_errors, corruptions, leaks| {
            report(&Found { check_errors, corruptions, leaks, ..Found::default() }).exit_code()
        };
        assert_eq!(code(0, 0, 0), 0);
        assert_eq!(code(0, 0, 7), 3);
        assert_eq!(code(0, 1, 7), 2);
        assert_eq!(code(1, 1, 7), 1);
    }

    #[test]
    fn findings_name_their_offset_and_those_not_listed_are_counted() {
        let kind = FindingKind::Leak { refcount: 1, references: 0 };
        let finding = Finding { at: HostOffset::new(0x50000), kind };
        let found = Found { leaks: 5, findings: vec![finding], findings_total: 5, ..Found::default() };
        let text = report(&found).to_text();
        assert!(text.starts_with("leak: byte 0x50000: leaked: refcount is 1"), "{text}");
        assert!(text.contains("... and 4 more\n"), "{text}");
        assert!(text.contains("a.qcow2: 5 leaks; data is safe"), "{text}");
    }

    #[test]
    fn a_clean_image_says_so_in_two_lines() {
        let text = report(&Found { total_clusters: 10, allocated_clusters: 5, ..Found::default() }).to_text();
        assert!(text.starts_with("a.qcow2: clean\n5 of 10 clusters allocated (50.0 %)"), "{text}");
        assert_eq!(text.lines().count(), 2);
    }
}
