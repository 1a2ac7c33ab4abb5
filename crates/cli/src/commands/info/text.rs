//! The report of `info` for people.

use std::fmt::{Result, Write};

use super::report::{BitmapInfo, Chain, Layer, Report};
use crate::output::{counted, visible};
use crate::units::{exact_size, short_size};

/// A chain of up to this many layers is listed even when that was not asked for.
const SHORT_CHAIN: usize = 2;

/// The whole text, with a newline at its end.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    write_layer(&mut text, &report.active)
        .and_then(|()| write_chain(&mut text, report))
        .expect("writing to a string");
    text
}

fn write_layer(out: &mut String, layer: &Layer) -> Result {
    writeln!(out, "image:          {}", visible(&layer.filename))?;
    writeln!(out, "format:         {}", layer.format)?;
    writeln!(out, "virtual size:   {}", exact_size(layer.virtual_size))?;
    writeln!(out, "size on host:   {}", exact_size(layer.actual_size))?;
    if let Some(cluster_size) = layer.cluster_size {
        writeln!(out, "cluster size:   {}", short_size(cluster_size))?;
    }
    if let Some(specific) = &layer.format_specific {
        let data = &specific.data;
        writeln!(
            out,
            "version:        {} (compat {})",
            if data.compat == "1.1" { 3 } else { 2 },
            data.compat
        )?;
        writeln!(out, "refcounts:      {} bits{}", data.refcount_bits, lazy(data.lazy_refcounts))?;
        writeln!(out, "compression:    {}", data.compression_type)?;
        if data.corrupt == Some(true) {
            writeln!(out, "state:          marked corrupt: repair it before writing to it")?;
        }
    }
    let bitmaps = layer.format_specific.iter().flat_map(|specific| &specific.data.bitmaps);
    for BitmapInfo { flags, name, granularity } in bitmaps {
        let flags = if flags.is_empty() { String::new() } else { format!(" ({})", flags.join(", ")) };
        writeln!(out, "bitmap:         {} of {}{flags}", visible(name), short_size(*granularity))?;
    }
    if layer.dirty_flag {
        writeln!(out, "state:          dirty: refcounts will be rebuilt when it is opened for writing")?;
    }
    if let Some(backing) = &layer.backing_filename {
        let format = layer.backing_filename_format.as_deref().unwrap_or("format not stored");
        writeln!(out, "backing file:   {} ({})", visible(backing), visible(format))?;
    }
    for snapshot in &layer.snapshots {
        let size = exact_size(snapshot.disk_size);
        let (id, name) = (visible(&snapshot.id), visible(&snapshot.name));
        writeln!(out, "snapshot:       {id} {name} of a disk of {size}")?;
    }
    Ok(())
}

fn lazy(lazy: Option<bool>) -> &'static str {
    if lazy == Some(true) { ", lazy" } else { "" }
}

fn write_chain(out: &mut String, report: &Report) -> Result {
    let Chain { layers, actual_size, cluster_sizes } = &report.chain;
    if *layers == 1 {
        return Ok(());
    }
    let sizes: Vec<String> = cluster_sizes.iter().map(|size| short_size(*size)).collect();
    writeln!(
        out,
        "chain:          {}, {} on the host, clusters of {}",
        counted(*layers as u64, "layer"),
        short_size(*actual_size),
        sizes.join(" and ")
    )?;
    match (&report.layers, &report.base) {
        (Some(all), _) => all.iter().try_for_each(|layer| write_line(out, layer)),
        (None, Some(base)) => {
            write_line(out, &report.active)?;
            if *layers > SHORT_CHAIN {
                writeln!(out, "  ... {} more (--chain lists them)", layers - SHORT_CHAIN)?;
            }
            write_line(out, base)
        }
        (None, None) => Ok(()),
    }
}

/// One layer of the list: number, format, sizes, file.
fn write_line(out: &mut String, layer: &Layer) -> Result {
    writeln!(
        out,
        "  {:>5}  {:<5} {:>10} {:>10}  {}",
        layer.layer.unwrap_or_default(),
        layer.format,
        short_size(layer.virtual_size),
        short_size(layer.actual_size),
        visible(&layer.filename)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(number: usize) -> Layer {
        Layer {
            layer: Some(number),
            filename: format!("{number}.raw"),
            format: "raw",
            virtual_size: 1 << 30,
            actual_size: 4096,
            cluster_size: None,
            dirty_flag: false,
            backing_filename: None,
            full_backing_filename: None,
            backing_filename_format: None,
            snapshots: Vec::new(),
            format_specific: None,
        }
    }

    fn report(layers: usize) -> Report {
        Report {
            active: layer(layers - 1),
            chain: Chain { layers, actual_size: 4096 * layers as u64, cluster_sizes: vec![512, 65536] },
            layers: None,
            base: (layers > 1).then(|| layer(0)),
        }
    }

    #[test]
    fn a_single_file_has_no_chain() {
        let text = render(&report(1));
        assert!(text.contains("virtual size:   1 GiB (1073741824 bytes)"), "{text}");
        assert!(!text.contains("chain"), "{text}");
    }

    #[test]
    fn a_long_chain_shows_its_ends_and_how_many_are_between() {
        let text = render(&report(1000));
        assert!(
            text.contains("chain:          1000 layers, 3.9 MiB on the host, clusters of 512 B and 64 KiB"),
            "{text}"
        );
        assert!(text.contains("    999  raw        1 GiB      4 KiB  999.raw\n  ... 998 more"), "{text}");
        assert!(text.ends_with("  0.raw\n"), "{text}");
        assert_eq!(text.lines().count(), 8, "{text}");
    }

    #[test]
    fn a_pair_of_layers_hides_nothing() {
        assert!(!render(&report(2)).contains("more"));
    }

    #[test]
    fn a_dirty_or_corrupt_image_says_so() {
        let mut report = report(1);
        report.active.dirty_flag = true;
        assert!(render(&report).contains("dirty: refcounts will be rebuilt"));
    }
}
