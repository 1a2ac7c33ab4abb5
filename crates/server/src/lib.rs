//! The disks and exports of a host, and the socket that controls them: what `vmstrata serve` runs.
//!
//! ```text
//!   Options ──► run ─┬─ Host: disks, exports (their threads move the data) ◄───┐
//!                    ├─ control: one thread, HTTP on a unix socket ──────────┘ add, remove, ask
//!                    └─ signals ──► exports drained ──► disks closed clean
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`spec`], [`config`], `options` | what is asked for, checked before any file is touched |
//! | [`host`] | which disks and exports there are, and how they come and go |
//! | `jobs` | the jobs of the disks, as the API shows them |
//! | `saved` | what was added to a running server, for its successor |
//! | `audit` | who changed what |
//! | `agent` | guests that stand still for a snapshot |
//! | `flush_log` | the log that makes the disks' flushes durable |
//! | `control` | HTTP on a unix socket: routes, problems, the OpenAPI document |
//! | `run`, `preflight`, `shutdown`, `notify`, `limits`, `runtime_dir` | the process around them |
//!
//! The control thread is never on the road of data: a request of a guest or an NBD client neither passes it nor
//! waits for it.

#![forbid(unsafe_code)]

mod agent;
mod audit;
pub mod config;
mod control;
mod error;
pub mod flush_log;
pub mod host;
mod hours;
mod jobs;
mod limits;
mod notify;
mod options;
mod preflight;
mod run;
mod runtime_dir;
mod saved;
mod shutdown;
pub mod size;
pub mod spec;

pub use agent::{AgentFault, thaw_guard};
pub use audit::{Audit, What};
pub use control::{is_managers, openapi};
pub use error::{Error, NotClean, RuntimeDirFault, SocketFault};
pub use host::{Host, merge_options, move_order};
pub use options::{ControlPlace, Limits, LogFormat, Options, TlsFiles};
pub use preflight::preflight;
pub use run::run;
pub use runtime_dir::default_dir;
