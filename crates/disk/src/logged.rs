//! Finding the image that a flush log has writes of, before anyone opens the disk.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::header::field;
use vmstrata_store::{CacheMode, Gate, Place, Store};
use vmstrata_types::HostOffset;

use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::head::has_magic;
use crate::opener::{LocalFiles, Opener as _, Role};
use crate::session::{LOG_MASK, SESSION_MASK};

/// Opens the image with this inode for writing. A snapshot may have given it another name than `path`, beside it. Its header has one of
/// `marks`. A stock tool that writes the image clears them, and each opening draws another: so no program has written it since.
///
/// # Errors
/// [`ErrorKind::NotAsLogged`], or a file that cannot be opened or is in use.
pub fn open_logged(path: &Path, ino: u64, marks: &[u64]) -> Result<Arc<dyn Store>> {
    let differs = |what| Error::from(ErrorKind::NotAsLogged { what }).in_file(path);
    let name = name_of(path, ino)?.ok_or_else(|| differs("there is no such file any more"))?;
    let opened = LocalFiles.open(&name, Role::Active(CacheMode::Host), &Gate::unrestricted())?;
    if opened.identity.file.ino != ino {
        return Err(differs("another file has its name"));
    }
    if !has_magic(&*opened.store).map_err(|error| error.in_file(path))? {
        return Err(differs("it is no qcow2 image any more"));
    }
    // Not all of the header: it may lead to where the file will end only once it has what the log has.
    let mut bits = [0; 8];
    let at = HostOffset::new(field::AUTOCLEAR);
    let read = opened.store.read_padded(&mut bits, at).while_trying("read the header");
    read.map_err(|error| error.at(at).in_file(path))?;
    let mark = u64::from_be_bytes(bits) & (SESSION_MASK | LOG_MASK);
    if !marks.contains(&mark) {
        return Err(differs("another program has written it since"));
    }
    Ok(opened.store)
}

/// A name of a file, beside the one that it had.
fn name_of(path: &Path, ino: u64) -> Result<Option<PathBuf>> {
    let is_it = |place: &Place| place.look().is_ok_and(|found| found.is_file() && found.file().ino == ino);
    let look = || -> io::Result<Option<PathBuf>> {
        let place = Place::of(path)?;
        if is_it(&place) {
            return Ok(Some(place.path()));
        }
        let mut others = place.directory().entries()?.filter_map(|entry| Some(entry.ok()?.0));
        Ok(others.find(is_it).map(|other| other.path()))
    };
    look().while_trying("look for it in its directory").map_err(|error| error.in_file(path))
}
