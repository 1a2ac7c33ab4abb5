//! `vmstrata diff`: what changed between two states of a disk.
//!
//! Extents are printed as they are found: a disk of millions of them needs no memory for them.

use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use vmstrata_backup::{Diff, DiffExtent, DiffKind, DiffOptions};
use vmstrata_disk::{Error, ResourceOptions, Resources};
use vmstrata_types::path_to_text;

use super::states::{explain, resolve};
use crate::args::DiffArgs;
use crate::output::{counted, visible_lines};
use crate::units::short_size;

/// Exit codes of diff(1), with `--exit-code`.
const EXIT_DIFFERENT: u8 = 1;
const EXIT_TROUBLE: u8 = 2;

/// One extent, with the fields of `qemu-img map --output=json` where they mean the same.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Extent {
    start: u64,
    length: u64,
    zero: bool,
    data: bool,
}

impl From<DiffExtent> for Extent {
    fn from(extent: DiffExtent) -> Self {
        let data = extent.kind == DiffKind::Data;
        Self { start: extent.range.start.get(), length: extent.range.len, zero: !data, data }
    }
}

/// What all extents together are.
#[derive(Debug, Default, PartialEq, Eq)]
struct Total {
    extents: u64,
    data: u64,
    zero: u64,
}

impl Total {
    fn add(&mut self, extent: &Extent) {
        self.extents += 1;
        *(if extent.data { &mut self.data } else { &mut self.zero }) += extent.length;
    }
}

/// Prints the differences.
///
/// # Errors
/// When the states cannot be compared, unless the exit code is to say that.
pub fn run(args: &DiffArgs) -> Result<ExitCode> {
    match compare(args) {
        Ok(total) if args.exit_code && total.extents > 0 => Ok(ExitCode::from(EXIT_DIFFERENT)),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(error) if args.exit_code => {
            eprintln!("vmstrata: error: {}", visible_lines(&format!("{error:#}")));
            Ok(ExitCode::from(EXIT_TROUBLE))
        }
        Err(error) => Err(error),
    }
}

fn compare(args: &DiffArgs) -> Result<Total> {
    let resources = Resources::start(ResourceOptions::default())?;
    let old = resolve(&args.old, args.old_format, &args.backing)?;
    let new = resolve(&args.new, args.format, &args.backing)?;
    let options = DiffOptions {
        allow_backing: args.backing.allow_backing.clone(),
        allocation: args.allocation,
        format: new.format,
        old_format: old.format,
    };
    let diff = Diff::open(&old.path, &new.path, &options, &resources).map_err(|error| explain(&error))?;
    let mut out = BufWriter::new(io::stdout().lock());
    let total = if args.bytes {
        print(args, &diff, diff.changed_bytes().map_err(|error| explain(&error))?, &mut out)
    } else {
        print(args, &diff, diff.extents(), &mut out)
    }?;
    out.flush()?;
    Ok(total)
}

fn print(
    args: &DiffArgs,
    diff: &Diff,
    extents: impl Iterator<Item = Result<DiffExtent, Error>>,
    out: &mut impl Write,
) -> Result<Total> {
    let mut extents = extents.map(|extent| extent.map(Extent::from).map_err(|error| explain(&error)));
    if args.json { print_json(args, diff, &mut extents, out) } else { print_table(diff, &mut extents, out) }
}

fn print_table(
    diff: &Diff,
    extents: &mut dyn Iterator<Item = Result<Extent>>,
    out: &mut impl Write,
) -> Result<Total> {
    let mut total = Total::default();
    for extent in extents {
        let extent = extent?;
        if total.extents == 0 {
            writeln!(out, "{:<16} {:<14} {:<12} Kind", "Offset", "Length", "Size")?;
        }
        total.add(&extent);
        let kind = if extent.data { "data" } else { "zero" };
        let size = short_size(extent.length);
        writeln!(out, "{:<#16x} {:<#14x} {size:<12} {kind}", extent.start, extent.length)?;
    }
    let Total { extents, data, zero } = total;
    let (data, zero) = (short_size(data), short_size(zero));
    write!(out, "{}: {data} of data, {zero} of zeros", counted(extents, "extent"))?;
    if diff.old_size() != diff.new_size() {
        write!(out, "; resized from {} to {}", short_size(diff.old_size()), short_size(diff.new_size()))?;
    }
    writeln!(out)?;
    Ok(total)
}

fn print_json(
    args: &DiffArgs,
    diff: &Diff,
    extents: &mut dyn Iterator<Item = Result<Extent>>,
    out: &mut impl Write,
) -> Result<Total> {
    let name = |path: &std::path::Path| serde_json::to_string(&path_to_text(path));
    write!(out, "{{\"old\":{},\"new\":{},", name(&args.old)?, name(&args.new)?)?;
    write!(out, "\"old-size\":{},\"new-size\":{},\"extents\":[", diff.old_size(), diff.new_size())?;
    let mut total = Total::default();
    for extent in extents {
        let extent = extent?;
        out.write_all(if total.extents == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *out, &extent)?;
        total.add(&extent);
    }
    writeln!(out, "],\"data-bytes\":{},\"zero-bytes\":{}}}", total.data, total.zero)?;
    Ok(total)
}
