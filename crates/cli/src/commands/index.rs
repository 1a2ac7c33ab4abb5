//! `vmstrata index`: builds, verifies and drops the indices of a chain.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use vmstrata_api::JobSpec;
use vmstrata_disk::index::{
    IndexDropped, IndexKind, IndexOptions, IndexOutcome, IndexVerdict, IndexedFile, VerifiedFile, build,
    remove, verify,
};
use vmstrata_types::path_to_text;

use super::snapshot::live::Live;
use crate::args::{IndexArgs, IndexBuildArgs, IndexCommand, IndexCommonArgs, IndexDropArgs, IndexVerifyArgs};
use crate::audit;
use crate::output::{Progress, answer, counted};

const EXIT_WRONG: u8 = 2;
const EXIT_INCOMPLETE: u8 = 3;

/// What a command did, layer by layer from the base up.
#[derive(Debug, Serialize)]
struct Report<L> {
    filename: String,
    layers: Vec<L>,
}

/// Runs one of the commands.
///
/// # Errors
/// When the chain cannot be read.
pub fn run(args: &IndexArgs) -> Result<ExitCode> {
    match &args.command {
        IndexCommand::Build(args) => run_build(args),
        IndexCommand::Verify(args) => run_verify(args),
        IndexCommand::Drop(args) => run_drop(args),
    }
}

fn options(common: &IndexCommonArgs, top: bool, doing: &'static str) -> IndexOptions {
    let line = Progress::of(common.quiet, "layers");
    IndexOptions {
        allow_backing: common.backing.allow_backing.clone(),
        allow_backing_alone: false,
        format: common.format,
        include_top: top,
        keep_unread: false,
        opener: None,
        progress: Some(Arc::new(move |done, total| line.update(doing, done, total))),
    }
}

fn show<L: Serialize>(
    disk: &std::path::Path,
    common: &IndexCommonArgs,
    layers: Vec<L>,
    line: impl Fn(&L) -> String,
    summary: String,
) -> Result<()> {
    let report = Report { filename: path_to_text(disk), layers };
    answer(common.json, &report, || {
        let lines: String = report.layers.iter().map(|layer| line(layer) + "\n").collect();
        lines + &format!("{}: {summary}\n", report.filename)
    })
}

/// What an index has in its own pages: the whole map, or what its layer says.
const fn name_of(kind: IndexKind) -> &'static str {
    match kind {
        IndexKind::Full => "full",
        IndexKind::Delta => "delta",
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct BuiltLayer {
    filename: String,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    home: Option<&'static str>,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl BuiltLayer {
    fn new(file: &IndexedFile) -> Self {
        let filename = path_to_text(&file.path);
        let plain = |outcome| {
            let filename = filename.clone();
            Self { filename, outcome, kind: None, home: None, bytes: 0, reason: None }
        };
        match &file.outcome {
            IndexOutcome::Kept(kind) => Self { kind: Some(name_of(*kind)), ..plain("kept") },
            IndexOutcome::NotNeeded => plain("not-needed"),
            IndexOutcome::Built { kind, bytes, sidecar } => {
                let home = Some(if *sidecar { "sidecar" } else { "file" });
                Self { kind: Some(name_of(*kind)), home, bytes: *bytes, ..plain("built") }
            }
            IndexOutcome::Failed(error) => Self { reason: Some(error.to_string()), ..plain("failed") },
        }
    }

    fn line(&self) -> String {
        let Self { filename, bytes, .. } = self;
        let kind = self.kind.unwrap_or_default();
        match (self.outcome, self.home, &self.reason) {
            ("built", Some("sidecar"), _) => {
                format!("{filename}: built, {kind}, {bytes} bytes beside it in {filename}.vmsx")
            }
            ("built", ..) => format!("{filename}: built, {kind}, {bytes} bytes in it"),
            (_, _, Some(reason)) => format!("{filename}: no index: {reason}"),
            ("not-needed", ..) => format!("{filename}: needs none"),
            _ => format!("{filename}: has one, {kind}"),
        }
    }
}

/// Has the server that serves the disk do it, and waits until it has.
fn build_served(live: &Live, args: &IndexBuildArgs) -> Result<ExitCode> {
    let asked = JobSpec::IndexBuild { disk: live.name().to_owned(), bytes_per_second: None };
    let job = live.wait_job(&asked, args.common.quiet)?;
    answer(args.common.json, &job, || {
        let (disk, layers) = (args.disk.display(), counted(job.total, "layer"));
        let (written, failed) = (job.bytes, job.failures);
        let reason = job.error.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        format!(
            "{disk}: {layers} looked at by its server, {written} bytes written, {failed} failed{reason}\n"
        )
    })?;
    Ok(if job.failures > 0 { ExitCode::from(EXIT_INCOMPLETE) } else { ExitCode::SUCCESS })
}

fn run_build(args: &IndexBuildArgs) -> Result<ExitCode> {
    // The disk's own file is indexed only where no server serves it.
    let live = if args.top { None } else { Live::find(std::slice::from_ref(&args.disk), &args.server)? };
    if let Some(live) = live {
        return build_served(&live, args);
    }
    let built = audit::change(audit::of("index_build", [&args.disk]), |what| {
        let built = build(&args.disk, &options(&args.common, args.top, "indexing"))?;
        what.bytes = Some(built.layers.iter().map(|layer| BuiltLayer::new(layer).bytes).sum());
        Ok(built)
    })?;
    let layers: Vec<BuiltLayer> = built.layers.iter().map(BuiltLayer::new).collect();
    let count = |outcome| layers.iter().filter(|layer| layer.outcome == outcome).count() as u64;
    let bytes: u64 = layers.iter().map(|layer| layer.bytes).sum();
    let failed = count("failed");
    let made = counted(count("built"), "index").replace("indexs", "indices");
    let summary = format!("{made} built ({bytes} bytes), {} kept, {failed} failed", count("kept"));
    show(&args.disk, &args.common, layers, BuiltLayer::line, summary)?;
    Ok(if failed > 0 { ExitCode::from(EXIT_INCOMPLETE) } else { ExitCode::SUCCESS })
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct VerifiedLayer {
    filename: String,
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    pages: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl VerifiedLayer {
    fn new(file: &VerifiedFile) -> Self {
        let (verdict, pages, reason) = match &file.verdict {
            IndexVerdict::Good { .. } => ("good", 0, None),
            IndexVerdict::NotNeeded => ("not-needed", 0, None),
            IndexVerdict::Missing => ("missing", 0, None),
            IndexVerdict::Stale { changed } => {
                ("stale", 0, Some(format!("{} was changed since", changed.display())))
            }
            IndexVerdict::Damaged { pages, first } => ("damaged", *pages, Some(first.to_string())),
            IndexVerdict::Wrong { pages, at } => {
                ("wrong", *pages, Some(format!("at guest offset {at:#x} the tables say something else")))
            }
        };
        let (kind, bytes) = match file.verdict {
            IndexVerdict::Good { kind, bytes } => (Some(name_of(kind)), Some(bytes)),
            _ => (None, None),
        };
        Self { filename: path_to_text(&file.path), verdict, kind, bytes, pages, reason }
    }

    fn line(&self) -> String {
        let Self { filename, verdict, pages, reason, .. } = self;
        if let (Some(kind), Some(bytes)) = (self.kind, self.bytes) {
            return format!("{filename}: {verdict}, {kind}, {bytes} bytes");
        }
        let pages = if *pages > 0 { format!(" ({})", counted(*pages, "page")) } else { String::new() };
        let reason = reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        format!("{filename}: {verdict}{pages}{reason}")
    }

    fn exit_code(layers: &[Self]) -> u8 {
        let any = |verdicts: &[&str]| layers.iter().any(|layer| verdicts.contains(&layer.verdict));
        if any(&["wrong"]) {
            EXIT_WRONG
        } else if any(&["missing", "stale", "damaged"]) {
            EXIT_INCOMPLETE
        } else {
            0
        }
    }
}

fn run_verify(args: &IndexVerifyArgs) -> Result<ExitCode> {
    let verified = verify(&args.disk, &options(&args.common, args.top, "verifying"))?;
    let layers: Vec<VerifiedLayer> = verified.iter().map(VerifiedLayer::new).collect();
    let code = VerifiedLayer::exit_code(&layers);
    let summary = match code {
        0 => "all good".to_owned(),
        EXIT_WRONG => "an index says something wrong: `vmstrata index drop` it, and report this".to_owned(),
        _ => "opening takes longer than it could: `vmstrata index build` makes what is missing".to_owned(),
    };
    show(&args.disk, &args.common, layers, VerifiedLayer::line, summary)?;
    Ok(ExitCode::from(code))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct DroppedLayer {
    filename: String,
    dropped: bool,
    bytes_freed: u64,
    sidecar_removed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl DroppedLayer {
    fn new(file: &IndexDropped) -> Self {
        let failure = file.in_file.as_ref().err().or(file.sidecar.as_ref().err());
        let freed = file.in_file.as_ref().ok().copied().flatten();
        let sidecar_removed = matches!(file.sidecar, Ok(true));
        Self {
            filename: path_to_text(&file.path),
            dropped: freed.is_some() || sidecar_removed,
            bytes_freed: freed.unwrap_or(0),
            sidecar_removed,
            reason: failure.map(ToString::to_string),
        }
    }

    fn line(&self) -> String {
        let Self { filename, .. } = self;
        match (&self.reason, self.dropped, self.sidecar_removed) {
            (Some(reason), ..) => format!("{filename}: {reason}"),
            (None, false, _) => format!("{filename}: had none"),
            (None, true, true) => format!("{filename}: removed {filename}.vmsx"),
            (None, true, false) => format!("{filename}: dropped, {} bytes freed", self.bytes_freed),
        }
    }
}

fn run_drop(args: &IndexDropArgs) -> Result<ExitCode> {
    let dropped = audit::change(audit::of("index_drop", [&args.disk]), |_| {
        Ok(remove(&args.disk, &options(&args.common, true, "dropping"))?)
    })?;
    let layers: Vec<DroppedLayer> = dropped.iter().map(DroppedLayer::new).collect();
    let count = layers.iter().filter(|layer| layer.dropped).count() as u64;
    let failed = layers.iter().any(|layer| layer.reason.is_some());
    let summary = counted(count, "index").replace("indexs", "indices") + " dropped";
    show(&args.disk, &args.common, layers, DroppedLayer::line, summary)?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(verdict: &'static str) -> VerifiedLayer {
        VerifiedLayer { filename: "a".to_owned(), verdict, kind: None, bytes: None, pages: 0, reason: None }
    }

    #[test]
    fn the_worst_verdict_decides_the_exit_code() {
        let code = |verdicts: &[&'static str]| {
            VerifiedLayer::exit_code(&verdicts.iter().map(|verdict| layer(verdict)).collect::<Vec<_>>())
        };
        assert_eq!(code(&["good", "not-needed"]), 0);
        assert_eq!(code(&["good", "stale"]), 3);
        assert_eq!(code(&["damaged", "wrong", "good"]), 2);
        assert_eq!(code(&[]), 0);
    }

    #[test]
    fn a_line_names_pages_and_reason() {
        let damaged =
            VerifiedLayer { pages: 2, reason: Some("leaf: no match".to_owned()), ..layer("damaged") };
        assert_eq!(damaged.line(), "a: damaged (2 pages): leaf: no match");
        let good = VerifiedLayer { kind: Some("delta"), bytes: Some(20_480), ..layer("good") };
        assert_eq!(good.line(), "a: good, delta, 20480 bytes");
    }
}
