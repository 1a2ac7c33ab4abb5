//! What endangers a chain, and how badly.

use serde::Serialize;

/// How bad a risk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The chain may serve wrong data, or will stop working when something else happens.
    Suspect,
    /// The chain cannot be opened, or not be read in full.
    Broken,
}

/// What endangers a chain, worst first; a chain with one of those up to `Unsupported` cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RiskKind {
    /// A backing file that is not there.
    Missing,
    /// A chain that leads back into itself.
    Loop,
    /// A file that cannot be opened or read, or is none.
    Unreadable,
    /// A header or a table that breaks the format or leads past the end of a file that was cut short, or a file that is not
    /// what its name or its overlay says.
    Corrupt,
    /// A backing file outside the directories allowed.
    Outside,
    /// More layers than can be opened.
    TooLong,
    /// A feature, format or protocol that cannot be followed.
    Unsupported,
    /// An image that its last writer marked corrupt.
    MarkedCorrupt,
    /// An image that was not closed: refcounts to be rebuilt, or a journal to be taken up.
    Unclean,
    /// A snapshot whose deleting was begun and not completed: it cannot be used, and takes room.
    HalfDeleted,
    /// A layer that may have been written to after its overlay was made.
    Changed,
    /// A layer that a process has open for writing while overlays stand on it.
    Written,
    /// More layers than the operator calls many.
    Long,
}

impl RiskKind {
    /// All kinds, worst first.
    pub const ALL: [Self; 13] = [
        Self::Missing,
        Self::Loop,
        Self::Unreadable,
        Self::Corrupt,
        Self::Outside,
        Self::TooLong,
        Self::Unsupported,
        Self::MarkedCorrupt,
        Self::Unclean,
        Self::HalfDeleted,
        Self::Changed,
        Self::Written,
        Self::Long,
    ];

    /// How bad it is.
    pub fn severity(self) -> Severity {
        if self <= Self::Unsupported { Severity::Broken } else { Severity::Suspect }
    }

    /// Its name in JSON, on the page and on the terminal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Loop => "loop",
            Self::Unreadable => "unreadable",
            Self::Corrupt => "corrupt",
            Self::Outside => "outside",
            Self::TooLong => "too-long",
            Self::Unsupported => "unsupported",
            Self::MarkedCorrupt => "marked-corrupt",
            Self::Unclean => "unclean",
            Self::HalfDeleted => "half-deleted",
            Self::Changed => "changed",
            Self::Written => "written",
            Self::Long => "long",
        }
    }
}

/// A set of kinds, as small as a number: every layer of every chain has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RiskSet(u16);

impl RiskSet {
    pub(crate) fn add(&mut self, kind: RiskKind) {
        self.0 |= 1 << kind as u16;
    }

    pub(crate) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn kinds(self) -> impl Iterator<Item = RiskKind> {
        RiskKind::ALL.into_iter().filter(move |kind| self.0 >> *kind as u16 & 1 == 1)
    }

    /// The worst in it; `None` when it is empty.
    pub(crate) fn severity(self) -> Option<Severity> {
        self.kinds().map(RiskKind::severity).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_every_kind_by_itself_and_knows_the_worst() {
        let mut set = RiskSet::default();
        assert_eq!(set.severity(), None);
        for kind in RiskKind::ALL.into_iter().rev() {
            set.add(kind);
            assert_eq!(set.severity(), Some(kind.severity()));
        }
        assert_eq!(set.kinds().collect::<Vec<_>>(), RiskKind::ALL);
    }

    #[test]
    fn the_name_is_the_one_in_json() {
        for kind in RiskKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
