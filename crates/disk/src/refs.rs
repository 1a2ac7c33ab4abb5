//! Who needs a file: images that stand on it, disks elsewhere by their back-references, processes that have it open.

pub(crate) mod back_refs;
mod beside;
mod chain_file;
mod holder;
mod in_use;
mod kept;
mod space;
mod users;

pub(crate) use beside::Beside;
pub(crate) use chain_file::{ChainFile, chain_files, layers_of_others};
pub(crate) use holder::holders_of;
pub use holder::{Holder, HolderKind, holders};
pub(crate) use in_use::{LocalHolders, holder_among, is_open, open_twice};
pub use kept::Kept;
pub(crate) use space::allocated_bytes;
pub(crate) use users::{Users, below, missing};
