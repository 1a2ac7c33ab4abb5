//! Limits of a disk's requests, in the words of the API and of the engine.

use vmstrata_api as api;
use vmstrata_disk::{Limit, LimitError, Limits};

use super::SpecError;

/// The engine's limits.
///
/// # Errors
/// Numbers that are no limit.
pub(crate) fn limits_of(asked: &api::DiskLimits) -> Result<Limits, SpecError> {
    let limit = |what, asked: Option<api::Limit>| {
        let read = |api::Limit { rate, max, max_length }| Limit::new(rate, max, max_length);
        let refused = |error: LimitError| SpecError::Limit { what, error };
        asked.map(read).transpose().map_err(refused)
    };
    Ok(Limits {
        iops_total: limit("iops-total", asked.iops_total)?,
        iops_read: limit("iops-read", asked.iops_read)?,
        iops_write: limit("iops-write", asked.iops_write)?,
        bps_total: limit("bps-total", asked.bps_total)?,
        bps_read: limit("bps-read", asked.bps_read)?,
        bps_write: limit("bps-write", asked.bps_write)?,
    })
}

/// The same as the API says it.
pub(crate) fn shown_limits(limits: Limits) -> api::DiskLimits {
    let limit = |limit: Option<Limit>| {
        let (rate, max, max_length) = limit?.parts();
        Some(api::Limit { rate, max, max_length })
    };
    api::DiskLimits {
        iops_total: limit(limits.iops_total),
        iops_read: limit(limits.iops_read),
        iops_write: limit(limits.iops_write),
        bps_total: limit(limits.bps_total),
        bps_read: limit(limits.bps_read),
        bps_write: limit(limits.bps_write),
    }
}
