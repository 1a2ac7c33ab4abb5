//! All tests of the crate in one binary: each further one is linked, and kept on disk, whole.

mod nbd_common;
mod nbd_diff;
mod nbd_errors;
mod nbd_handshake;
mod nbd_hostile;
mod nbd_memory;
mod nbd_model;
mod nbd_shutdown;
mod nbd_tls;
mod nbd_tools;
mod nbd_transmission;
mod vhost_blkio;
mod vhost_common;
mod vhost_conversations;
mod vhost_descriptors;
mod vhost_fuse;
mod vhost_hostile;
mod vhost_protocol;
mod vhost_resize;
mod vhost_restart;
mod vhost_stop;
#[path = "../../disk/tests/common/wait.rs"]
pub mod wait;
