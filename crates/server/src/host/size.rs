//! Other sizes for disks that are served.

use vmstrata_api::{Event, SizeChange, SizeSpec};
use vmstrata_disk::Shrink;

use super::Host;
use super::exports::Export;
use crate::error::Error;

impl Host {
    /// Gives a disk another size, and tells its guests. The size that it has is no error: guests are told again.
    ///
    /// # Errors
    /// No such disk, one that is not served, or what the engine refuses; see [`vmstrata_disk::Disk::resize`].
    pub fn resize(&self, name: &str, asked: &SizeSpec) -> Result<SizeChange, Error> {
        let (_change, table) = self.begin_change()?;
        let (_, disk) = table.lend(name, "being resized")?;
        drop(table);
        let shrink = if asked.shrink { Shrink::Allow } else { Shrink::Refuse };
        let resized = disk.resize(asked.size_bytes, shrink)?;
        let table = self.table.lock();
        let own = table.exports.iter().filter(|export| export.is_only_for(name));
        let guests = own.filter_map(Export::vhost_user);
        // Not what was asked for: someone else may have resized it since.
        let told = guests.filter(|server| server.set_size(disk.size())).count();
        let nbd_clients = table.nbd_clients(name);
        drop(table);
        if resized.from != resized.to {
            self.tell(Event::DiskResized { disk: name.to_owned(), size_bytes: resized.to });
        }
        Ok(SizeChange {
            disk: name.to_owned(),
            from_bytes: resized.from,
            size_bytes: resized.to,
            pause_us: u64::try_from(resized.pause.as_micros()).unwrap_or(u64::MAX),
            guests_told: told as u64,
            nbd_clients: nbd_clients as u64,
        })
    }
}
