//! `vmstrata survey`: all images of a host, on the terminal, as JSON, or as a page.

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use vmstrata_survey::{Report, Severity, SurveyOptions, survey, text};

use crate::args::SurveyArgs;
use crate::output::{Progress, answer};

/// Exit codes: what is found in the worst of cases, as `check` has them.
const EXIT_BROKEN: u8 = 2;
const EXIT_SUSPECT: u8 = 3;

/// More threads than this gain nothing: the file system is busy by then.
const THREADS_USUAL_MAX: usize = 8;

/// Looks at everything and shows it.
///
/// # Errors
/// When a directory cannot be entered, the history not be read, or the page not be written.
pub fn run(args: &SurveyArgs) -> Result<ExitCode> {
    let mut report = survey(&options(args))?;
    // What was found is shown even where it cannot be put with what was found before.
    let history = args.history.as_ref().map(|file| report.continue_history(file)).transpose();
    if let Some(file) = &args.html {
        let page = vmstrata_survey::page::render(&report);
        fs::write(file, page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    answer(args.json, &report, || text::render(&report))?;
    history?;
    Ok(ExitCode::from(exit_code(&report)))
}

fn options(args: &SurveyArgs) -> SurveyOptions {
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    let line = Progress::endless(args.quiet);
    SurveyOptions {
        roots: args.roots.clone(),
        allow_backing: args.allow_backing.clone(),
        threads: args.threads.map_or(processors.clamp(2, THREADS_USUAL_MAX), usize::from),
        long_chain: args.long_chain as usize,
        deep: args.deep,
        progress: Some(Arc::new(move |now| {
            line.show(|| format!("looking: {} files, {} images", now.files, now.images));
        })),
    }
}

fn exit_code(report: &Report) -> u8 {
    match report.severity() {
        Some(Severity::Broken) => EXIT_BROKEN,
        Some(Severity::Suspect) => EXIT_SUSPECT,
        None if !report.is_complete() => EXIT_SUSPECT,
        None => 0,
    }
}
