//! Who may write a disk: the clients of one export at a time, or of several that all say they share it.
//!
//! The engine serves any number of writers soundly, but two guests on one file system corrupt it. So each export attaches
//! before it lets a client write; connections of one export attach under one name, and count as one writer.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Disk;

/// The writers of a disk.
#[derive(Debug, Default)]
pub(super) struct Attached(Mutex<Vec<Writer>>);

#[derive(Debug)]
struct Writer {
    name: String,
    shares: bool,
    connections: usize,
}

/// A connection that may write; dropped when it does so no more.
#[derive(Debug)]
pub struct AttachedWriter {
    to: Arc<Attached>,
    name: String,
}

/// Another writer has the disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk is attached for writing by {by}: detach it there first, attach read-only, or say share for both"
)]
pub struct HasWriter {
    /// What the other writer is called.
    pub by: String,
}

impl Disk {
    /// Attaches a connection that may write, of the writer `name`. `shares` lets others in that say so, too.
    ///
    /// # Errors
    /// [`HasWriter`] when another writer is attached, unless both share.
    pub fn attach_writer(&self, name: &str, shares: bool) -> Result<AttachedWriter, HasWriter> {
        let mut writers = self.attached.0.lock();
        let mut others = writers.iter().filter(|writer| writer.name != name);
        if let Some(other) = others.find(|other| !(other.shares && shares)) {
            return Err(HasWriter { by: other.name.clone() });
        }
        match writers.iter_mut().find(|writer| writer.name == name) {
            Some(writer) => writer.connections += 1,
            None => writers.push(Writer { name: name.to_owned(), shares, connections: 1 }),
        }
        Ok(AttachedWriter { to: Arc::clone(&self.attached), name: name.to_owned() })
    }
}

impl Drop for AttachedWriter {
    fn drop(&mut self) {
        let mut writers = self.to.0.lock();
        if let Some(writer) = writers.iter_mut().find(|writer| writer.name == self.name) {
            writer.connections -= 1;
        }
        writers.retain(|writer| writer.connections > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, OpenOptions, ResourceOptions, Resources, create};

    #[test]
    fn a_disk_has_one_writer_unless_all_share() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.qcow2");
        create(&path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
        let resources = Resources::new(ResourceOptions::default());
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
        let refused = |name: &str, shares| disk.attach_writer(name, shares).unwrap_err().by;
        let first = disk.attach_writer("a guest", false).unwrap();
        let second = disk.attach_writer("a guest", false).unwrap();
        assert_eq!(
            (refused("nbd", false), refused("nbd", true)),
            ("a guest".to_owned(), "a guest".to_owned())
        );
        drop(first);
        assert_eq!(refused("nbd", true), "a guest", "its second connection is open");
        drop(second);
        let shared = disk.attach_writer("one", true).unwrap();
        let both = disk.attach_writer("other", true).unwrap();
        assert_eq!(refused("nbd", false), "one");
        drop((shared, both));
        disk.attach_writer("nbd", false).unwrap();
    }
}
