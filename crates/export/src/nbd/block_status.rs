//! Extents of the disk as a block status reply tells them: merged for each context, then encoded.
//!
//! A run of guest bytes on one layer is what the engine knows; a context sees less of it, so that many runs
//! become one extent of `base:allocation`. Replies end after a bounded number of runs: clients ask again.

use vmstrata_disk::{Disk, Error, Extent, ExtentKind};
use vmstrata_types::GuestRange;

use super::contexts::{Context, STATE_HOLE, STATE_ZERO};
use super::diff_base::Base;
use super::limits::{MAX_EXTENTS, MAX_STATUS_CLUSTERS};
use super::protocol::reply::Style;

/// The runs at the front of `range`, as many as one reply looks at; they follow one another without gaps.
///
/// # Errors
/// When the engine cannot read its metadata.
pub(crate) fn look_up(disk: &Disk, range: GuestRange) -> Result<Vec<Extent>, Error> {
    let limit = MAX_STATUS_CLUSTERS.saturating_mul(disk.cluster_bits().size());
    disk.extents(GuestRange::new(range.start, range.len.min(limit)), MAX_EXTENTS)
}

/// The status in `vmstrata:layer` of what no layer has.
const NO_LAYER: u32 = u32::MAX;

/// A context, with what it needs to know of the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum View {
    /// `base:allocation`.
    Allocation,
    /// `vmstrata:layer`.
    Layer,
    /// `vmstrata:diff:`, since this layer.
    Since(Base),
}

/// The status of a run in a context.
pub(crate) fn status(extent: &Extent, view: View) -> u32 {
    match view {
        View::Allocation => match extent.kind {
            ExtentKind::Data | ExtentKind::Compressed => 0,
            ExtentKind::Zero | ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
        },
        View::Layer => match (extent.kind, extent.layer) {
            (ExtentKind::Hole, _) | (_, None) => NO_LAYER,
            (_, Some(layer)) => layer.get().into(),
        },
        View::Since(base) => base.status(extent),
    }
}

/// Payload of the reply chunk of one context: all of `runs`, or only the first extent.
///
/// # Panics
/// Without runs.
pub(crate) fn encode(
    runs: &[Extent],
    context: Context,
    view: View,
    style: Style,
    only_first: bool,
) -> Vec<u8> {
    assert!(!runs.is_empty(), "a reply has at least one extent");
    let mut extents: Vec<(u64, u32)> = Vec::new();
    for run in runs {
        let status = status(run, view);
        match extents.last_mut() {
            Some((len, last)) if *last == status => *len += run.range.len,
            Some(_) if only_first => break,
            _ => extents.push((run.range.len, status)),
        }
    }
    let mut payload = Vec::with_capacity(8 + extents.len() * 16);
    payload.extend(context.id().to_be_bytes());
    if style.is_extended() {
        payload.extend((extents.len() as u32).to_be_bytes());
    }
    for (len, status) in extents {
        if style.is_extended() {
            payload.extend(len.to_be_bytes());
            payload.extend(u64::from(status).to_be_bytes());
        } else {
            // Compact requests are shorter than 4 GiB, and runs end with their request.
            payload.extend(u32::try_from(len).expect("runs inside a 32-bit request").to_be_bytes());
            payload.extend(status.to_be_bytes());
        }
    }
    payload
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmstrata_types::{GuestOffset, LayerIndex};

    fn runs() -> Vec<Extent> {
        let run = |start, len, kind, layer: Option<u16>| Extent {
            range: GuestRange::new(GuestOffset::new(start), len),
            kind,
            layer: layer.map(LayerIndex::new),
            host: None,
        };
        vec![
            run(0, 10, ExtentKind::Data, Some(0)),
            run(10, 20, ExtentKind::Compressed, Some(3)),
            run(30, 40, ExtentKind::Zero, Some(3)),
            run(70, 5, ExtentKind::Hole, None),
        ]
    }

    fn compact(view: View, only_first: bool) -> Vec<u32> {
        let context = if matches!(view, View::Layer) { Context::Layer } else { Context::Allocation };
        let payload = encode(&runs(), context, view, Style::Structured, only_first);
        payload.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word)).collect()
    }

    #[test]
    fn allocation_merges_across_layers() {
        assert_eq!(compact(View::Allocation, false), [1, 30, 0, 45, 3]);
    }

    #[test]
    fn layers_are_counted_from_zero_at_the_base() {
        assert_eq!(compact(View::Layer, false), [2, 10, 0, 60, 3, 5, NO_LAYER]);
    }

    #[test]
    fn one_extent_is_as_long_as_its_context_allows() {
        assert_eq!(compact(View::Allocation, true), [1, 30, 0]);
        assert_eq!(compact(View::Layer, true), [2, 10, 0]);
    }

    #[test]
    fn extended_extents_have_a_count_and_64_bits() {
        let mut long = runs();
        long.truncate(1);
        long[0].range.len = 1 << 40;
        let payload = encode(&long, Context::Layer, View::Layer, Style::Extended, false);
        let expected = [&2u32.to_be_bytes()[..], &1u32.to_be_bytes(), &(1u64 << 40).to_be_bytes()].concat();
        assert_eq!(payload[..16], expected);
        assert_eq!(payload[16..], 0u64.to_be_bytes());
    }
}
