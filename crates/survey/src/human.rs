//! Numbers as people read them.

/// `1.5 GiB`: powers of 1024, three digits at most.
pub(crate) fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", digits(value), UNITS[unit])
}

/// `12.3 ms`, `4.0 h`: one decimal below ten or a hundred, as fits.
pub(crate) fn duration(seconds: f64) -> String {
    const UNITS: [(f64, &str); 7] = [
        (365.0 * 86_400.0, "years"),
        (86_400.0, "d"),
        (3600.0, "h"),
        (60.0, "min"),
        (1.0, "s"),
        (1e-3, "ms"),
        (1e-6, "µs"),
    ];
    for (size, name) in UNITS {
        // Two years rather than 730 days, but 90 days rather than 0.2 years.
        if seconds >= size {
            return format!("{:.1} {name}", seconds / size);
        }
    }
    if seconds == 0.0 { "0 s".to_owned() } else { format!("{:.1} µs", seconds * 1e6) }
}

/// `12,345`: grouped by thousands, rounded.
pub(crate) fn count(value: f64) -> String {
    let plain = format!("{:.0}", value.abs());
    let mut grouped = String::from(if value <= -0.5 { "-" } else { "" });
    for (at, digit) in plain.chars().enumerate() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// `1 layer`, `2,000 layers`.
pub(crate) fn counted(number: f64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1.0 { "" } else { "s" })
}

/// `3.4`, `34`, `340`: a decimal only where it says something.
fn digits(value: f64) -> String {
    if value >= 99.95 || (value - value.round()).abs() < 0.05 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(bytes(0.0), "0 B");
        assert_eq!(bytes(1023.0), "1023 B");
        assert_eq!(bytes(65536.0), "64 KiB");
        assert_eq!(bytes(1.5 * (1u64 << 30) as f64), "1.5 GiB");
        assert_eq!(bytes(u64::MAX as f64), "16 EiB");
        assert_eq!(count(0.0), "0");
        assert_eq!(count(999.0), "999");
        assert_eq!(count(1234567.4), "1,234,567");
        assert_eq!(
            (counted(1.0, "layer"), counted(2000.0, "layer")),
            ("1 layer".to_owned(), "2,000 layers".to_owned())
        );
        assert_eq!(duration(0.0), "0 s");
        assert_eq!(duration(0.0123), "12.3 ms");
        assert_eq!(duration(7200.0), "2.0 h");
        assert_eq!(duration(90.0 * 86400.0), "90.0 d");
        assert_eq!(duration(800.0 * 86400.0), "2.2 years");
    }
}
