//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod directory;
#[cfg(feature = "hdfs")]
mod hdfs;
mod holds_s3;
#[cfg(feature = "s3")]
mod s3;
mod suite;
mod suite_hdfs;
mod suite_s3;
