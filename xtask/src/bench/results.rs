//! What a benchmark run leaves behind: samples, their medians, and ratios beside their targets.
//!
//! `docs/measurements/chain.json` is this structure; table and plot are functions of it alone.

use serde::{Deserialize, Serialize};

use super::server::Kind;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// vhost-user-blk, 4 KiB random reads, queue depth 32, one queue.
    RandomRead32,
    /// The same at queue depth 1.
    RandomRead1,
    /// vhost-user-blk, sequential 1 MiB reads, queue depth 4.
    Sequential,
    /// NBD over a unix socket, 4 KiB random reads, queue depth 16, one connection (fio).
    NbdRandomRead16,
    /// `nbdcopy` of the whole disk to nowhere.
    NbdCopy,
    /// `pread` of 4 KiB at random over the files of a chain, one thread: no server at all.
    FileRead,
    /// vhost-user-blk, 4 KiB random writes, queue depth 32, to clusters the active layer owns.
    Overwrite,
    /// vhost-user-blk, 4 KiB writes, queue depth 32, each to a cluster only a backing file holds.
    FirstWrite,
    /// Resident memory after everything was read.
    Memory,
    /// From starting the server to its first read answered.
    Open,
    /// A guest from power-on to its own init.
    Boot,
}

impl Figure {
    /// The unit of its values.
    pub const fn unit(self) -> &'static str {
        match self {
            Self::RandomRead32
            | Self::RandomRead1
            | Self::NbdRandomRead16
            | Self::FileRead
            | Self::Overwrite => "IOPS",
            Self::FirstWrite => "clusters/s",
            Self::Sequential => "MiB/s",
            Self::Memory => "MiB",
            Self::NbdCopy | Self::Open | Self::Boot => "s",
        }
    }

    /// What a table calls it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::RandomRead32 => "vhost-user 4 KiB random read, QD32",
            Self::RandomRead1 => "vhost-user 4 KiB random read, QD1",
            Self::Sequential => "vhost-user sequential 1 MiB read, QD4",
            Self::NbdRandomRead16 => "NBD 4 KiB random read, QD16",
            Self::NbdCopy => "`nbdcopy` of the whole disk",
            Self::FileRead => "4 KiB random `pread` of the chain's files",
            Self::Overwrite => "4 KiB random overwrite, QD32",
            Self::FirstWrite => "first writes (copy-on-write), QD32",
            Self::Memory => "resident memory, everything read",
            Self::Open => "open: start to first read",
            Self::Boot => "guest boot (software emulation)",
        }
    }
}

/// One measured value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// What was measured.
    pub figure: Figure,
    /// Who served.
    pub server: Kind,
    /// Length of the chain; 0 for the floor.
    pub layers: u32,
    /// Samples of one group and round were taken one after the other: only these make pairs.
    pub group: u32,
    /// Position in time within the group.
    pub round: u32,
    /// The value in [`Figure::unit`].
    pub value: f64,
}

/// All samples of one thing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// What was measured.
    pub figure: Figure,
    /// Who served.
    pub server: Kind,
    /// Length of the chain; 0 for the floor.
    pub layers: u32,
    /// The unit of the values.
    pub unit: String,
    /// Number of samples.
    pub samples: usize,
    /// The middle one.
    pub median: f64,
    /// What a quarter of them is below, and a quarter above.
    pub quartiles: (f64, f64),
}

/// A ratio (or a plain value) beside what it must be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// What is compared.
    pub name: String,
    /// The bound as text: `at least 4`, `at most 1 s`.
    pub target: String,
    /// The median over the pairs.
    pub value: f64,
    /// Quartiles over the pairs.
    pub quartiles: (f64, f64),
    /// Whether the value keeps the bound.
    pub met: bool,
}

/// The machine of the measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the processor.
    pub cpu: String,
    /// Number of processors.
    pub cores: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Kernel release.
    pub kernel: String,
}

impl Machine {
    /// A table's last words: where, beside the first of `versions`, when.
    pub(super) fn circumstances(&self, versions: &[(String, String)], date: &str) -> String {
        format!(
            "{} cores ({}), {} GiB, Linux {}; {}; {date}. Page cache warm.",
            self.cores,
            self.cpu,
            self.memory_mib.div_ceil(1024),
            self.kernel,
            versions.first().map_or("", |(_, version)| version),
        )
    }
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Day of the measurement, `YYYY-MM-DD`.
    pub date: String,
    /// Where.
    pub machine: Machine,
    /// Program and version of everything that took part.
    pub versions: Vec<(String, String)>,
    /// How each server was started and each figure taken.
    pub commands: Vec<(String, String)>,
    /// Disk size, fill, cluster size, rounds, seconds.
    pub parameters: Vec<(String, String)>,
    /// Medians, by figure, server, length.
    pub cells: Vec<Cell>,
    /// The targets.
    pub ratios: Vec<Ratio>,
    /// Every sample, in the order taken.
    pub samples: Vec<Sample>,
}

/// The value that `part` of the values are no larger than, such as 0.99; between two of them in proportion.
///
/// # Panics
/// When `values` is empty or holds a NaN.
pub fn quantile(values: &[f64], part: f64) -> f64 {
    assert!(!values.is_empty(), "nothing was measured");
    assert!(values.iter().all(|value| !value.is_nan()), "a NaN among samples");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len() - 1) as f64 * part;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    low + (high - low) * place.fract()
}

/// The middle value; the mean of the two middle ones for an even number.
///
/// # Panics
/// As [`quantile`].
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Values of one side, each divided by the other side's of the same round.
pub fn ratios(own: &[f64], peer: &[f64]) -> Vec<f64> {
    own.iter().zip(peer).map(|(own, peer)| own / peer).collect()
}

/// What a quarter of the values is below, and a quarter above.
///
/// # Panics
/// As [`quantile`].
pub fn quartiles(values: &[f64]) -> (f64, f64) {
    (quantile(values, 0.25), quantile(values, 0.75))
}

/// One cell per figure, server and chain length, sorted.
pub fn cells(samples: &[Sample]) -> Vec<Cell> {
    let mut keys: Vec<_> =
        samples.iter().map(|sample| (sample.figure, sample.server, sample.layers)).collect();
    keys.sort_unstable();
    keys.dedup();
    let cell = |(figure, server, layers): (Figure, Kind, u32)| {
        let same =
            |sample: &&Sample| (sample.figure, sample.server, sample.layers) == (figure, server, layers);
        let values: Vec<f64> = samples.iter().filter(same).map(|sample| sample.value).collect();
        let (unit, samples) = (figure.unit().to_owned(), values.len());
        let (median, quartiles) = (median(&values), quartiles(&values));
        Cell { figure, server, layers, unit, samples, median, quartiles }
    };
    keys.into_iter().map(cell).collect()
}

/// A made-up measurement with every kind of server, for tests of what is drawn from it.
#[cfg(test)]
pub(crate) fn example() -> Results {
    let reads = [(Kind::Qemu, 1, 168_000.0), (Kind::Qemu, 50, 26_000.0), (Kind::Qemu, 1000, 110.0)];
    let reads = reads.into_iter().chain([1, 50, 1000].map(|layers| (Kind::Vmstrata, layers, 640_000.0)));
    let reads = reads.chain([(Kind::Floor, 0, 720_000.0)]).map(|value| (Figure::RandomRead32, value));
    let memory = [(Kind::Qemu, 1, 18.0), (Kind::Qemu, 50, 36.0), (Kind::Qemu, 1000, 700.0)];
    let memory = memory.into_iter().chain([1, 50, 1000].map(|layers| (Kind::Vmstrata, layers, 8.5)));
    let all = reads.chain(memory.map(|value| (Figure::Memory, value)));
    let sample =
        |(figure, (server, layers, value))| Sample { figure, server, layers, group: layers, round: 0, value };
    let samples: Vec<_> = all.map(sample).collect();
    Results {
        date: "2026-01-01".into(),
        machine: Machine { cpu: "a CPU".into(), cores: 2, memory_mib: 24_000, kernel: "6.1.0".into() },
        versions: vec![("qemu".into(), "QEMU 7.2".into())],
        commands: Vec::new(),
        parameters: Vec::new(),
        cells: cells(&samples),
        ratios: super::targets::ratios(&samples),
        samples,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_survive_their_file() {
        let text = serde_json::to_string(&example()).unwrap();
        assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), example());
    }

    #[test]
    fn quantiles_lie_between_values_in_proportion() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(quartiles(&[5.0, 1.0, 2.0, 4.0, 3.0]), (2.0, 4.0));
        assert_eq!(quartiles(&[2.0]), (2.0, 2.0));
        let hundred: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!((quantile(&hundred, 0.99), quantile(&hundred, 1.0)), (99.0, 100.0));
    }

    #[test]
    fn cells_gather_samples_of_all_groups() {
        let sample = |layers, group, value| Sample {
            figure: Figure::RandomRead32,
            server: Kind::Vmstrata,
            layers,
            group,
            round: 0,
            value,
        };
        let cells = cells(&[sample(1, 1, 10.0), sample(50, 50, 30.0), sample(1, 50, 20.0)]);
        assert_eq!(cells.len(), 2);
        assert_eq!((cells[0].layers, cells[0].samples, cells[0].median), (1, 2, 15.0));
        assert_eq!(cells[0].quartiles, (12.5, 17.5));
    }
}
