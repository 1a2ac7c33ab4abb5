//! Who changed what: a log line, an event, and a line of the audit file for each change.
//!
//! ```text
//!   control requests ──► Audit::change ─┐
//!   commands without a server ──► same ─┤
//!   ends of jobs ──► Jobs ──────────────┴─► Audit::record ──► log, events, file
//! ```
//!
//! The file is opened anew for each line, so that it may be renamed or cut at any time. Each line is one write at its end: lines
//! of several servers do not mix. A line that cannot be written is reported, and stops no change.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use tokio::sync::broadcast;
use vmstrata_api::{Change, ChangedBy, Event, Outcome};
use vmstrata_disk::snapshot::now_ns;
use vmstrata_types::{time, told};

use crate::error::Error;

/// Where changes are told.
#[derive(Clone, Debug)]
pub struct Audit {
    events: broadcast::Sender<Event>,
    file: Option<PathBuf>,
}

/// What is being changed.
#[derive(Clone, Debug, Default)]
pub struct What {
    /// Its kind, as [`Change::change`] has it.
    pub change: &'static str,
    /// The disks.
    pub disks: Vec<String>,
    /// What of them.
    pub object: Option<String>,
    /// Bytes, as [`Change::bytes`] has them.
    pub bytes: Option<u64>,
}

impl What {
    /// Something about `disks`.
    pub fn of(change: &'static str, disks: impl IntoIterator<Item = String>) -> Self {
        Self { change, disks: disks.into_iter().collect(), ..Self::default() }
    }

    /// About this of them.
    #[must_use]
    pub fn object(mut self, object: impl Into<String>) -> Self {
        self.object = Some(object.into());
        self
    }
}

impl Audit {
    /// Tells of changes through `events`, and in `file`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn new(events: broadcast::Sender<Event>, file: Option<&Path>) -> Result<Self, Error> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Audit { path, source }
        };
        let file = file.map(|path| std::path::absolute(path).map_err(failed(path))).transpose()?;
        file.as_deref().map(|path| append(path, b"").map_err(failed(path))).transpose()?;
        Ok(Self { events, file })
    }

    /// Tells of changes in the log and `file` alone.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn without_events(file: Option<&Path>) -> Result<Self, Error> {
        Self::new(broadcast::Sender::new(1), file)
    }

    /// Does `work`, which may complete what is said of it, and tells of it.
    ///
    /// # Errors
    /// Those of the work.
    pub fn change<T, E: AsRef<dyn std::error::Error>>(
        &self,
        by: ChangedBy,
        mut what: What,
        work: impl FnOnce(&mut What) -> Result<T, E>,
    ) -> Result<T, E> {
        let began = Instant::now();
        let done = work(&mut what);
        let (outcome, error) = match &done {
            Ok(_) => (Outcome::Done, None),
            Err(error) => (Outcome::Failed, Some(told(error.as_ref()))),
        };
        self.record(by, what, began.elapsed(), (outcome, error));
        done
    }

    /// Tells of a change that has ended.
    pub(crate) fn record(
        &self,
        by: ChangedBy,
        what: What,
        duration: Duration,
        (outcome, error): (Outcome, Option<String>),
    ) {
        let What { change, disks, object, bytes } = what;
        let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            disk = disks.join(", "), object = object.as_deref(), %by, bytes, duration_ms, %outcome, error = error.as_deref(),
            "change {change}"
        );
        let time = time::rfc3339(now_ns());
        let change =
            Change { time, change: change.to_owned(), disks, object, by, bytes, duration_ms, outcome, error };
        if let Some(path) = &self.file {
            let line = serde_json::to_string(&change).expect("a change is plain data") + "\n";
            if let Err(error) = append(path, line.as_bytes()) {
                tracing::error!(path = %path.display(), %error, "a change is not in the audit file");
            }
        }
        // No reader is no failure.
        let _ = self.events.send(Event::Changed { change });
    }
}

/// Writes a line to the end of a file that only its owner may read, and that no link stands for.
fn append(path: &Path, line: &[u8]) -> io::Result<()> {
    // A pipe without a reader is refused, not waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = std::fs::File::options();
    options.append(true).create(true).mode(0o600).custom_flags(flags.bits().cast_signed());
    let mut file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    match file.write(line)? {
        written if written == line.len() => Ok(()),
        written => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            format!("only {written} bytes of it were written"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{read_to_string, rename};
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    fn changed(audit: &Audit, disk: &str) {
        let what = What::of("disk_add", [disk.to_owned()]);
        audit.change(ChangedBy::Server, what, |_| Ok::<_, Error>(())).unwrap();
    }

    #[test]
    fn lines_go_to_the_file_that_has_the_name_and_a_failure_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let (events, mut heard) = broadcast::channel(9);
        let audit = Audit::new(events, Some(&path)).unwrap();
        changed(&audit, "a");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        rename(&path, dir.path().join("audit.1")).unwrap();
        changed(&audit, "b");
        std::fs::File::create(&path).unwrap();
        changed(&audit, "c");
        rename(&path, dir.path().join("audit.2")).unwrap();
        symlink(dir.path().join("elsewhere"), &path).unwrap();
        changed(&audit, "d");
        let disks = |name: &str| {
            let text = read_to_string(dir.path().join(name)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<Change>(line).unwrap().disks.concat());
            lines.collect::<String>()
        };
        assert_eq!((disks("audit.1"), disks("audit.2")), ("a".to_owned(), "c".to_owned()));
        assert!(!dir.path().join("elsewhere").exists(), "a link is not followed");
        assert!((0..4).all(|_| matches!(heard.try_recv(), Ok(Event::Changed { .. }))));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_refused_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().to_owned(), dir.path().join("none/audit")] {
            let refused = Audit::new(broadcast::Sender::new(1), Some(&path));
            assert!(matches!(refused, Err(Error::Audit { .. })), "{refused:?}");
        }
    }
}
