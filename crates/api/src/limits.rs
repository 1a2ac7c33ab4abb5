//! How much a disk's guests may do in a second, and what a host's disks share.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Limits of a disk, which hold at once; those that are left out do not. Requests over them wait, reads and writes apart. Discards
/// and writes of zeros move no bytes and count as operations only; flushes count as nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskLimits {
    /// Reads and writes together.
    #[serde(alias = "iops-total", default, skip_serializing_if = "Option::is_none")]
    pub iops_total: Option<Limit>,
    /// Reads.
    #[serde(alias = "iops-read", default, skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<Limit>,
    /// Writes.
    #[serde(alias = "iops-write", default, skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<Limit>,
    /// Bytes read and written together.
    #[serde(alias = "bps-total", default, skip_serializing_if = "Option::is_none")]
    pub bps_total: Option<Limit>,
    /// Bytes read.
    #[serde(alias = "bps-read", default, skip_serializing_if = "Option::is_none")]
    pub bps_read: Option<Limit>,
    /// Bytes written.
    #[serde(alias = "bps-write", default, skip_serializing_if = "Option::is_none")]
    pub bps_write: Option<Limit>,
}

/// How fast all tiered disks of a server together ship what they publish, or all its moves together write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostRate {
    /// Bytes a second; without limit if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 65_536, maximum = 1_000_000_000_000_000_u64)]
    pub bytes_a_second: Option<u64>,
}

/// A limit, and the burst that it allows after a while with less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Operations or bytes a second.
    #[schema(minimum = 1, maximum = 1_000_000_000_000_000_u64)]
    pub rate: u64,
    /// How much a second in a burst; a tenth of a second's worth at once if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000_000_000_u64)]
    pub max: Option<u64>,
    /// How many seconds a burst lasts; 1 if omitted.
    #[serde(alias = "max-length", default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400)]
    pub max_length: Option<u64>,
}

impl DiskLimits {
    /// The limits by the names that options have for them.
    pub fn by_option(&mut self) -> [(&'static str, &mut Option<Limit>); 6] {
        [
            ("iops-total", &mut self.iops_total),
            ("iops-read", &mut self.iops_read),
            ("iops-write", &mut self.iops_write),
            ("bps-total", &mut self.bps_total),
            ("bps-read", &mut self.bps_read),
            ("bps-write", &mut self.bps_write),
        ]
    }
}

impl std::fmt::Display for DiskLimits {
    /// As options; nothing without limits.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (mut limits, mut between) = (*self, "");
        for (name, limit) in limits.by_option() {
            let Some(Limit { rate, max, max_length }) = limit else { continue };
            write!(f, "{between}{name}={rate}")?;
            max.map_or(Ok(()), |max| write!(f, ",{name}-max={max}"))?;
            max_length.map_or(Ok(()), |length| write!(f, ",{name}-max-length={length}"))?;
            between = ",";
        }
        Ok(())
    }
}
