//! `vmstrata merge` and `vmstrata flatten` on the command line.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use vmstrata_api::{JobSpec, MergeDirection};
use vmstrata_disk::merge::LayerRef;
use vmstrata_types::path_to_text;

use super::merge::{LoseArgs, MergeHowArgs, RemoveArgs};
use super::snapshot::AccessArgs;

impl MergeHowArgs {
    /// The job that drops a range of layers from a served disk.
    ///
    /// # Errors
    /// A file that has no absolute path.
    pub fn merge(
        self,
        disk: &str,
        layers: &LayersArgs,
        drop_snapshots: bool,
        remove: RemoveArgs,
        direction: MergeDirection,
    ) -> Result<JobSpec> {
        let [first, last] = layers.ends();
        Ok(JobSpec::Merge {
            disk: disk.to_owned(),
            first: asked(&first)?,
            last: asked(&last)?,
            drop_snapshots,
            remove: remove.which(),
            direction,
            forget_missing: self.forget_missing,
            bytes_per_second: self.limit,
        })
    }

    /// The job that flattens a served disk.
    ///
    /// # Errors
    /// A file that has no absolute path.
    pub fn flatten(
        self,
        disk: &str,
        onto: Option<&Path>,
        drop_snapshots: bool,
        remove: RemoveArgs,
    ) -> Result<JobSpec> {
        let onto = onto.map(|base| asked(&LayerRef::File(base.to_owned()))).transpose()?;
        Ok(JobSpec::Flatten {
            disk: disk.to_owned(),
            onto,
            drop_snapshots,
            remove: remove.which(),
            forget_missing: self.forget_missing,
            bytes_per_second: self.limit,
        })
    }
}

/// A layer as a server is asked for it, which has another directory.
fn asked(layer: &LayerRef) -> Result<vmstrata_api::LayerRef> {
    Ok(match layer {
        LayerRef::Number(number) => vmstrata_api::LayerRef::Number(u32::try_from(*number)?),
        LayerRef::File(path) => vmstrata_api::LayerRef::File(path_to_text(&std::path::absolute(path)?)),
    })
}

/// Which layers go.
#[derive(Clone, Debug, Args)]
pub struct LayersArgs {
    /// The layers to drop, by their numbers as `vmstrata info --chain` shows them: A..B is both and all between them
    #[arg(long, value_name = "A..B", value_parser = numbers, required_unless_present = "from", conflicts_with = "from")]
    pub layers: Option<(u16, u16)>,
    /// The same by their files: this one, the other, and all between them, in either order
    #[arg(long, value_name = "FILE", requires = "to")]
    pub from: Option<PathBuf>,
    /// See --from; the same file for that one alone
    #[arg(long, value_name = "FILE", requires = "from")]
    pub to: Option<PathBuf>,
}

impl LayersArgs {
    /// The two ends, which go, too.
    ///
    /// # Panics
    /// Without any, which the command line does not let pass.
    pub fn ends(&self) -> [LayerRef; 2] {
        match (self.layers, &self.from, &self.to) {
            (Some((one, other)), ..) => [one, other].map(|number| LayerRef::Number(number.into())),
            (None, Some(from), Some(to)) => [from, to].map(|file| LayerRef::File(file.clone())),
            _ => unreachable!("layers are chosen one way or the other"),
        }
    }

    /// What was chosen, in words.
    pub fn in_words(&self) -> String {
        match self.ends() {
            [LayerRef::Number(one), LayerRef::Number(other)] if one == other => format!("layer {one}"),
            [LayerRef::Number(one), LayerRef::Number(other)] => {
                format!("layers {} to {}", one.min(other), one.max(other))
            }
            [LayerRef::File(from), LayerRef::File(to)] if from == to => from.display().to_string(),
            [LayerRef::File(from), LayerRef::File(to)] => format!("{} to {}", from.display(), to.display()),
            _ => unreachable!("both ends are chosen the same way"),
        }
    }
}

fn numbers(text: &str) -> Result<(u16, u16)> {
    let (one, other) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| {
        text.parse()
            .with_context(|| format!("'{text}' is not a layer's number; 1..498 is the layers 1 to 498"))
    };
    Ok((number(one)?, number(other)?))
}

/// `vmstrata merge`
#[derive(Debug, Args)]
#[command(after_help = MERGE_HELP)]
pub struct MergeArgs {
    /// The disk: served by a running server, or not in use
    pub disk: PathBuf,
    /// Which layers go.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Whether snapshots may be lost.
    #[command(flatten)]
    pub lose: LoseArgs,
    /// What becomes of their files.
    #[command(flatten)]
    pub remove: RemoveArgs,
    /// Which way what stays and what goes are brought together; down takes files that are removed
    #[arg(long, value_name = "WAY", value_enum, default_value_t)]
    pub direction: MergeDirection,
    /// How.
    #[command(flatten)]
    pub how: MergeHowArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const MERGE_HELP: &str = "\
Examples:
  vmstrata merge web.qcow2 --layers 1..498 --dry-run         says what would go, and changes nothing
  vmstrata merge web.qcow2 --layers 1..498                   of 500: the base (0) and the disk (499) stay
  vmstrata merge web.qcow2 --layers 1..498 --remove all      also files that are no snapshots of this disk
  vmstrata merge web.qcow2 --from web-mon.qcow2 --to web-fri.qcow2

For chains whose layers have no names, as other tools make them; `snapshot delete` drops named ones. The layers from the first to the \
last one given are dropped. Their data is copied into the layer above them. If all their files are removed, no other disk needs them, \
and it copies less, the layer above is copied into the lowest of them, which then takes its place. (In block-commit of QEMU and virsh, \
BASE is the layer that stays: the lowest dropped one is the layer above it.) Named snapshots of this disk among them are lost, which \
takes --yes; held ones and those of another disk are refused. All other layers read as before. \
The layers are chosen when the command begins: snapshots taken meanwhile do not change the choice. Numbers change whenever layers are \
dropped, as by a keep= rule: where that may happen, name files.
A file that another disk needs stays, as far as vmstrata knows: see `vmstrata flatten --help`. A served disk goes on being \
used meanwhile; `vmstrata job` shows how far it is, slows, pauses and ends it. Interrupted, begin it again.
Exit codes: 0 dropped, 1 not (the disk reads as it did), 64 wrong usage.";

/// `vmstrata flatten`
#[derive(Debug, Args)]
#[command(after_help = FLATTEN_HELP)]
pub struct FlattenArgs {
    /// The disk: served by a running server, or not in use
    pub disk: PathBuf,
    /// Drop only what is between FILE, one of the layers, and the disk, which then stands on FILE alone and what that stands on
    #[arg(long, value_name = "FILE")]
    pub onto: Option<PathBuf>,
    /// Whether snapshots may be lost.
    #[command(flatten)]
    pub lose: LoseArgs,
    /// What becomes of the files that it stood on.
    #[command(flatten)]
    pub remove: RemoveArgs,
    /// How.
    #[command(flatten)]
    pub how: MergeHowArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

impl FlattenArgs {
    /// What the disk is in the end, in words.
    pub fn done(&self) -> String {
        self.onto.as_ref().map_or_else(|| "flat".to_owned(), |base| format!("flat onto {}", base.display()))
    }
}

const FLATTEN_HELP: &str = "\
Examples:
  vmstrata flatten clone.qcow2                     a disk of its own; what it was cloned from stays
  vmstrata flatten web.qcow2 --dry-run             says which snapshots and files would go, and changes nothing
  vmstrata flatten web.qcow2 --yes                 without history; its snapshots go, with their files
  vmstrata flatten web.qcow2 --yes --keep-files    the files stay, as `vmstrata snapshot list --all` shows
  vmstrata flatten web.qcow2 --onto golden.qcow2   a disk on golden.qcow2, with nothing between them

Copies what the disk needs of the layers below into its own file, which then has no backing file, or the one that --onto names. A \
served disk stays in use meanwhile; `vmstrata job` shows how far it is, slows, pauses and ends it. Interrupted, begin it again: what was \
copied is not copied twice.
A file that another disk needs stays. vmstrata finds disks beside it and in the --allow-backing directories, and those elsewhere \
that it made or opened for writing. A base elsewhere may have others, so that it goes only with --remove everywhere.
Exit codes: 0 flat, 1 not (the disk reads as it did), 64 wrong usage.";
