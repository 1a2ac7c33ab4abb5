//! How many files the server may have open, and how many of them the layers get.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors kept for what is not a layer's file: sockets, event descriptors, guests' memory, logs.
const RESERVED_FILES: u64 = 256;

/// More open layer files than this bring nothing: opening one again costs microseconds.
const LAYER_FILES_MAX: u64 = 4096;

/// Fewer than this and a long chain would thrash.
const LAYER_FILES_MIN: u64 = 16;

/// Raises the soft limit on open files to the hard one and returns it.
pub(crate) fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(error) => {
            tracing::warn!("cannot raise the limit on open files: {error}");
            limit.current.unwrap_or(u64::MAX)
        }
    }
}

/// How many layer files may be open at once under a limit of `open_files`.
pub(crate) fn layer_files(open_files: u64) -> usize {
    let share = open_files.saturating_sub(RESERVED_FILES) / 2;
    let bounded = share.clamp(LAYER_FILES_MIN, LAYER_FILES_MAX);
    usize::try_from(bounded).expect("bounded by LAYER_FILES_MAX")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_get_half_of_what_is_not_reserved_within_bounds() {
        assert_eq!(layer_files(1024), 384);
        assert_eq!(layer_files(0), 16);
        assert_eq!(layer_files(u64::MAX), 4096);
    }

    #[test]
    fn the_soft_limit_ends_at_the_hard_one() {
        let raised = raise_open_files();
        assert_eq!(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), raised);
    }
}
