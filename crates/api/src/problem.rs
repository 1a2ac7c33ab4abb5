//! Errors, as RFC 9457 has them.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The media type of a problem.
pub const PROBLEM_TYPE: &str = "application/problem+json";

/// Why a request was not carried out (RFC 9457).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// `vmstrata:` and the kind: the same for every problem of the kind.
    #[serde(rename = "type")]
    #[schema(example = "vmstrata:no-such-disk")]
    pub type_uri: String,
    /// The kind in a few words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened this time.
    pub detail: String,
    /// The kind, for programs.
    #[schema(example = "no-such-disk")]
    pub kind: String,
    /// The file it happened in, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The layer it happened in, counted from the base, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u16>,
    /// The byte of the file it happened at, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

impl Problem {
    /// A problem of `kind` (lower case, words joined by hyphens, as in `no-such-disk`).
    pub fn new(status: u16, kind: &str, detail: impl Into<String>) -> Self {
        Self {
            type_uri: format!("vmstrata:{kind}"),
            title: kind.replace('-', " "),
            status,
            detail: detail.into(),
            kind: kind.to_owned(),
            ..Self::default()
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_the_fields_of_the_standard_and_leaves_out_what_is_not_known() {
        let json = serde_json::to_value(Problem::new(404, "no-such-disk", "no disk 'web'")).unwrap();
        let expected = serde_json::json!({
            "type": "vmstrata:no-such-disk", "title": "no such disk", "status": 404,
            "detail": "no disk 'web'", "kind": "no-such-disk",
        });
        assert_eq!(json, expected);
    }
}
