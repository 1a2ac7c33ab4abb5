//! The text format that every scraper reads, made from OpenMetrics.

use std::collections::HashMap;

/// Its content type.
pub(super) const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Names metrics after their samples: this format knows no suffixes, no `info` and no end.
pub(super) fn to_prometheus(text: &str) -> String {
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
