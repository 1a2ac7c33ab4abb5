//! The benchmark: the same chains and the same client for stock QEMU, vmstrata, and the floor.

pub mod client;
