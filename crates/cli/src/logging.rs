//! Where `tracing` goes: stderr, in the format and at the level the user chose.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;
use vmstrata_server::LogFormat;

/// Sends log events at `level` and above to stderr; `RUST_LOG` overrides the level.
///
/// Call once, before threads start.
pub fn start(format: LogFormat, level: &'static str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    // A log that cannot be written, on a full file system for instance, ends nothing: its errors have nowhere to go.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Text => builder.with_target(false).with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
}
