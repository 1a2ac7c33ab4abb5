//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod added;
mod audit;
mod backup;
mod check;
mod config;
mod contract;
mod control;
mod control_hostile;
mod create;
mod diff;
mod flush_log;
mod gc;
#[cfg(feature = "hdfs")]
#[path = "../../repo/tests/hdfs/mod.rs"]
mod hdfs;
mod hold;
mod index;
mod info;
mod jobs;
mod keep_going;
mod killed_anywhere;
mod killed_offline;
mod layouts;
mod libvirt;
mod limits;
mod local_disks;
mod map;
mod merge;
mod merge_layers;
mod moving;
mod named;
mod odd_names;
mod other_users;
mod packaging;
mod quiesce;
mod quiesce_killed;
mod rebase;
mod replace;
mod replicas;
mod resize;
mod restart;
mod revert_served;
#[cfg(feature = "s3")]
#[path = "../../repo/tests/s3/mod.rs"]
mod s3;
mod serve;
mod snapshot;
mod snapshot_prune;
mod snapshot_served;
mod stats;
mod support;
mod survey;
mod tier;
mod tier_attach;
mod tier_file_systems;
mod tier_hdfs;
mod tier_hdfs_group;
mod tier_s3;
mod tour;
mod usage;
mod vm_killed;
mod vm_pages;
mod vm_restore;
mod vm_snapshot;
mod vm_store;
mod vm_tiered;
