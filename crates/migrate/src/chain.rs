//! Which layers of a disk are to be copied, and what they are called there.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use vmstrata_disk::{Disk, Format, directory_of, is_published, probe_layer};
use vmstrata_qcow2::Incompatible;

use crate::copy::allocated;
use crate::error::{Error, Result};

/// A layer that is to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedLayer {
    /// Its file.
    pub from: PathBuf,
    /// How it keeps its bytes.
    pub format: Format,
    /// The layer below it, and its format.
    pub below: Option<(PathBuf, Format)>,
    /// Bytes that it takes of its storage.
    pub bytes: u64,
}

/// What a disk has that the target has not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The frozen layers that do not lie in the target's directory, from the lowest up.
    pub layers: Vec<PlannedLayer>,
    /// Bytes of the layer that takes the writes; 0 if that lies there.
    pub active_bytes: u64,
    /// The lowest layer at the target whose backing file is elsewhere, and that file. The move gives it the copy as backing file.
    pub(crate) stands_elsewhere: Option<(PathBuf, PathBuf)>,
}

impl Plan {
    /// What is to be copied of `disk` to the directory `to`, an absolute path without links.
    ///
    /// # Errors
    /// A chain that cannot be copied file by file.
    pub fn of(disk: &Disk, to: &Path) -> Result<Self> {
        Ok(Self::with_generation(disk, to)?.1)
    }

    /// The same, with the generation of the disk's layers.
    pub(crate) fn with_generation(disk: &Disk, to: &Path) -> Result<(u64, Self)> {
        loop {
            let (generation, layers) = disk.whole_layers();
            let files = layers.into_iter().map(|layer| (layer.path, layer.format));
            match Self::of_files(files, to) {
                // A merge has removed the file of a layer.
                Err(error) if error.is_missing_file() && disk.generation() != generation => {}
                plan => return Ok((generation, plan?)),
            }
        }
    }

    /// The same of the files of a chain, and their formats, from the lowest up.
    ///
    /// # Errors
    /// As [`Plan::of`].
    pub fn of_files(files: impl IntoIterator<Item = (PathBuf, Format)>, to: &Path) -> Result<Self> {
        let is_there = |file: &Path| directory_of(file).canonicalize().is_ok_and(|directory| directory == to);
        let mut files: Vec<(PathBuf, Format)> = files.into_iter().collect();
        let Some((active, format)) = files.pop() else { return Ok(Self::default()) };
        let refused = |why: String| Error::Refused { disk: active.clone(), to: to.to_owned(), why };
        let mut plan = Self::default();
        let mut below: Option<(PathBuf, Format)> = None;
        for (file, format) in files {
            if is_there(&file) {
                plan.note_there(&file, below.as_ref().filter(|(below, _)| !is_there(below)));
                below = Some((file, format));
                continue;
            }
            why_not(&file, format)?.map_or(Ok(()), |why| Err(refused(why)))?;
            plan.layers.push(PlannedLayer {
                from: file.clone(),
                format,
                bytes: allocated(&file),
                below: below.replace((file, format)),
            });
        }
        if is_there(&active) {
            plan.note_there(&active, below.as_ref().filter(|(below, _)| !is_there(below)));
        } else {
            why_not(&active, format)?.map_or(Ok(()), |why| Err(refused(why)))?;
            plan.active_bytes = allocated(&active);
        }
        Ok(plan)
    }

    /// Notes a layer that lies at the target, and the layer below it if that does not.
    fn note_there(&mut self, file: &Path, below: Option<&(PathBuf, Format)>) {
        if let (None, Some((below, _))) = (&self.stands_elsewhere, below) {
            self.stands_elsewhere = Some((file.to_owned(), below.clone()));
        }
    }

    /// Bytes of the files that are to be copied.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes).sum::<u64>() + self.active_bytes
    }
}

/// Why a layer is more than its file.
fn why_not(file: &Path, format: Format) -> Result<Option<String>> {
    let name = file.display();
    if is_published(file) {
        return Ok(Some(format!(
            "{name} belongs to a tiered disk: `vmstrata tier detach` makes it an ordinary one"
        )));
    }
    if format == Format::Raw {
        return Ok(None);
    }
    let head = probe_layer(file, Some(Format::Qcow2))?;
    if head.backing_name.as_ref().is_some_and(|name| name.to_string_lossy().starts_with("json:")) {
        return Ok(Some(format!("{name} names its backing file by what QEMU calls a json: name")));
    }
    let has_data_file =
        head.header.is_some_and(|header| header.incompatible.contains(Incompatible::EXTERNAL_DATA));
    Ok(has_data_file.then(|| format!("the data of {name} lies in another file")))
}

/// Makes sure that there is room for what is left of the plan.
///
/// # Errors
/// [`Error::NoRoom`].
pub(crate) fn check_room(plan: &Plan, to: &Path, is_there: impl Fn(&PlannedLayer) -> bool) -> Result<()> {
    let left = plan.layers.iter().filter(|layer| !is_there(layer));
    let needed = left.map(|layer| layer.bytes).sum::<u64>() + plan.active_bytes;
    let found = rustix::fs::statvfs(to).map_err(Error::of_file(to, "look how much room there is"))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free < needed {
        return Err(Error::NoRoom { to: to.to_owned(), free, needed });
    }
    Ok(())
}

/// The names that the copy of a layer may have in a directory, the best first: `base.qcow2`, `base.2.qcow2`, and so on.
pub(crate) fn names_of(layer: &Path, to: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let (stem, end) =
        (layer.file_stem().unwrap_or_default().to_owned(), layer.extension().map(OsStr::to_owned));
    let to = to.to_owned();
    (1..).map(move |number| {
        let mut name = stem.clone();
        if number > 1 {
            name.push(format!(".{number}"));
        }
        if let Some(end) = &end {
            name.push(".");
            name.push(end);
        }
        to.join(name)
    })
}
