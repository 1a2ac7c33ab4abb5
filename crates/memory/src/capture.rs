//! Taking the memory and the devices of a running QEMU, at one instant.
//!
//! ```text
//!   Qmp ──► Machine (backends, layout) ──► MachineRam ──┐
//!    │                                                  ▼
//!    └──► take: stop ─ disks ─ devices ─► pipe ─ copy of memory ─ cont ──► store (introspection, vault)
//! ```
//!
//! Invariants: whatever fails, the guest goes on as it did before; nothing of a capture that failed is left, neither a
//! snapshot of its disks nor a capability of QEMU's that was off before.

mod backend;
mod before;
mod copy;
mod error;
mod live;
mod machine;
mod memory;
mod mtree;
mod pause;
mod populate;
mod processor;
mod save;
mod state;
pub mod stream;
mod take;

pub use before::Before;
pub use error::CaptureError;
pub use machine::{BACKENDS_MAX, Backend, Machine, MachineError};
pub use memory::MachineRam;
pub(crate) use pause::set_capability;
pub use processor::processor;
pub use save::{CAPTURED, Captured, CapturedBackend, DEVICES, Introspect, Report, Request, snapshot};
pub use state::{Channel, STATE_BYTES_MAX};
pub(crate) use take::IGNORE_SHARED;
pub use take::{Control, Disks, Mode, Moment, Store, Taken, take};
