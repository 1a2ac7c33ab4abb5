//! The page of a run, as `docs/measurements/stress.md` is one.

use std::time::Duration;

use super::Outcome;
use crate::bench::machine::machine;

const ABOUT: &str = "\
Each round makes a disk with a configuration drawn from its seed (13 cluster sizes, versions 2 and 3, `cache=host` and `direct`, ext4 and
tmpfs, raw, compressed and mixed layers below) and writes sectors that hold their own number and a value that is never used again, over
vhost-user and NBD at once. Meanwhile the server is killed with SIGKILL, the runtime directory wiped as by a power failure, snapshots are taken,
merged in both directions and flattened, jobs paused and cancelled, the disk resized, and the file systems of the images and of the journals
filled. A model says what each sector may hold. It judges every read of the load, the whole disk after each start and, after a clean end,
`qemu-img check` of every layer and `qemu-img convert` of the disk and of its snapshots. A run ends with the first error.
";

/// What a run from `seed` did in `time`, without an error.
pub fn page(seed: u64, time: Duration, outcome: &Outcome) -> String {
    let machine = machine();
    format!(
        "# Stamped sectors under kills, full disks and merges\n\n\
         Made by `cargo xtask stress`. {ABOUT}\n\
         | | |\n|---|--:|\n| rounds | {} |\n{}| errors | 0 |\n\n\
         Seeds {seed} to {}; {} s; {} cores ({}), {} GiB, Linux {}. The tests do the same for a minute.\n",
        outcome.rounds,
        outcome.figures.rows(),
        seed + outcome.rounds.saturating_sub(1),
        time.as_secs(),
        machine.cores,
        machine.cpu,
        machine.memory_mib.div_ceil(1024),
        machine.kernel,
    )
}
