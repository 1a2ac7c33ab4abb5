//! Reading the L1 table when an image is opened.

use std::sync::atomic::AtomicU64;

use vmstrata_qcow2::Header;
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use crate::error::{IoContext as _, Result};
use crate::layer::{Tables, table_of, words};

/// The raw entries of the L1 table, and where the L2 tables lie that they lead to.
pub(super) fn read(
    store: &dyn Store,
    header: &Header,
    tables: &Tables,
    file_len: u64,
) -> Result<(Box<[AtomicU64]>, Vec<HostOffset>)> {
    let mut bytes = vec![0; header.l1_size as usize * 8];
    let at = header.l1_table_offset;
    store.read_exact(&mut bytes, at).while_trying("read the L1 table").map_err(|error| error.at(at))?;
    let mut l2_tables = Vec::new();
    for (index, raw) in words(&bytes).enumerate() {
        let table = table_of(tables, raw, file_len).map_err(|error| error.at(at + index as u64 * 8))?;
        l2_tables.extend(table);
    }
    Ok((words(&bytes).map(AtomicU64::new).collect(), l2_tables))
}
