//! How long the longest chain was, over time: as the layers that are there tell, and as earlier surveys found it.
//!
//! A survey sees one moment. When each layer was made says how the chains of now have grown; what was merged since is not
//! counted. Surveys that are made again and again say what was there: each appends a line to a file that is theirs.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::graph::Graph;
use crate::report::Report;
use crate::times;

/// Longer files are not ours: a survey every hour for a century is less.
const BYTES_MAX: u64 = 256 << 20;

/// The longest chain over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Growth {
    /// By the layers that are there now: each time at which the longest chain got longer.
    pub by_layers: Vec<Longest>,
    /// As surveys of the same directories found it, this one last; without a history this one alone.
    pub surveys: Vec<Surveyed>,
}

/// The longest chain from a moment on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Longest {
    /// Seconds since 1970.
    pub at: u64,
    /// Its layers.
    pub layers: u32,
}

/// What a survey found, in a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Surveyed {
    /// When it was made, in seconds since 1970.
    pub made_at: u64,
    /// What was looked at.
    pub roots: Vec<String>,
    /// Chains, one a disk.
    pub chains: u64,
    /// Layer files.
    pub layers: u64,
    /// Layers of the longest chain.
    pub longest_chain: u32,
    /// Bytes that all layer files take on the host.
    pub allocated_bytes: u64,
    /// Chains that cannot be opened.
    pub chains_broken: u64,
}

/// Why there is no history.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The file cannot be read or written.
    #[error("the history {} cannot be {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the host said.
        source: io::Error,
    },
    /// A line that no survey wrote.
    #[error("{}, line {line}: no survey wrote this ({source}); name another file, or one that is not there", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
}

/// When the longest chain got longer, as far as the layers can be dated.
pub(crate) fn by_layers(graph: &Graph<'_>) -> Vec<Longest> {
    let made = |at: usize| times::made(&graph.images[at], graph.below[at].map(|below| &graph.images[below]));
    let dated = (0..graph.images.len()).filter_map(|at| Some((made(at)?.0, graph.stacks[at].layers)));
    let mut dated: Vec<(u64, u32)> = dated
        .filter_map(|(ns, layers)| {
            Some((u64::try_from(ns).ok().filter(|ns| *ns > 0)? / 1_000_000_000, layers))
        })
        .collect();
    dated.sort_unstable();
    let mut longest: Vec<Longest> = Vec::new();
    for (at, layers) in dated {
        match longest.last_mut() {
            Some(last) if last.layers >= layers => {}
            Some(last) if last.at == at => last.layers = layers,
            _ => longest.push(Longest { at, layers }),
        }
    }
    longest
}

impl Surveyed {
    /// What `report` says.
    pub(crate) fn of(report: &Report) -> Self {
        let totals = &report.summary;
        Self {
            made_at: report.made_at,
            roots: report.roots.clone(),
            chains: totals.chains,
            layers: totals.layers,
            longest_chain: totals.chain_length.max as u32,
            allocated_bytes: totals.allocated_bytes,
            chains_broken: totals.chains_broken,
        }
    }
}

impl Report {
    /// Puts what earlier surveys of the same directories found, by the file at `path`, before what this one did, and
    /// appends this one to the file.
    ///
    /// # Errors
    /// [`HistoryError`]; the file is unchanged.
    pub fn continue_history(&mut self, path: &Path) -> Result<(), HistoryError> {
        let failed = |action| move |source| HistoryError::Io { path: path.to_owned(), action, source };
        let mut file =
            File::options().read(true).append(true).create(true).open(path).map_err(failed("opened"))?;
        let mut text = String::new();
        (&mut file).take(BYTES_MAX).read_to_string(&mut text).map_err(failed("read"))?;
        let mut earlier = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            let read: Surveyed = serde_json::from_str(line).map_err(|source| HistoryError::Line {
                path: path.to_owned(),
                line: number + 1,
                source,
            })?;
            earlier.push(read);
        }
        let now = Surveyed::of(self);
        let mut line = serde_json::to_vec(&now).expect("text and numbers");
        line.push(b'\n');
        if !text.is_empty() && !text.ends_with('\n') {
            // A survey that was killed.
            line.insert(0, b'\n');
        }
        file.write_all(&line).map_err(failed("written"))?;
        earlier.retain(|survey| survey.roots == now.roots);
        earlier.push(now);
        self.growth.surveys = earlier;
        Ok(())
    }
}
