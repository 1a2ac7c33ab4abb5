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
    share: bool,
    /// Who may use it, and who of them may write; `None` lets everybody do both.
    clients: Option<Vec<ClientRight>>,
}

/// What a client may do with an export that is not for everybody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRight {
    /// A name in the client's certificate: `CN=`, `DNS=` or `URI=`, and the name.
    pub client: String,
    /// Whether it may write.
    pub writes: bool,
}

/// An export as one client sees it.
#[derive(Clone, Debug)]
pub(crate) struct Visible {
    pub(crate) export: Arc<Export>,
    /// Whether this client may not write.
    pub(crate) read_only: bool,
}

impl Export {
    /// `disk` under a name; writable if the disk is.
    pub fn new(name: impl Into<String>, disk: Arc<Disk>) -> Self {
        let read_only = disk.is_read_only();
        Self { name: name.into(), description: String::new(), disk, read_only, share: false, clients: None }
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

    /// Lets others write the disk at the same time, if they say so, too.
    pub fn with_share(mut self) -> Self {
        self.share = true;
        self
    }

    /// Lets only these clients use the export; others do not see it.
    pub fn with_clients(mut self, clients: Vec<ClientRight>) -> Self {
        self.clients = Some(clients);
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

    /// Whether writers of the disk beside this export are allowed.
    pub(crate) fn shares(&self) -> bool {
        self.share
    }

    /// Whether a client with these names may not write; `None` when it may not even read.
    fn is_read_only_for(&self, names: &[String]) -> Option<bool> {
        let Some(clients) = &self.clients else { return Some(self.read_only) };
        let mut own = clients.iter().filter(|right| names.contains(&right.client)).peekable();
        own.peek()?;
        Some(self.read_only || !own.any(|right| right.writes))
    }
}

impl Visible {
    fn of(export: &Arc<Export>, names: &[String]) -> Option<Self> {
        let read_only = export.is_read_only_for(names)?;
        Some(Self { export: Arc::clone(export), read_only })
    }

    /// The transmission flags of this export.
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
pub struct Exports(RwLock<BTreeMap<String, Arc<Export>>>);

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
        if table.contains_key(&export.name) {
            return fail(ExportFault::Taken);
        }
        table.insert(export.name.clone(), Arc::new(export));
        Ok(())
    }

    /// Takes an export out of the table; connections that have chosen it go on.
    pub fn remove(&self, name: &str) -> Option<Arc<Export>> {
        self.0.write().remove(name)
    }

    /// Whether this very export is in the table.
    pub(crate) fn has(&self, export: &Arc<Export>) -> bool {
        self.0.read().get(&export.name).is_some_and(|found| Arc::ptr_eq(found, export))
    }

    /// The export that a client with these names means by `name`; without one, the only one.
    pub(crate) fn resolve(&self, name: &str, names: &[String]) -> Option<Visible> {
        let table = self.0.read();
        let visible = |export| Visible::of(export, names);
        if let Some(export) = table.get(name) {
            return visible(export);
        }
        if !name.is_empty() {
            return None;
        }
        let mut all = table.values().filter_map(visible);
        let first = all.next()?;
        all.next().is_none().then_some(first)
    }

    /// All exports by name.
    pub fn list(&self) -> Vec<Arc<Export>> {
        self.0.read().values().cloned().collect()
    }

    /// Those that a client with these names may use.
    pub(crate) fn list_for(&self, names: &[String]) -> Vec<Visible> {
        self.0.read().values().filter_map(|export| Visible::of(export, names)).collect()
    }
}
