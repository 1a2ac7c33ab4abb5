//! When layers were made, as far as anything tells.
//!
//! | source | tells | goes wrong when |
//! |---|---|---|
//! | the overlay's own record of the snapshot | when the overlay was made | vmstrata did not take it, or clocks were wrong |
//! | birth of the file, where it is not later than its last change | when the overlay was made | never, on the file system where it was made |
//! | last change of the layer below | when that layer was written last, so not after the snapshot | the layer was written to later, or copied without its times |
//!
//! A file copied with its times (`cp -p`, `rsync -t`) is born after its last change: its birth tells nothing, while the
//! last changes stay right.

use std::time::Duration;

use serde::Serialize;

use crate::human;
use crate::image::Image;

/// A layer may change this much later than its overlay was made: taking a snapshot of a running disk, the overlay is
/// made first, and what is still under way goes to the layer below it.
const GRACE: Duration = Duration::from_secs(60);

/// Where a time comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeSource {
    /// Written into the overlay when the snapshot was taken.
    Metadata,
    /// The file system's birth time of the overlay.
    Birth,
    /// The last change of the layer below.
    Change,
}

/// When `image` was made, on `below` if it stands on anything.
pub(crate) fn made(image: &Image, below: Option<&Image>) -> Option<(i64, TimeSource)> {
    let born = image.born_ns.filter(|born| *born <= image.mtime_ns);
    taken(image)
        .map(|taken| (taken, TimeSource::Metadata))
        .or_else(|| born.map(|born| (born, TimeSource::Birth)))
        .or_else(|| below.map(|below| (below.mtime_ns, TimeSource::Change)))
}

/// When the snapshot was taken that made `image`, if it says so.
fn taken(image: &Image) -> Option<i64> {
    image.qcow2.as_ref()?.snapshot.as_ref().map(|(_, taken)| *taken)
}

/// Says so if `layer` was changed after `overlay` was made on it.
///
/// An overlay whose making is not known was at least there when it was changed last. Its own record is asked only where
/// the file was copied with its times: copied without, every layer would seem changed.
pub(crate) fn changed_since(layer: &Image, overlay: &Image) -> Option<String> {
    let made = match overlay.born_ns {
        Some(born) if born <= overlay.mtime_ns => born,
        _ => taken(overlay).map_or(overlay.mtime_ns, |taken| taken.min(overlay.mtime_ns)),
    };
    let late_ns = layer.mtime_ns.checked_sub(made).and_then(|late| u64::try_from(late).ok())?;
    let late = Duration::from_nanos(late_ns);
    (late > GRACE).then(|| {
        format!(
            "{}: may have changed {} after its overlay {} was made",
            layer.path.display(),
            human::duration(late.as_secs_f64()),
            overlay.path.display()
        )
    })
}

/// Upper ends of the windows that times between snapshots are sorted into, in seconds, with their names.
pub(crate) const WINDOWS: [(f64, &str); 8] = [
    (60.0, "under a minute"),
    (3600.0, "under an hour"),
    (6.0 * 3600.0, "under 6 hours"),
    (86_400.0, "under a day"),
    (7.0 * 86_400.0, "under a week"),
    (30.0 * 86_400.0, "under a month"),
    (365.0 * 86_400.0, "under a year"),
    (f64::INFINITY, "a year and more"),
];

/// The window that this many seconds fall into.
pub(crate) fn window(seconds: f64) -> usize {
    WINDOWS.iter().position(|(end, _)| seconds < *end).unwrap_or(WINDOWS.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::raw_image;

    const HOUR: i64 = 3_600_000_000_000;

    fn image(name: &str, born: Option<i64>, mtime: i64) -> Image {
        Image { born_ns: born, mtime_ns: mtime, ..raw_image(name) }
    }

    #[test]
    fn birth_tells_when_an_overlay_was_made_unless_the_file_was_copied() {
        let below = image("b", None, 5 * HOUR);
        assert_eq!(
            made(&image("a", Some(6 * HOUR), 9 * HOUR), Some(&below)),
            Some((6 * HOUR, TimeSource::Birth))
        );
        assert_eq!(
            made(&image("a", Some(10 * HOUR), 9 * HOUR), Some(&below)),
            Some((5 * HOUR, TimeSource::Change))
        );
        assert_eq!(made(&image("a", Some(10 * HOUR), 9 * HOUR), None), None);
    }

    #[test]
    fn a_layer_changed_after_its_overlay_was_made_is_told() {
        let overlay = image("top", Some(6 * HOUR), 9 * HOUR);
        let told = changed_since(&image("base", None, 8 * HOUR), &overlay).unwrap();
        assert!(told.contains("base") && told.contains("2.0 h") && told.contains("top"), "{told}");
        assert_eq!(changed_since(&image("base", None, 5 * HOUR), &overlay), None);
        assert_eq!(
            changed_since(&image("base", None, 6 * HOUR + HOUR / 120), &overlay),
            None,
            "within the grace"
        );
    }

    #[test]
    fn a_chain_copied_with_its_times_is_not_suspected() {
        let overlay = image("top", Some(100 * HOUR), 9 * HOUR);
        assert_eq!(changed_since(&image("base", Some(99 * HOUR), 8 * HOUR), &overlay), None);
        assert!(changed_since(&image("base", Some(99 * HOUR), 11 * HOUR), &overlay).is_some());
    }

    #[test]
    fn the_images_own_record_is_believed_first() {
        let mut overlay = crate::image::tests::qcow2_image("top", Some("base"));
        overlay.qcow2.as_mut().unwrap().snapshot = Some(("monday".into(), 4 * HOUR));
        (overlay.born_ns, overlay.mtime_ns) = (Some(6 * HOUR), 9 * HOUR);
        let below = image("base", None, 5 * HOUR);
        assert_eq!(made(&overlay, Some(&below)), Some((4 * HOUR, TimeSource::Metadata)));
        assert_eq!(changed_since(&below, &overlay), None, "born here: the file system knows better");
        overlay.born_ns = Some(10 * HOUR);
        assert!(changed_since(&below, &overlay).is_some(), "copied with its times");
    }

    #[test]
    fn windows_cover_every_time_once() {
        assert_eq!(window(0.0), 0);
        assert_eq!(window(60.0), 1);
        assert_eq!(window(86_399.0), 3);
        assert_eq!(window(1e12), WINDOWS.len() - 1);
    }
}
