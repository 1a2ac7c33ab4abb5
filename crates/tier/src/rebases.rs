//! What an engine knows of the rebase of its disk that is under way, and of those that have ended: see [`Rebasing`](crate::Rebasing).

use crate::head::{EpochNumber, Object, ObjectId};
use crate::pin::Pin;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Rebases {
    under_way: Option<UnderWay>,
    ended: Vec<Ended>,
}

#[derive(Debug)]
struct UnderWay {
    /// The epoch as which the draft reads.
    number: EpochNumber,
    /// Layers that the repository had of the disk when that epoch was published, if it is.
    layers: Option<usize>,
    stage: Stage,
}

/// How far a rebase has come.
#[derive(Debug)]
pub(crate) enum Stage {
    /// The draft is made, compared and shipped.
    Drafting,
    /// It is shipped, as the last of these.
    Drafted(Vec<Object>),
    /// What was published since the cut is merged onto it.
    Merging,
    /// A head names it. This host's copy still uses the old version.
    Published,
    Done,
    Failed(String),
}

/// A draft that is shipped.
#[derive(Debug)]
pub(crate) struct Drafted {
    pub(crate) number: EpochNumber,
    pub(crate) layers: Option<usize>,
    pub(crate) objects: Vec<Object>,
}

/// What a rebase holds in the repository that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) pin: Pin,
    /// Layers that no head names, unless it was published.
    pub(crate) objects: Vec<ObjectId>,
    /// Whether a merge onto its draft may be under way.
    pub(crate) may_be_merged: bool,
    /// Whether the repository did not take its pin away.
    pub(crate) is_late: bool,
}

impl Rebases {
    /// One begins, of the disk as it is at an epoch that is not published.
    pub(crate) fn begin(&mut self, number: EpochNumber) {
        self.under_way = Some(UnderWay { number, layers: None, stage: Stage::Drafting });
    }

    /// It goes no further.
    pub(crate) fn end(&mut self, pin: Pin, objects: Vec<ObjectId>) {
        let ended = self.under_way.take();
        let may_be_merged =
            ended.is_some_and(|ended| matches!(ended.stage, Stage::Drafted(_) | Stage::Merging));
        self.ended.push(Ended { pin, objects, may_be_merged, is_late: false });
    }

    pub(crate) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// The next pass tries again to let go of it.
    pub(crate) fn put_back(&mut self, ended: Ended) {
        self.ended.push(Ended { may_be_merged: false, is_late: true, ..ended });
    }

    /// An epoch is published as a chain of so many layers.
    pub(crate) fn published(&mut self, number: EpochNumber, layers: usize) {
        if let Some(one) = self.under_way.as_mut().filter(|one| one.number == number) {
            one.layers = Some(layers);
        }
    }

    /// The draft that the engine has to publish, if there is one.
    pub(crate) fn drafted(&self) -> Option<Drafted> {
        let UnderWay { number, layers, stage } = self.under_way.as_ref()?;
        let Stage::Drafted(objects) = stage else { return None };
        Some(Drafted { number: *number, layers: *layers, objects: objects.clone() })
    }

    /// It has come so far, unless it has ended.
    pub(crate) fn advance(&mut self, to: Stage) {
        if let Some(one) = &mut self.under_way {
            one.stage = to;
        }
    }

    /// A pass of the engine has ended, in which merging failed for this reason.
    pub(crate) fn passed(&mut self, failure: Option<String>) {
        match (self.stage(), failure) {
            (Some(Stage::Published), _) => self.advance(Stage::Done),
            (Some(Stage::Merging), Some(why)) => self.advance(Stage::Failed(why)),
            _ => {}
        }
    }

    /// How far it has come, if one is under way.
    pub(crate) fn stage(&self) -> Option<&Stage> {
        self.under_way.as_ref().map(|one| &one.stage)
    }

    /// Whether the repository's layers must not be merged: the draft takes the place of those that are there.
    pub(crate) fn is_drafting(&self) -> bool {
        matches!(self.stage(), Some(Stage::Drafting | Stage::Drafted(_)))
    }

    /// Whether this host's copy has to keep the layers that it has, and its pins.
    pub(crate) fn keeps_layers(&self) -> bool {
        self.is_drafting() || matches!(self.stage(), Some(Stage::Merging))
    }

    /// Whether there is something to be done for the engine.
    pub(crate) fn is_waiting(&self) -> bool {
        let is_due = matches!(self.stage(), Some(Stage::Drafted(_) | Stage::Merging | Stage::Published));
        is_due || self.ended.iter().any(|ended| !ended.is_late)
    }
}
