//! Everything a reader needs to judge a measurement and to repeat it: machine, versions, commands, parameters.

use std::path::Path;
use std::time::Duration;

use super::results::{Results, cells};
use super::run::{CLUSTER, FILL, Options};
use super::server::{self, Disk, Kind};
use super::{machine, results::Sample, targets};

/// The results file for `samples`.
pub fn results(options: &Options, samples: Vec<Sample>) -> Results {
    Results {
        date: machine::today(),
        machine: machine::machine(),
        versions: named([
            ("qemu", machine::version("qemu-storage-daemon")),
            ("vmstrata", machine::version(&server::vmstrata().display().to_string())),
            ("fio", machine::version("fio")),
            ("libnbd", machine::version("nbdcopy")),
        ]),
        commands: commands(),
        parameters: parameters(options),
        cells: cells(&samples),
        ratios: targets::ratios(&samples),
        samples,
    }
}

fn named<const N: usize>(pairs: [(&str, String); N]) -> Vec<(String, String)> {
    pairs.map(|(name, value)| (name.to_owned(), value)).into()
}

fn commands() -> Vec<(String, String)> {
    named([
        ("qemu", command_line(Kind::Qemu)),
        ("vmstrata", command_line(Kind::Vmstrata)),
        ("vhost-user client", "libblkio virtio-blk-vhost-user, one queue, interrupts".into()),
        ("floor client", "libblkio io_uring on a raw file through the page cache".into()),
        ("nbd client", "fio --ioengine=nbd --rw=randread --bs=4k --iodepth=16".into()),
        ("copy", "nbdcopy URI null:".into()),
        ("all of it", "cargo xtask bench chain".into()),
    ])
}

fn command_line(kind: Kind) -> String {
    let disk = Disk { path: "DISK".into(), writable: false, backing: None };
    let command = server::command(kind, &disk, Path::new("DIR"));
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
    let words = std::iter::once(program.as_os_str()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    named([
        ("disk", format!("{} MiB", options.size >> 20)),
        ("fill", FILL.to_string()),
        ("cluster", format!("{} KiB", CLUSTER >> 10)),
        ("rounds", options.rounds.to_string()),
        ("timed run", seconds(options.timing.run)),
        ("warm-up", seconds(options.timing.warm_up)),
    ])
}
