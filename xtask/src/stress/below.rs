//! The disk of a round, and the layers below it, made by stock tools.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rand::Rng as _;
use rand::rngs::SmallRng;

use super::config::{Below, Config, SUBCLUSTERS_SINCE};
use super::stamp::{self, SECTOR, Value};

/// Runs of sectors that a layer writes.
const RUNS: usize = 24;

/// Makes the disk of `config` in `dir`, with `program` for the disk itself; returns its path and what its sectors hold.
///
/// # Errors
/// When a tool fails.
pub(super) fn make(
    config: &Config,
    program: &Path,
    dir: &Path,
    random: &mut SmallRng,
) -> Result<(PathBuf, Vec<Value>)> {
    let disk = dir.join("disk.qcow2");
    let mut values = vec![Value::ZEROS; config.below_sectors as usize];
    let below = match config.below {
        Below::Nothing => None,
        Below::Raw => Some((raw(&dir.join("base.raw"), &mut values, random)?, "raw")),
        Below::Compressed => {
            let size = clusters(random);
            Some((converted(dir, &mut values, &["-c", "-o", &size], random)?, "qcow2"))
        }
        Below::Version2 => {
            let options = format!("cluster_size={},compat=0.10", 1u64 << random.random_range(9..=18));
            Some((converted(dir, &mut values, &["-o", &options], random)?, "qcow2"))
        }
        Below::Mixed => {
            let size = clusters(random);
            let base = converted(dir, &mut values, &["-o", &size], random)?;
            Some((overlay(&base, dir, &mut values, random)?, "qcow2"))
        }
    };
    if below.is_none() {
        values.clear();
    }
    values.resize(config.sectors as usize, Value::ZEROS);
    let mut create = Command::new(program);
    create.arg("create").arg(&disk).arg((config.sectors * SECTOR as u64).to_string());
    create.arg("--cluster-size").arg((1u64 << config.cluster_bits).to_string());
    create.args(["--format-version", if config.version2 { "2" } else { "3" }]);
    create.args(config.subclusters.then_some("--subclusters"));
    if let Some((file, format)) = &below {
        create.arg("--backing").arg(file).args(["--backing-format", format]);
    }
    run(&mut create)?;
    Ok((disk, values))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{:?} does not run", command.get_program()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The clusters of a layer that is not the disk itself, with subclusters now and then.
fn clusters(random: &mut SmallRng) -> String {
    let bits = random.random_range(9..=18);
    let extended = if bits >= SUBCLUSTERS_SINCE && random.random() { "on" } else { "off" };
    format!("cluster_size={},extended_l2={extended}", 1u64 << bits)
}

/// Runs of sectors, and the value that a layer writes there.
fn write_runs(
    file: &File,
    values: &mut [Value],
    value: Value,
    random: &mut SmallRng,
) -> Result<Vec<(usize, usize)>> {
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let start = random.random_range(0..values.len());
        let count = random.random_range(1..=values.len() / RUNS).min(values.len() - start);
        let mut bytes = vec![0; count * SECTOR];
        stamp::fill(&mut bytes, start as u64, value);
        file.write_all_at(&bytes, (start * SECTOR) as u64)?;
        values[start..start + count].fill(value);
        runs.push((start, count));
    }
    Ok(runs)
}

fn raw(path: &Path, values: &mut [Value], random: &mut SmallRng) -> Result<PathBuf> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len((values.len() * SECTOR) as u64)?;
    write_runs(&file, values, Value(1), random)?;
    Ok(path.to_owned())
}

/// A qcow2 image with the stamps of the lowest layer.
fn converted(dir: &Path, values: &mut [Value], options: &[&str], random: &mut SmallRng) -> Result<PathBuf> {
    let (source, base) = (raw(&dir.join("source.raw"), values, random)?, dir.join("base.qcow2"));
    let mut convert = Command::new("qemu-img");
    run(convert.args(["convert", "-f", "raw", "-O", "qcow2"]).args(options).arg(&source).arg(&base))?;
    fs::remove_file(source)?;
    Ok(base)
}

/// A layer on `base` that writes runs of its own.
fn overlay(base: &Path, dir: &Path, values: &mut [Value], random: &mut SmallRng) -> Result<PathBuf> {
    let (middle, source) = (dir.join("middle.qcow2"), dir.join("source.raw"));
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(base);
    run(create.args(["-o", &clusters(random)]).arg(&middle))?;
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&source)?;
    for (start, count) in write_runs(&file, values, Value(2), random)? {
        // The tool repeats a file from its start, so each run has one of its own.
        let run_file = dir.join("run.raw");
        let mut bytes = vec![0; count * SECTOR];
        stamp::fill(&mut bytes, start as u64, Value(2));
        fs::write(&run_file, bytes)?;
        let write = format!("write -q -s {} {} {}", run_file.display(), start * SECTOR, count * SECTOR);
        run(Command::new("qemu-io").args(["-f", "qcow2", "-c", &write]).arg(&middle))?;
        fs::remove_file(run_file)?;
    }
    fs::remove_file(source)?;
    Ok(middle)
}
