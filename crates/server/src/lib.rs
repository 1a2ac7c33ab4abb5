//! The disks and doors of a host, and the socket that controls them.

#![forbid(unsafe_code)]
