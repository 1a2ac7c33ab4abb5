//! The flush log: guests of one host that flush wait for one sequential write and one `fdatasync` between them.
//!
//! ```text
//!   write ──► LoggedStore ──► the file, in the host's page cache
//!                 │ a copy of what is short
//!                 ▼
//!   flush ──► record ──► FlushLog: batch ──► one write, one fdatasync ──► all that are in the batch are answered
//!                                    │
//!   checkpoint: fdatasync of a file ─┘ ──► its records are void, the tail moves on
//! ```
//!
//! [`LoggedStore`] keeps the contract of [`vmstrata_store::Store`]: after a flush, what was written before survives a power
//! failure, in the file or in the log. [`FlushLog::open`] brings the log into the files after a crash, before anyone uses them.
//!
//! | module | what it knows |
//! |---|---|
//! | `format` | the bytes of the log |
//! | `log` | batches, group commit, room, shares |
//! | `logged` | a file whose flushes go to the log |
//! | `checkpoint` | the thread that frees room |
//! | `recover` | what a log holds after a crash, and bringing it into the files |
//! | `error` | what keeps a log from being used |
//!
//! Lock order: a store's commit lock, then its sync lock or its pending writes, then the log's state. No lock of the log is held
//! during I/O.

mod checkpoint;
mod error;
mod format;
mod log;
mod logged;
mod recover;

pub use error::LogError;
pub use format::Subject;
pub use log::{FlushLog, Usage};
pub use logged::{LoggedStore, SHORT_MAX};
pub use recover::{Held, Host, Recovered, Targets};
