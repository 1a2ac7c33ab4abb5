//! `vmstrata resize` on the command line.

use std::path::PathBuf;

use clap::Args;

use super::snapshot::AccessArgs;
use crate::units::parse_size;

/// `vmstrata resize`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct ResizeArgs {
    /// The disk: served by a running server, or not in use
    pub disk: PathBuf,
    /// Its new size, such as 20G; or how much larger it is to be, such as +10G
    #[arg(value_parser = new_size)]
    pub size: NewSize,
    /// Let the disk become smaller: what is past its new end is lost
    #[arg(long)]
    pub shrink: bool,
    /// Resize it although images stand on it, which then read other data
    #[arg(long)]
    pub force: bool,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const HELP: &str = "\
Examples:
  vmstrata resize web.qcow2 40G
  vmstrata resize web.qcow2 +10G
  vmstrata resize web.qcow2 5G --shrink           after the guest has made its file system smaller
  vmstrata resize web.qcow2 +10G --json | jq .size_bytes

A guest sees the new size at once, without a restart; then let it grow its partition and file system. NBD clients see it \
when they connect anew. New space reads as zeros. Snapshots keep the size that the disk had.
Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

/// What a disk's size is to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// This many bytes.
    To(u64),
    /// So many bytes more.
    By(u64),
}

impl NewSize {
    /// The new size of a disk that has `now` bytes.
    ///
    /// # Errors
    /// More than 64 bits hold.
    pub fn of(self, now: u64) -> anyhow::Result<u64> {
        match self {
            Self::To(size) => Ok(size),
            Self::By(more) => now
                .checked_add(more)
                .ok_or_else(|| anyhow::anyhow!("{now} + {more} bytes are more than 64 bits hold")),
        }
    }
}

fn new_size(text: &str) -> anyhow::Result<NewSize> {
    match text.strip_prefix('+') {
        Some(more) => Ok(NewSize::By(parse_size(more)?)),
        None => Ok(NewSize::To(parse_size(text)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plus_makes_a_size_relative() {
        assert_eq!(new_size("20G").unwrap(), NewSize::To(20 << 30));
        assert_eq!(new_size("+512").unwrap(), NewSize::By(512));
        assert_eq!(new_size("+1M").unwrap().of(5).unwrap(), (1 << 20) + 5);
        assert!(NewSize::By(u64::MAX).of(1).is_err());
        for bad in ["", "+", "++1", "-1G", "1.5G"] {
            assert!(new_size(bad).is_err(), "{bad}");
        }
    }
}
