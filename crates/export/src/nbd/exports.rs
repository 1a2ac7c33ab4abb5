//! The table of disks that clients can choose from, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use vmstrata_disk::Disk;

use super::error::{Error, ExportFault};
use super::protocol::reply::Style;
use super::protocol::{TransmissionFlags, check_string};

/// One disk as clients see it.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    disk: Arc<Disk>,
    read_only: bool,
}

impl Export {
    /// `disk` under a name; writable if the disk is.
    pub fn new(name: impl Into<String>, disk: Arc<Disk>) -> Self {
        let read_only = disk.is_read_only();
        Self { name: name.into(), description: String::new(), disk, read_only }
    }

    /// Adds a text that clients show to people.
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Refuses all writing commands, even where the disk would take them.
    pub fn with_read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// The name clients ask for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text that clients show to people; may be empty.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The disk behind the name.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Whether writing commands are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What clients are told this export can do.
    pub(crate) fn flags(&self, style: Style, has_contexts: bool) -> TransmissionFlags {
        use TransmissionFlags as F;
        let mut flags = F::HAS_FLAGS | F::SEND_FLUSH | F::SEND_FUA | F::SEND_CACHE;
        // All connections share one engine and one page cache, so a flush on one covers them all.
        flags |= F::CAN_MULTI_CONN;
        if self.read_only {
            flags |= F::READ_ONLY;
        } else {
            flags |= F::SEND_TRIM | F::SEND_WRITE_ZEROES | F::SEND_FAST_ZERO;
        }
        flags.set(F::SEND_DF, style.is_chunked());
        flags.set(F::BLOCK_STATUS_PAYLOAD, style.is_extended() && has_contexts);
        flags
    }
}

/// The exports of a server; may change while it runs. Connections keep the export they have chosen.
#[derive(Debug, Default)]
pub struct Exports(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    by_name: BTreeMap<String, Arc<Export>>,
    default: Option<String>,
}

impl Exports {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an export.
    ///
    /// # Errors
    /// [`Error::Export`] when the name is taken or a text cannot be sent.
    pub fn add(&self, export: Export) -> Result<(), Error> {
        let fail = |reason| Err(Error::Export { name: export.name.clone(), reason });
        if check_string(export.name.as_bytes()).is_err()
            || check_string(export.description.as_bytes()).is_err()
        {
            return fail(ExportFault::NotAString);
        }
        let mut table = self.0.write();
        if table.by_name.contains_key(&export.name) {
            return fail(ExportFault::Taken);
        }
        table.by_name.insert(export.name.clone(), Arc::new(export));
        Ok(())
    }

    /// Takes an export out of the table; connections that have chosen it go on.
    pub fn remove(&self, name: &str) -> Option<Arc<Export>> {
        self.0.write().by_name.remove(name)
    }

    /// Whether this very export is in the table.
    pub(crate) fn has(&self, export: &Arc<Export>) -> bool {
        self.0.read().by_name.get(&export.name).is_some_and(|found| Arc::ptr_eq(found, export))
    }

    /// Names the export that clients get which ask for none.
    ///
    /// Without this, they get the export with the empty name, or else the only one.
    pub fn set_default(&self, name: impl Into<String>) {
        self.0.write().default = Some(name.into());
    }

    /// The export a client means by `name`.
    pub fn resolve(&self, name: &str) -> Option<Arc<Export>> {
        let table = self.0.read();
        if let Some(export) = table.by_name.get(name) {
            return Some(export.clone());
        }
        if !name.is_empty() {
            return None;
        }
        match &table.default {
            Some(default) => table.by_name.get(default).cloned(),
            None if table.by_name.len() == 1 => table.by_name.values().next().cloned(),
            None => None,
        }
    }

    /// All exports by name.
    pub fn list(&self) -> Vec<Arc<Export>> {
        self.0.read().by_name.values().cloned().collect()
    }
}
