//! Sizes and times as people write and read them: `64K` in, `64 KiB` out, in powers of 1024; `10m` in.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
pub use vmstrata_server::size::parse_size;

/// Powers of 1024 in the order of their suffixes.
const SUFFIXES: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// `1.5 GiB (1610612736 bytes)`: rounded for the eye, exact for the script.
pub fn exact_size(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} bytes") } else { format!("{} ({bytes} bytes)", short_size(bytes)) }
}

/// `1.5 GiB`: at most one decimal, rounded down, so that what is shown is really there.
pub fn short_size(bytes: u64) -> String {
    let Some((letter, shift)) = SUFFIXES.iter().rev().find(|(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let whole = bytes >> shift;
    let tenth = ((u128::from(bytes) * 10) >> shift) % 10;
    if tenth == 0 { format!("{whole} {letter}iB") } else { format!("{whole}.{tenth} {letter}iB") }
}

/// Two sizes in a unit that shows that they differ: `1025 MiB` and `1024 MiB`.
pub fn apart(one: u64, other: u64) -> (String, String) {
    let shown = |shift: u32, letter: char| {
        let tenths = |bytes: u64| (u128::from(bytes) * 10) >> shift;
        let text = |bytes: u64| match (tenths(bytes) / 10, tenths(bytes) % 10) {
            (whole, 0) => format!("{whole} {letter}iB"),
            (whole, tenth) => format!("{whole}.{tenth} {letter}iB"),
        };
        (text(one), text(other))
    };
    let short = (short_size(one), short_size(other));
    if one == other || short.0 != short.1 {
        return short;
    }
    let finer = SUFFIXES.iter().rev().map(|&(letter, shift)| shown(shift, letter));
    finer.into_iter().find(|(one, other)| one != other).unwrap_or((format!("{one} B"), format!("{other} B")))
}

/// Letters of times, with their seconds.
const TIMES: [(char, u64); 5] = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400), ('w', 604_800)];

/// `30s`, `10m`, `6h`, `1d`, `1w`: at least a second, at most a year.
///
/// # Errors
/// Anything else.
pub fn parse_time(text: &str) -> Result<Duration> {
    let known = |letter: char| TIMES.iter().find(|(other, _)| *other == letter);
    let parts = text.chars().last().and_then(known).zip(text.get(..text.len().saturating_sub(1)));
    let ((_, seconds), count) = parts.context("a time is a number with s, m, h, d or w, such as 10m")?;
    let count: u64 = count.parse().context("a time is a whole number with s, m, h, d or w, such as 10m")?;
    let all = count.saturating_mul(*seconds);
    ensure!((1..=366 * 86_400).contains(&all), "a time is at least a second and at most a year");
    Ok(Duration::from_secs(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_a_number_and_a_letter() {
        assert_eq!(parse_time("10m").unwrap().as_secs(), 600);
        assert_eq!(parse_time("1w").unwrap().as_secs(), 604_800);
        for wrong in ["", "m", "10", "10M", "0s", "-1s", "1.5h", "10ä", "99999999999999999999s", "53w"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_that_differ_look_so() {
        let shown = |one, other| {
            let (one, other) = apart(one, other);
            format!("{one}, {other}")
        };
        assert_eq!(shown(1 << 30, 1025 << 20), "1024 MiB, 1025 MiB");
        assert_eq!(shown(1 << 30, 2 << 30), "1 GiB, 2 GiB");
        assert_eq!(shown(1 << 40, (1 << 40) + 512), "1073741824 KiB, 1073741824.5 KiB");
        assert_eq!(shown(1 << 20, 1 << 20), "1 MiB, 1 MiB");
    }

    #[test]
    fn sizes_read_well_and_stay_exact() {
        assert_eq!(short_size(0), "0 B");
        assert_eq!(short_size(1023), "1023 B");
        assert_eq!(short_size(65536), "64 KiB");
        assert_eq!(short_size(1536 << 20), "1.5 GiB");
        assert_eq!(short_size((1 << 30) - 1), "1023.9 MiB");
        assert_eq!(short_size(u64::MAX), "15.9 EiB");
        assert_eq!(exact_size(512), "512 bytes");
        assert_eq!(exact_size(1536 << 20), "1.5 GiB (1610612736 bytes)");
    }
}
