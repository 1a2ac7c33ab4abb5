//! Traces of block devices, and the image that a guest with one of them has.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmstrata_migrate::follow::Kind;
use vmstrata_types::{GuestOffset, GuestRange};

use super::super::load::Request;

const SECTOR: u64 = 512;
/// Of which stretches are made: 1 MiB to all of a device.
const STRETCHES: std::ops::RangeInclusive<u32> = 20..=40;

/// Traces, by the names of their files.
pub(super) const TRACES: [(&str, &str); 3] = [
    ("WebSearch", "wsrch-small.trace"),
    ("Financial1", "spc_financial1_first9999.ssdsim.ascii"),
    ("TPC-C", "tpcc-small.trace"),
];

/// A trace, laid out on an image.
#[derive(Clone, Debug)]
pub(super) struct Trace {
    pub(super) name: &'static str,
    /// In the order of their times.
    pub(super) requests: Vec<Request>,
    /// After so long it begins anew.
    pub(super) period: Duration,
    /// Bytes of the image.
    pub(super) image: u64,
    /// The image has the stretches of this many bytes that the trace touches, packed.
    pub(super) stretch: u64,
    /// By how much its times are longer than the file's.
    pub(super) scale: f64,
}

impl Trace {
    /// Reads a file of lines `time_ns device sector sectors op`, where 1 reads: at most `requests` of it, on an image of at most `image_max` bytes.
    ///
    /// # Errors
    /// When the file cannot be read, or is no such file.
    pub(super) fn read(name: &'static str, path: &Path, (requests, image_max): (usize, u64)) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut lines = Vec::new();
        for (number, line) in text.lines().take(requests).enumerate() {
            let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
            let [at, device, sector, sectors, op] = fields[..] else {
                anyhow::bail!("{}:{}: no request: {line}", path.display(), number + 1);
            };
            // Some have requests of no bytes.
            if sectors > 0 {
                lines.push((at, (device, sector * SECTOR), sectors * SECTOR, op == 1));
            }
        }
        ensure!(lines.len() > 1, "{}: no requests", path.display());
        lines.sort_by_key(|line| line.0);
        let (first, last) = (lines[0].0, lines[lines.len() - 1].0);
        let touched = |bits: u32| -> BTreeMap<(u64, u64), u64> {
            let stretches = lines.iter().flat_map(|(_, (device, at), len, _)| {
                (at >> bits..=(at + len - 1) >> bits).map(|stretch| ((*device, stretch), 0))
            });
            let mut packed: BTreeMap<_, _> = stretches.collect();
            packed.values_mut().zip(0..).for_each(|(place, number)| *place = number << bits);
            packed
        };
        let fits = |bits: &u32| (touched(*bits).len() as u64) << bits <= image_max;
        let bits = STRETCHES.rev().find(fits).context("the trace touches too much")?;
        let packed = touched(bits);
        let stretch = 1_u64 << bits;
        let request = |&(at, (device, start), len, is_read): &(u64, (u64, u64), u64, bool)| {
            let place = packed[&(device, start >> bits)] + start % stretch;
            let range = GuestRange::new(GuestOffset::new(place), len);
            let kind = if is_read { Kind::Read } else { Kind::Write };
            Request { at: Duration::from_nanos(at - first), range, kind }
        };
        // The next one begins as long after the last request as requests are apart.
        let period = Duration::from_nanos((last - first) + (last - first) / (lines.len() as u64 - 1));
        let (requests, image) = (lines.iter().map(request).collect(), packed.len() as u64 * stretch);
        Ok(Self { name, requests, period, image, stretch, scale: 1.0 })
    }

    /// The same, `by` times slower.
    pub(super) fn slower(&self, by: f64) -> Self {
        let request = |request: &Request| Request { at: request.at.mul_f64(by), ..*request };
        let requests = self.requests.iter().map(request).collect();
        Self { requests, period: self.period.mul_f64(by), scale: self.scale * by, ..self.clone() }
    }

    /// When request `number` comes, of a trace that begins at its request `first` and comes again and again; and the request.
    pub(super) fn request(&self, first: usize, number: usize) -> (Duration, Request) {
        let (all, at) = (self.requests.len(), first + number);
        let request = self.requests[at % all];
        (self.period * (at / all) as u32 + request.at - self.requests[first].at, request)
    }
}
