//! What was added to a running server, saved for the one that comes after it.
//!
//! ```text
//!   POST, DELETE /v1/disks, exports ──► Host ──► a file in the runtime directory ──► the next server on the same control socket
//! ```
//!
//! A guest whose disk was added by hand outlives the server, whether that is replaced, restarted by the service manager or killed:
//! its successor has to know. The file ends with the host: what should be there after a reboot belongs in the configuration.
//!
//! The directory is the user's own ([`crate::runtime_dir`]), so no other user writes the file. One that cannot be read is reported and
//! ignored.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmstrata_api as api;
use vmstrata_store::proc::boot_id;
use vmstrata_types::{path_to_text, percent_encode};

const VERSION: u32 = 1;

/// What was added, as it was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedState {
    pub(crate) disks: Vec<api::DiskSpec>,
    pub(crate) exports: Vec<api::ExportSpec>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    /// Nothing is taken over from another boot.
    boot: String,
    /// The control socket of the server that wrote it.
    control: String,
    #[serde(flatten)]
    state: SavedState,
}

/// Where it is saved.
#[derive(Clone, Debug)]
pub(crate) struct SavedFile {
    path: PathBuf,
    control: PathBuf,
}

impl SavedFile {
    /// In the runtime directory; servers with other control sockets have files of their own there.
    pub(crate) fn new(runtime_dir: &Path, control: &Path) -> Self {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (runtime_dir, control) = (absolute(runtime_dir), absolute(control));
        let name = if control == runtime_dir.join(api::CONTROL_SOCKET) {
            "added.json".to_owned()
        } else {
            // A path has more characters than a name may have.
            let long = percent_encode(control.as_os_str().as_bytes());
            format!("added-{}.json", &long[long.len().saturating_sub(200)..])
        };
        Self { path: runtime_dir.join(name), control }
    }

    /// What was added to the server before.
    pub(crate) fn read(&self) -> SavedState {
        let read = || -> io::Result<Option<Content>> {
            let text = match std::fs::read(&self.path) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            };
            Ok(Some(serde_json::from_slice(&text)?))
        };
        match read() {
            Ok(Some(found)) if found.version == VERSION && found.control == path_to_text(&self.control) => {
                if boot_id().is_ok_and(|boot| boot == found.boot) {
                    found.state
                } else {
                    SavedState::default()
                }
            }
            Ok(None) => SavedState::default(),
            Ok(Some(_)) => self.unread("it is another server's, or of another version"),
            Err(error) => self.unread(&error.to_string()),
        }
    }

    fn unread(&self, why: &str) -> SavedState {
        tracing::error!(file = %self.path.display(), why, "what was added to the server before is not known: add it again");
        SavedState::default()
    }

    /// Saves what there is now.
    ///
    /// # Errors
    /// The host's: the file has not changed.
    pub(crate) fn write(&self, state: &SavedState) -> io::Result<()> {
        if *state == SavedState::default() {
            return match std::fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let (boot, control) = (boot_id()?, path_to_text(&self.control));
        let text = serde_json::to_vec(&Content { version: VERSION, boot, control, state: state.clone() })?;
        let draft = self.path.with_extension("new");
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.write_all(&text)?;
        // The directory is in memory: there is nothing to flush.
        std::fs::rename(&draft, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> SavedState {
        let disk = api::DiskSpec { path: "/vms/web.qcow2".to_owned(), ..api::DiskSpec::default() };
        let export = api::ExportSpec::Nbd(api::NbdSpec {
            address: "unix:/run/nbd.sock".to_owned(),
            rw: true,
            ..Default::default()
        });
        SavedState { disks: vec![disk], exports: vec![export] }
    }

    #[test]
    fn a_server_finds_what_the_one_before_on_its_socket_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let file = |control: &Path| SavedFile::new(dir.path(), control);
        let own = dir.path().join(api::CONTROL_SOCKET);
        let deep = PathBuf::from(format!("/{}/c.sock", "d/".repeat(48)));
        for control in [own.as_path(), Path::new("/run/other.sock"), deep.as_path()] {
            assert_eq!(file(control).read(), SavedState::default());
            file(control).write(&some()).unwrap();
            assert_eq!(file(control).read(), some());
        }
        file(&own).write(&SavedState::default()).unwrap();
        assert_eq!(file(&own).read(), SavedState::default());
        assert!(!dir.path().join("added.json").exists());
        assert_eq!(file(&deep).read(), some());
    }

    #[test]
    fn what_was_before_the_reboot_or_is_damaged_is_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::new(dir.path(), &dir.path().join(api::CONTROL_SOCKET));
        file.write(&some()).unwrap();
        let text = std::fs::read_to_string(&file.path).unwrap();
        for changed in [
            text.replace(&boot_id().unwrap(), "another"),
            text.replace("\"version\":1", "\"version\":2"),
            text[1..].to_owned(),
        ] {
            assert_ne!(changed, text);
            std::fs::write(&file.path, changed).unwrap();
            assert_eq!(file.read(), SavedState::default());
        }
    }
}
