//! The two text formats of metrics: which one a scraper prefers, and the older one made from OpenMetrics.

use std::collections::HashMap;

use axum::http::{HeaderMap, header};

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus's own, version 0.0.4: for every reader that does not ask for another.
    Prometheus,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

const OPEN_METRICS: &str = "application/openmetrics-text";

impl Format {
    /// OpenMetrics if `Accept` names it with a weight that nothing else exceeds.
    pub(super) fn preferred(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let (mut open_metrics, mut others) = (0.0_f32, 0.0_f32);
        for range in accepted.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok()).unwrap_or(1.0);
            let best = if name.eq_ignore_ascii_case(OPEN_METRICS) { &mut open_metrics } else { &mut others };
            *best = best.max(weight);
        }
        if open_metrics > 0.0 && open_metrics >= others { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// The content type.
    pub(super) fn media_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// `text`, which is OpenMetrics, in this format.
    pub(super) fn write(self, text: String) -> String {
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => to_prometheus(&text),
        }
    }
}

/// Names metrics after their samples: the older format knows no suffixes, no `info` and no end.
fn to_prometheus(text: &str) -> String {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let types: HashMap<&str, &str> = types.collect();
    let mut written = String::with_capacity(text.len());
    for line in text.lines().filter(|line| *line != "# EOF") {
        let described = ["# HELP ", "# TYPE "].iter().find_map(|key| Some((key, line.strip_prefix(key)?)));
        let Some((key, (name, rest))) = described.and_then(|(key, of)| Some((key, of.split_once(' ')?)))
        else {
            written.extend([line, "\n"]);
            continue;
        };
        let (suffix, kind) = match types.get(name) {
            Some(&"counter") => ("_total", "counter"),
            Some(&"info") => ("_info", "gauge"),
            kind => ("", *kind.unwrap_or(&"untyped")),
        };
        let rest = if *key == "# TYPE " { kind } else { rest };
        written.extend([key, name, suffix, " ", rest, "\n"]);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preferred(accept: &str) -> Format {
        Format::preferred(&HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]))
    }

    #[test]
    fn open_metrics_is_for_those_who_prefer_it() {
        assert_eq!(Format::preferred(&HeaderMap::new()), Format::Prometheus);
        for accept in [
            "*/*",
            "text/plain",
            "text/plain,application/openmetrics-text;q=0.5",
            "application/openmetrics-text;q=0",
        ] {
            assert_eq!(preferred(accept), Format::Prometheus, "{accept}");
        }
        let of_prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
                             text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accept in [
            of_prometheus,
            "application/openmetrics-text",
            "text/plain;q=0.3, application/OpenMetrics-text;q=0.3",
        ] {
            assert_eq!(preferred(accept), Format::OpenMetrics, "{accept}");
        }
    }

    #[test]
    fn the_older_format_names_metrics_after_their_samples() {
        let text = "# HELP a_build The version.\n# TYPE a_build info\na_build_info{version=\"1\"} 1\n\
                    # HELP a_jobs Jobs.\n# TYPE a_jobs counter\na_jobs_total 3\n\
                    # HELP a_jobs_open Open.\n# TYPE a_jobs_open gauge\na_jobs_open 2\n# EOF\n";
        let expected = "# HELP a_build_info The version.\n# TYPE a_build_info gauge\na_build_info{version=\"1\"} 1\n\
                        # HELP a_jobs_total Jobs.\n# TYPE a_jobs_total counter\na_jobs_total 3\n\
                        # HELP a_jobs_open Open.\n# TYPE a_jobs_open gauge\na_jobs_open 2\n";
        assert_eq!(to_prometheus(text), expected);
    }
}
