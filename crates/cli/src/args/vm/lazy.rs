//! `vmstrata vm restore --lazy` on the command line.

use std::time::Duration;

use clap::Args;

use crate::units::parse_size;

/// Restoring while the guest runs.
#[derive(Clone, Copy, Debug, Args)]
pub struct LazyArgs {
    /// Let the guest run before its memory is read: pages are read when it touches them, the rest in the background
    #[arg(long)]
    pub lazy: bool,
    /// With --lazy: how long to read pages of clean cache before the guest runs. Those that were not read by then come
    /// in the background if its disks have them; others it reads again itself
    #[arg(long, value_name = "SECONDS", default_value = "0.3", value_parser = parse_seconds, requires = "lazy")]
    pub cache_time: Duration,
    /// With --lazy: the most bytes a second to read in the background; 0 reads only what the guest touches
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "lazy")]
    pub fill_rate: Option<u64>,
    /// With --lazy: how long the guest waits for a page that no copy can be read of, before its QEMU is ended by SIGBUS
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds, requires = "lazy")]
    pub page_patience: Duration,
    /// With --lazy: let the guest write to memory that others can read, so that `vm snapshot` can take it again (always so with
    /// vhost-user devices); what it writes is then written back to --memory-dir
    #[arg(long, requires = "lazy")]
    pub shared: bool,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_have_fractions_and_no_sign() {
        assert_eq!(parse_seconds("0.3"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_seconds("0"), Ok(Duration::ZERO));
        for wrong in ["-1", "inf", "1s", "", "1e99"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
