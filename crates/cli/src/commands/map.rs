//! `vmstrata map`: which layer holds each part of a disk, as qemu-img's map does but with one lookup per cluster.
//!
//! The runs are printed as they are found: a disk of millions of runs needs no memory for them.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use serde::Serialize;
use vmstrata_disk::{Disk, Extent, ExtentKind, LayerInfo, OpenOptions, ResourceOptions, Resources, snapshot};
use vmstrata_types::path_to_text;
use vmstrata_types::{GuestOffset, GuestRange};

use crate::args::MapArgs;
use crate::output::visible;

/// Runs asked for at a time.
const BATCH: usize = 1024;

/// One run, with the fields of `qemu-img map --output=json` first.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Run {
    start: u64,
    length: u64,
    /// Layers between the active one and this run's.
    depth: usize,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    /// Layers between the base and this run's.
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<u16>,
    #[serde(rename = "filename", skip_serializing_if = "Option::is_none")]
    file: Option<String>,
}

impl Run {
    fn new(extent: &Extent, layers: &[LayerInfo]) -> Self {
        let depth = extent.layer.map_or(layers.len() - 1, |layer| layers.len() - 1 - layer.index());
        let file = extent.layer.map(|layer| path_to_text(&layers[layer.index()].path));
        Self {
            start: extent.range.start.get(),
            length: extent.range.len,
            depth,
            present: extent.kind != ExtentKind::Hole,
            zero: matches!(extent.kind, ExtentKind::Zero | ExtentKind::Hole),
            data: matches!(extent.kind, ExtentKind::Data | ExtentKind::Compressed),
            compressed: extent.kind == ExtentKind::Compressed,
            offset: extent.host.filter(|_| extent.kind == ExtentKind::Data).map(|host| host.get()),
            layer: extent.layer.map(|layer| layer.get()),
            file,
        }
    }

    fn kind(&self) -> &'static str {
        match (self.present, self.zero, self.compressed) {
            (false, ..) => "hole",
            (_, true, _) => "zero",
            (.., true) => "compressed",
            _ => "data",
        }
    }

    /// A line of the table; holes have none, as nothing is there to show.
    fn line(&self) -> Option<String> {
        let mut line = format!("{:<#16x} {:<#14x} {:<10}", self.start, self.length, self.kind());
        let (layer, file) = (self.layer?, self.file.as_ref()?);
        match self.offset {
            Some(offset) => write!(line, " {layer:>5}  {offset:<#16x} {file}"),
            None => write!(line, " {layer:>5}  {:<16} {file}", "-"),
        }
        .expect("writing to a string");
        Some(line)
    }
}

/// Prints the map.
///
/// # Errors
/// When the chain cannot be opened or read, or the range does not lie on the disk.
pub fn run(args: &MapArgs) -> Result<ExitCode> {
    let resources = Resources::start(ResourceOptions::default())?;
    let options = OpenOptions {
        read_only: true,
        allow_backing: args.backing.allow_backing.clone(),
        format: args.format,
        ..OpenOptions::default()
    };
    let state = snapshot::resolve(&args.file, &options)?;
    let disk = Disk::open(&state.path, &state.open_options(options), &resources)?;
    let size = disk.size();
    ensure!(
        args.start_offset <= size,
        "{}: --start-offset {:#x} is past the end of the disk at {size:#x}",
        args.file.display(),
        args.start_offset
    );
    let len = args.max_length.unwrap_or(u64::MAX).min(size - args.start_offset);
    let range = GuestRange::new(GuestOffset::new(args.start_offset), len);
    let mut out = BufWriter::new(io::stdout().lock());
    if args.json {
        write_json(&disk, range, &mut out)?
    } else {
        write_table(&disk, range, &mut out)?
    }
    out.flush()?;
    disk.close()?;
    Ok(ExitCode::SUCCESS)
}

fn write_json(disk: &Disk, range: GuestRange, out: &mut impl Write) -> Result<()> {
    let mut separator = "[";
    for_each_run(disk, range, |run| {
        out.write_all(separator.as_bytes())?;
        separator = ",\n";
        serde_json::to_writer(&mut *out, &run)?;
        Ok(())
    })?;
    // A disk of size 0 has no run, and is an empty list.
    out.write_all(if separator == "[" { b"[]\n" } else { b"]\n" })?;
    Ok(())
}

fn write_table(disk: &Disk, range: GuestRange, out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "{:<16} {:<14} {:<10} {:>5}  {:<16} File",
        "Offset", "Length", "Kind", "Layer", "Mapped to"
    )?;
    for_each_run(disk, range, |run| {
        if let Some(line) = run.line() {
            writeln!(out, "{}", visible(&line))?;
        }
        Ok(())
    })
}

fn for_each_run(disk: &Disk, range: GuestRange, mut visit: impl FnMut(Run) -> Result<()>) -> Result<()> {
    let layers = disk.layers();
    let mut rest = range;
    while rest.len > 0 {
        let extents = disk.extents_by_place(rest, BATCH)?;
        let last = extents.last().expect("a range that is not empty has a run");
        let next = last.range.end();
        for extent in &extents {
            visit(Run::new(extent, &layers))?;
        }
        rest = GuestRange::new(next, range.end() - next);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use vmstrata_disk::Format;
    use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

    use super::*;

    fn layers() -> Vec<LayerInfo> {
        let layer = |index| LayerInfo {
            index: LayerIndex::new(index),
            path: PathBuf::from(format!("{index}.qcow2")),
            format: Format::Qcow2,
            size: 1 << 20,
            cluster_bits: Some(ClusterBits::DEFAULT),
            file_len: 0,
        };
        (0..3).map(layer).collect()
    }

    fn run_of(kind: ExtentKind, layer: Option<u16>, host: Option<u64>) -> Run {
        let extent = Extent {
            range: GuestRange::new(GuestOffset::new(0x10000), 0x20000),
            kind,
            layer: layer.map(LayerIndex::new),
            host: host.map(HostOffset::new),
        };
        Run::new(&extent, &layers())
    }

    #[test]
    fn depth_counts_from_the_active_layer_and_layer_from_the_base() {
        let run = run_of(ExtentKind::Data, Some(0), Some(0x50000));
        assert_eq!((run.depth, run.layer, run.file.as_deref()), (2, Some(0), Some("0.qcow2")));
        assert_eq!(run_of(ExtentKind::Data, Some(2), None).depth, 0);
    }

    #[test]
    fn a_hole_is_as_deep_as_the_base_and_belongs_to_no_one() {
        let run = run_of(ExtentKind::Hole, None, None);
        assert!(!run.present && run.zero && !run.data);
        assert_eq!((run.depth, run.layer, run.line()), (2, None, None));
    }

    #[test]
    fn compressed_data_has_no_offset_that_could_be_read() {
        let run = run_of(ExtentKind::Compressed, Some(1), Some(0x50000));
        assert!(run.data && run.compressed);
        assert_eq!(run.offset, None);
        let line = run.line().unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["0x10000", "0x20000", "compressed", "1", "-", "1.qcow2"]
        );
    }
}
