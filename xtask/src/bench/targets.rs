//! What the benchmark must show, and how it is computed from samples.

use super::results::{Figure, Ratio, Sample, median, quartiles};
use super::server::Kind;
use super::table::thousands;

#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// Who, at which chain length.
type Side = (Kind, u32);

#[derive(Clone, Copy, Debug)]
enum Measure {
    /// Paired ratio of two sides.
    Over(Side, Side),
    /// The value itself.
    Plain(Side),
    /// What each layer adds, in KiB: the value's growth from 1 layer to this length.
    PerLayerKib(u32),
}

struct Target {
    figure: Figure,
    measure: Measure,
    bound: Bound,
}

const fn target(figure: Figure, measure: Measure, bound: Bound) -> Target {
    Target { figure, measure, bound }
}

const FLOOR: Side = (Kind::Floor, 0);
const QEMU: Side = (Kind::Qemu, 1);
const ONE: Side = (Kind::Vmstrata, 1);
const FIVE_HUNDRED: Side = (Kind::Vmstrata, 500);
const THOUSAND: Side = (Kind::Vmstrata, 1000);

const TARGETS: [Target; 15] = {
    use Bound::{AtLeast, AtMost};
    use Figure::*;
    use Measure::{Over, PerLayerKib, Plain};
    [
        target(RandomRead32, Over(THOUSAND, ONE), AtLeast(0.95)),
        target(RandomRead32, Over(ONE, QEMU), AtLeast(4.0)),
        target(RandomRead32, Over(ONE, FLOOR), AtLeast(0.8)),
        target(RandomRead1, Over(ONE, QEMU), AtLeast(2.0)),
        target(Sequential, Over(FIVE_HUNDRED, FLOOR), AtLeast(0.9)),
        target(NbdRandomRead16, Over(ONE, QEMU), AtLeast(2.0)),
        target(NbdRandomRead16, Over(FIVE_HUNDRED, ONE), AtLeast(0.95)),
        target(NbdCopy, Over(FIVE_HUNDRED, ONE), AtMost(1.1)),
        target(Overwrite, Over(ONE, QEMU), AtLeast(2.0)),
        target(FirstWrite, Over(ONE, QEMU), AtLeast(2.0)),
        target(FirstWrite, Over(FIVE_HUNDRED, ONE), AtLeast(0.95)),
        target(Memory, Plain(THOUSAND), AtMost(32.0)),
        target(Memory, PerLayerKib(1000), AtMost(1.0)),
        target(Open, Plain(THOUSAND), AtMost(1.0)),
        target(Boot, Over(THOUSAND, ONE), AtMost(1.05)),
    ]
};

/// The targets whose samples are there, in the order of the list.
pub fn ratios(samples: &[Sample]) -> Vec<Ratio> {
    TARGETS.iter().filter_map(|target| target.judge(samples)).collect()
}

impl Target {
    fn judge(&self, samples: &[Sample]) -> Option<Ratio> {
        let values = self.values(samples);
        if values.is_empty() {
            return None;
        }
        let value = median(&values);
        let (met, target) = match self.bound {
            Bound::AtLeast(bound) => (value >= bound, format!("at least {bound}{}", self.unit())),
            Bound::AtMost(bound) => (value <= bound, format!("at most {bound}{}", self.unit())),
        };
        Some(Ratio { name: self.name(), target, value, quartiles: quartiles(&values), met })
    }

    fn values(&self, samples: &[Sample]) -> Vec<f64> {
        let of = |(server, layers): Side| {
            let same = move |s: &&Sample| (s.figure, s.server, s.layers) == (self.figure, server, layers);
            samples.iter().filter(same)
        };
        match self.measure {
            Measure::Plain(side) => of(side).map(|sample| sample.value).collect(),
            Measure::Over(above, below) => {
                let pair = |sample: &Sample| {
                    let partner =
                        |other: &&Sample| (other.group, other.round) == (sample.group, sample.round);
                    Some(sample.value / of(below).find(partner)?.value)
                };
                of(above).filter_map(pair).collect()
            }
            Measure::PerLayerKib(layers) => {
                let all =
                    |layers| of((Kind::Vmstrata, layers)).map(|sample| sample.value).collect::<Vec<_>>();
                let (long, one) = (all(layers), all(1));
                if long.is_empty() || one.is_empty() {
                    return Vec::new();
                }
                vec![(median(&long) - median(&one)) * 1024.0 / f64::from(layers - 1)]
            }
        }
    }

    fn unit(&self) -> String {
        match self.measure {
            Measure::Over(..) => String::new(),
            Measure::Plain(_) => format!(" {}", self.figure.unit()),
            Measure::PerLayerKib(_) => " KiB".into(),
        }
    }

    fn name(&self) -> String {
        let side = |(server, layers): Side| match layers {
            0 => server.label().to_owned(),
            1 => format!("{}, 1 layer", server.label()),
            many => format!("{}, {} layers", server.label(), thousands(f64::from(many))),
        };
        let what = self.figure.label();
        match self.measure {
            Measure::Over(above, below) => format!("{what}: {} / {}", side(above), side(below)),
            Measure::Plain(of) => format!("{what}: {}", side(of)),
            Measure::PerLayerKib(layers) => {
                format!("{what}: added by each of {} layers", thousands(f64::from(layers)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(figure: Figure, (server, layers): Side, group: u32, round: u32, value: f64) -> Sample {
        Sample { figure, server, layers, group, round, value }
    }

    #[test]
    fn ratios_pair_samples_of_one_group_and_round_only() {
        let figure = Figure::RandomRead32;
        let samples = [
            sample(figure, ONE, 1, 0, 400.0),
            sample(figure, QEMU, 1, 0, 100.0),
            sample(figure, ONE, 1, 1, 600.0),
            sample(figure, QEMU, 1, 1, 100.0),
            sample(figure, ONE, 50, 0, 1.0),
        ];
        let ratios = ratios(&samples);
        assert_eq!(ratios.len(), 1, "{ratios:?}");
        assert_eq!((ratios[0].value, ratios[0].quartiles, ratios[0].met), (5.0, (4.5, 5.5), true));
    }

    #[test]
    fn a_missed_bound_is_said() {
        let samples = [sample(Figure::Open, THOUSAND, 1000, 0, 1.5)];
        let ratios = ratios(&samples);
        assert_eq!((ratios[0].target.as_str(), ratios[0].met), ("at most 1 s", false));
    }

    #[test]
    fn memory_per_layer_is_the_growth() {
        let samples = [
            sample(Figure::Memory, ONE, 1, 0, 10.0),
            sample(Figure::Memory, THOUSAND, 1000, 0, 10.0 + 999.0 / 1024.0),
        ];
        let ratios = ratios(&samples);
        let per_layer = ratios.iter().find(|ratio| ratio.target.ends_with("KiB")).unwrap();
        assert!((per_layer.value - 1.0).abs() < 1e-9 && per_layer.met, "{per_layer:?}");
    }
}
