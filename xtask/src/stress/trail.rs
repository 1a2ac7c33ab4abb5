//! The last requests and answers, so that an error can be told with what happened to its sectors.

use std::collections::{HashSet, VecDeque};
use std::fmt::{self, Write as _};

use super::model::{Change, Journal};
use super::stamp::Value;
use super::view::Sectors;

/// Events kept.
const KEPT: usize = 300_000;

/// One event. `id` and `at` are points in the order of events; the id of a write is the value that it wrote.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Begun {
        id: u64,
        change: Change,
        range: Sectors,
    },
    Done {
        id: u64,
        is_stable: bool,
    },
    Doubtful {
        id: u64,
    },
    Flushed {
        asked: u64,
    },
    Settled {
        at: u64,
        sector: u64,
        value: Value,
    },
    Killed {
        at: u64,
        journal: Journal,
    },
    Resized {
        at: u64,
        sectors: u64,
    },
    /// Something else that was done to the disk or to its surroundings.
    Note(String),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begun { id, change, range } => {
                write!(f, "{id} {change:?} of sectors {} to {}", range.start, range.end() - 1)
            }
            Self::Done { id, is_stable } => {
                write!(f, "{id} done{}", if *is_stable { ", stable" } else { "" })
            }
            Self::Doubtful { id } => write!(f, "{id} failed, or lost"),
            Self::Flushed { asked } => write!(f, "flush that began at {asked} done"),
            Self::Settled { at, sector, value } => write!(f, "sector {sector} was read at {at}: {value}"),
            Self::Killed { at, journal } => write!(f, "killed at {at}, journal {journal:?}"),
            Self::Resized { at, sectors } => write!(f, "{sectors} sectors from {at} on"),
            Self::Note(text) => f.write_str(text),
        }
    }
}

/// The last events, oldest first.
#[derive(Debug, Default)]
pub(super) struct Trail(VecDeque<Event>);

impl Trail {
    pub(super) fn push(&mut self, event: Event) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    /// The events that touch `range`, and all that touch the whole disk, as text.
    pub(super) fn of(&self, range: Sectors) -> String {
        let mut ids = HashSet::new();
        let mut text = String::new();
        let mut flush = None;
        for event in &self.0 {
            let concerns = match event {
                Event::Begun { id, range: other, .. } => other.overlaps(range) && ids.insert(*id),
                Event::Done { id, .. } | Event::Doubtful { id } => ids.contains(id),
                Event::Settled { sector, .. } => range.has(*sector),
                // They are many: only the last of several in a row is told.
                Event::Flushed { .. } => {
                    flush = Some(event);
                    false
                }
                _ => true,
            };
            if concerns {
                for event in flush.take().into_iter().chain([event]) {
                    let _ = writeln!(text, "{event}");
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trail_tells_what_happened_to_a_range() {
        let mut trail = Trail::default();
        for id in 0..3 {
            trail.push(Event::Begun { id, change: Change::Write, range: Sectors::new(id * 8, 8) });
            trail.push(Event::Done { id, is_stable: false });
            trail.push(Event::Flushed { asked: id });
        }
        let told = trail.of(Sectors::new(9, 1));
        assert!(told.contains("1 Write") && !told.contains("0 Write") && !told.contains("2 Write"), "{told}");
    }
}
