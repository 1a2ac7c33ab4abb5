//! Taking the memory and the devices of a running QEMU, at one instant.
//!
//! ```text
//!   Qmp ──► Machine (backends, layout) ──► MachineRam
//! ```

mod backend;
mod machine;
mod memory;
mod mtree;

pub use machine::{BACKENDS_MAX, Backend, Machine, MachineError};
pub use memory::MachineRam;
