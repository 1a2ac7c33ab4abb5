//! `vmstrata create`: a new qcow2 image, alone or on top of another.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use vmstrata_disk::{CreateOptions, Format, create, probe_backing, probe_layer};
use vmstrata_qcow2::{CompressionType, RefcountOrder};
use vmstrata_types::ClusterBits;

use super::info::Layer;
use crate::args::{Compression, CreateArgs};
use crate::audit;
use crate::output::answer;
use crate::units::short_size;

/// Makes the image and says what was made.
///
/// # Errors
/// When the image cannot be made as asked; the file is then as it was.
pub fn run(args: &CreateArgs) -> Result<ExitCode> {
    ensure!(
        args.force || args.file.symlink_metadata().is_err(),
        "{}: exists already; --force replaces it",
        args.file.display()
    );
    let options = options(args)?;
    let what = audit::of("disk_create", [&args.file]);
    let made = audit::change(what, |what| {
        create(&args.file, &options)?;
        let made = probe_layer(&args.file, Some(Format::Qcow2))?;
        what.bytes = Some(made.virtual_size);
        Ok(made)
    })?;
    answer(args.json, &Layer::of_alone(&made), || {
        let on = |(name, format): &(PathBuf, Format)| format!(", on {} ({format})", name.display());
        let below = options.backing.as_ref().map_or_else(String::new, on);
        format!("{}: made, {}{below}\n", args.file.display(), short_size(made.virtual_size))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn options(args: &CreateArgs) -> Result<CreateOptions> {
    let backing = match &args.backing {
        None => None,
        Some(name) => {
            let format = args.backing_format.map_or_else(|| probe_backing(&args.file, name), Ok)?;
            Some((name.clone(), format))
        }
    };
    Ok(CreateOptions {
        // As qemu-img does: a disk ends with a whole sector.
        size: args.size.map(|size| size.next_multiple_of(512)),
        cluster_bits: ClusterBits::from_size(args.cluster_size).with_context(|| {
            format!(
                "--cluster-size {}: a cluster is a power of two from 512 bytes to 2 MiB",
                args.cluster_size
            )
        })?,
        subclusters: args.subclusters,
        refcount_order: RefcountOrder::from_width_bits(args.refcount_bits).with_context(|| {
            format!("--refcount-bits {}: a refcount has 1, 2, 4, 8, 16, 32 or 64 bits", args.refcount_bits)
        })?,
        version: args.version,
        lazy_refcounts: args.lazy_refcounts,
        compression: match args.compression {
            Compression::Zlib => CompressionType::Zlib,
            Compression::Zstd => CompressionType::Zstd,
        },
        backing,
        force: args.force,
    })
}
