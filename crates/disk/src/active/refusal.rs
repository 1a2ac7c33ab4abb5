//! Keeping clusters from becoming partial.

use std::sync::Arc;

use super::Active;

/// Until this is dropped, no cluster becomes partial.
#[derive(Debug)]
pub(crate) struct Refusal(Arc<Active>);

impl Refusal {
    pub(crate) fn of(active: &Arc<Active>) -> Self {
        active.changes.refuse_partials(1);
        Self(Arc::clone(active))
    }
}

impl Drop for Refusal {
    fn drop(&mut self) {
        self.0.changes.refuse_partials(-1);
    }
}
