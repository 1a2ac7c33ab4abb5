//! Instants as people write them, in UTC: a snapshot's name must not depend on where it was taken.

/// ns since 1970 as `20261121T235959.123Z`: fit for a file name, in the order of time.
pub fn compact(ns: u64) -> String {
    let [year, month, day, hour, minute, second] = fields(ns);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}.{:03}Z", ns / 1_000_000 % 1000)
}

/// ns since 1970 as `2026-11-21T23:59:59Z`, as RFC 3339 has it.
pub fn rfc3339(ns: u64) -> String {
    let [year, month, day, hour, minute, second] = fields(ns);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month, day, hour, minute, second.
fn fields(ns: u64) -> [u64; 6] {
    let seconds = ns / 1_000_000_000;
    let [year, month, day] = date(seconds / 86_400);
    [year, month, day, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60]
}

/// Year, month and day of the month (both from 1) of a day since 1970-01-01. Years are counted from 1 March, so that a leap day ends one.
pub fn date(day: u64) -> [u64; 3] {
    const DAYS_OF_ERA: u64 = 146_097;
    let since = day + 719_468;
    let (era, day) = (since / DAYS_OF_ERA, since % DAYS_OF_ERA);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    [era * 400 + year + next, month, day]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_767_225_600, "2026-01-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds * 1_000_000_000), expected);
        }
    }

    #[test]
    fn compact_instants_are_in_the_order_of_time() {
        assert_eq!(compact(951_782_400_123_456_789), "20000229T000000.123Z");
    }
}
