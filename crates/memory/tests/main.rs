//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod filesystem;
#[cfg(feature = "hdfs")]
#[path = "../../repo/tests/hdfs/mod.rs"]
mod hdfs;
mod lazy;
mod refill;
#[cfg(feature = "s3")]
#[path = "../../repo/tests/s3/mod.rs"]
mod s3;
mod vault;
#[cfg(any(feature = "hdfs", feature = "s3"))]
mod vault_far;
mod vault_faults;
mod vault_full;
mod vault_gc;
mod vault_golden;
mod vault_hdfs;
mod vault_hdfs_faults;
mod vault_kill;
mod vault_metadata;
mod vault_model;
mod vault_private;
mod vault_repair;
mod vault_s3;
mod vault_support;
