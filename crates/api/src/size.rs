//! Another size for a served disk.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::is_default;

/// The size that a disk is to have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeSpec {
    /// Bytes, rounded up to whole sectors of 512.
    #[schema(minimum = 1)]
    pub size_bytes: u64,
    /// Whether it may be less than now: what is past the new end is lost.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shrink: bool,
}

/// A disk whose size was asked for, as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SizeChange {
    /// The disk.
    pub disk: String,
    /// Bytes before.
    pub from_bytes: u64,
    /// Bytes now.
    pub size_bytes: u64,
    /// For how long writes were held; reads were not.
    pub pause_us: u64,
    /// Guests that were told. Others see the size when they look at their device next, or start anew.
    pub guests_told: u64,
    /// NBD clients that are connected: NBD cannot tell them, so they see the size when they connect again.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nbd_clients: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_field_does_not_cut_a_disk() {
        let spec: SizeSpec = serde_json::from_str(r#"{"size_bytes":512}"#).unwrap();
        assert_eq!((spec.size_bytes, spec.shrink), (512, false));
        serde_json::from_str::<SizeSpec>(r#"{"size_bytes":512,"Shrink":true}"#).unwrap_err();
        serde_json::from_str::<SizeSpec>("{}").unwrap_err();
    }
}
