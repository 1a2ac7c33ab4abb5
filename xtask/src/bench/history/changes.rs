//! `vmstrata diff` of neighbouring snapshots: the whole command, from the start of its process to its end.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::super::report::{Report, Row};
use super::super::server::vmstrata;
use super::CLUSTER;
use super::disk::{CHANGED, History};
use super::take::timed;

/// Layers compared of each kind.
const LAYERS: usize = 5;

/// Compares snapshots between which few, some and many clusters were written.
///
/// # Errors
/// When the command fails, or finds anything but what was written.
pub(super) fn measure(history: &History, rounds: u32, report: &mut Report) -> Result<()> {
    for count in CHANGED {
        let pairs = history.layers.windows(2);
        let pairs =
            pairs.filter(|pair| pair[1].changed.as_ref().is_some_and(|changed| changed.len() == count));
        let mut times = Vec::new();
        for pair in pairs.take(LAYERS) {
            for _ in 0..rounds {
                let mut diff = Command::new(vmstrata());
                diff.args(["diff", "--json"]).arg(&pair[0].path).arg(&pair[1].path);
                let (out, time) = timed(&mut diff)?;
                times.push(time.as_secs_f64() * 1000.0);
                let written = pair[1].changed.iter().flatten().copied().collect();
                ensure!(clusters(&out)? == written, "{}: wrong differences", pair[1].path.display());
            }
        }
        let name = format!("`vmstrata diff` of neighbours, {count} clusters changed");
        let row = Row::median(&name, "ms", &times);
        report.add(if count == CHANGED[0] { row.at_most(10.0) } else { row });
    }
    Ok(())
}

/// The clusters that the command says have changed.
fn clusters(out: &[u8]) -> Result<BTreeSet<u64>> {
    let report: serde_json::Value = serde_json::from_slice(out)?;
    let mut found = BTreeSet::new();
    for extent in report["extents"].as_array().context("no extents")? {
        let of = |name: &str| extent[name].as_u64().with_context(|| format!("an extent without {name}"));
        let (start, length) = (of("start")?, of("length")?);
        found.extend(start / CLUSTER..(start + length).div_ceil(CLUSTER));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_become_clusters() {
        let out = br#"{"extents":[{"start":65536,"length":131072,"zero":false,"data":true}]}"#;
        assert_eq!(clusters(out).unwrap(), BTreeSet::from([1, 2]));
        assert!(clusters(b"{}").is_err());
    }
}
