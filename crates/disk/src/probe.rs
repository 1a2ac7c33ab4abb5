//! What files say of themselves, without opening them as a disk: one file of a tree of images, or a chain by its headers.

mod chain;
mod clusters;
mod file;

pub use chain::{LayerHead, check_locks, probe_backing, probe_chain, probe_layer, published_below};
pub use clusters::{OwnCluster, own_clusters};
pub use file::{BackingPlace, ImageHead, ProbedFile, probe_file};
